"""What a further input of the exporter offers: request records, KV events, probes, discovery."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from prometheus_client.core import Metric


class Source(Protocol):
    """Read whenever a page is asked for; does no I/O then."""

    @property
    def name(self) -> str:
        """Its section in the fleet API."""

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        """Its families, all of `exporters.metrics_page.families`; those without samples are left out of the page."""

    def document(self, now_seconds: float) -> Mapping[str, Any]:
        """Its section of the fleet API; what isn't known is absent, with the reason under `absent`."""
