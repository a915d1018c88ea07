"""Where requests go that were told by spans and probes: the ledger."""

from __future__ import annotations

from typing import Protocol

from kvcache.request_record import RequestRecord


class RequestSink(Protocol):
    """`exporters.requests.ledger.RequestLedger`."""

    def record(self, record: RequestRecord, source: str) -> None:
        """Count one request."""
