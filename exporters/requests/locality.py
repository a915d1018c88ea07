"""How near reuse is, by request records: `kvcache.locality` of what routers report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric

from prefixwatch.exporters.requests.request import PlaceOf, Request, nowhere
from prefixwatch.kvcache.locality import Locality, Use
from prefixwatch.kvcache.request_record import RequestRecord, mark_depths

_MOST_REQUESTS = 100_000
PREFIX_BLOCKS = 8
"""Prompts whose first 8 blocks are equal count as one prefix; shorter ones by all their blocks."""
_MARK = mark_depths(PREFIX_BLOCKS).index(PREFIX_BLOCKS)


class RequestLocality:
    """The window's completed requests, by dimension. Tokens held elsewhere in the zone of the chosen worker (or on its
    node, where zones aren't known) count as held there."""

    def __init__(self, window_seconds: float, most_sessions: int, place_of: PlaceOf = nowhere) -> None:
        self._place_of = place_of
        self._locality = Locality(window_seconds, most_sessions, _MOST_REQUESTS)

    def record(self, request: Request) -> None:
        record = request.record
        if not (record.worker and request.completed):
            return
        self._locality.add(
            Use(
                at_s=request.at_seconds,
                hit_tokens=request.cached_tokens or 0,
                session=record.session,
                user=record.user,
                prefix=_prefix(record),
                held_tokens=record.held_tokens,
                near_tokens=self._near_tokens(request),
            )
        )

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        """None: the group `cache` shows `ratios`."""
        return ()

    def ratios(self, now_seconds: float) -> Mapping[str, float]:
        """By dimension, and their norm; one of which nothing is known in the window is left out."""
        return self._locality.ratios(now_seconds)

    def _near_tokens(self, request: Request) -> int | None:
        record = request.record
        if not record.held_by:
            return None
        one, other = self._place_of(record.held_by), self._place_of(record.worker)
        same_zone = one.zone == other.zone if one.zone and other.zone else bool(one.node) and one.node == other.node
        return record.held_tokens if record.held_by == record.worker or same_zone else request.cached_tokens


def _prefix(record: RequestRecord) -> str | int:
    return record.marks[min(_MARK, len(record.marks) - 1)] if record.marks else ""
