"""Placements, and the prefix funnel: tokens held by some worker, held by the chosen one, delivered by its engine.

And how near reuse is: `kvcache.locality` of what routers report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric

from prefixwatch.exporters.metrics_page.rows import rows
from prefixwatch.exporters.requests.request import BoundedNames, PlaceOf, Request, nowhere
from prefixwatch.exporters.requests.tally import Tally
from prefixwatch.kvcache.locality import Locality, Use
from prefixwatch.kvcache.request_record import RequestRecord, mark_depths

HELD, ROUTED, DELIVERED = "held", "routed", "delivered"
_NAMES = 100
_MOST_REQUESTS = 100_000
PREFIX_BLOCKS = 8
"""Prompts whose first 8 blocks are equal count as one prefix; shorter ones by all their blocks."""
_MARK = mark_depths(PREFIX_BLOCKS).index(PREFIX_BLOCKS)


class Routing:
    """Placements and the funnel.

    * funnel: over completed requests of which all three stages are known, so that they compare;
    * affinity admission: of placements whose prompt some worker held, `held` where the chosen one held as much as any,
      else `elsewhere`;
    * topology: of the same, `in_zone` where the chosen worker is in the zone of the one that held most, else
      `out_of_zone`; only where both zones are known;
    * prompt token checks: completed requests whose prompt the router and the engine both counted.
    """

    def __init__(self, place_of: PlaceOf = nowhere) -> None:
        self._place_of = place_of
        self._policies, self._reasons = BoundedNames(_NAMES), BoundedNames(_NAMES)
        self._decisions = Tally("router_decisions")
        self._topology = Tally("topology_placements")
        self._predicted = Tally("predicted_hit_tokens")
        self._delivered = Tally("delivered_hit_tokens")
        self._funnel = Tally("prefix_funnel_tokens")
        self._admissions = Tally("affinity_admissions")
        self._checks = Tally("prompt_token_checks")
        self._block_size: int | None = None

    def record(self, request: Request) -> None:
        record, identity = request.record, request.identity
        if record.worker and record.policy:
            self._decisions.add(1, *identity, self._policies.label(record.policy), self._reasons.label(record.reason))
        self._block_size = record.block_size or self._block_size
        if request.completed and record.counted_tokens is not None and record.prompt_tokens is not None:
            same = record.counted_tokens == record.prompt_tokens
            self._checks.add(same, *identity, "equal")
            self._checks.add(not same, *identity, "different")
        if record.held_tokens and record.predicted_tokens is not None:
            self._placed(request, there=record.predicted_tokens >= record.held_tokens)
        if request.completed and record.predicted_tokens is not None and request.cached_tokens is not None:
            self._predicted.add(record.predicted_tokens, *identity)
            self._delivered.add(request.cached_tokens, *identity)
            if record.held_tokens is not None:
                self._funnel.add(record.held_tokens, *identity, HELD)
                self._funnel.add(record.predicted_tokens, *identity, ROUTED)
                self._funnel.add(request.cached_tokens, *identity, DELIVERED)

    def _placed(self, request: Request, *, there: bool) -> None:
        record, identity = request.record, request.identity
        self._admissions.add(there, *identity, "held")
        self._admissions.add(not there, *identity, "elsewhere")
        holder, chosen = self._place_of(record.held_by).zone, self._place_of(record.worker).zone
        if holder and chosen:
            self._topology.add(holder == chosen, *identity, "in_zone")
            self._topology.add(holder != chosen, *identity, "out_of_zone")

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        for tally in (
            self._decisions,
            self._topology,
            self._predicted,
            self._delivered,
            self._funnel,
            self._admissions,
            self._checks,
        ):
            yield tally.metric()
        yield rows("router_block_size_tokens", [((), self._block_size)])


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
