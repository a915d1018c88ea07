"""The last requests' records, numbered, for whoever asks for what came after the last one it has."""

from __future__ import annotations

import secrets
from collections import deque
from itertools import islice

from prefixwatch.kvcache.request_record import RequestPage, RequestRecord

PAGE_RECORDS = 1000
"""Records on a page, at most: about 300 KB of JSON."""


class RequestLog:
    """A ring of records; the first one has number 1. `started` names this log's life."""

    def __init__(self, capacity: int) -> None:
        self.started = secrets.token_hex(8)
        self._records: deque[RequestRecord] = deque(maxlen=capacity)
        self._last = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        self._records.append(record)
        self._last += 1

    def page(self, after: int, limit: int = PAGE_RECORDS) -> RequestPage:
        """What came after record number `after`, oldest first, at most `limit`; a short page is the last one.

        `first` is the number of its first record, or that which the next one will have.
        """
        oldest = self._last - len(self._records) + 1
        first = min(max(after + 1, oldest), self._last + 1)
        begin = first - oldest
        return RequestPage(self.started, first, list(islice(self._records, begin, begin + limit)))
