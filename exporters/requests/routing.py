"""What became of cached prefixes on their way: held by some worker, at the chosen one, delivered by its engine."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from exporters.requests.seen import BoundedNames, SeenRequest
from exporters.requests.sessions import PlaceOf, nowhere
from exporters.requests.tally import Tally
from kvcache.request_record import RequestRecord

HELD, ROUTED, DELIVERED = "held", "routed", "delivered"
_NAMES = 100


class Routing:
    """Placements and the funnel.

    * funnel: over completed requests of which all three stages are known, so that they compare;
    * affinity admission: of placements whose prompt some worker held, `held` where the chosen one held as much as any,
      else `elsewhere`;
    * topology: of the same, `in_zone` where the chosen worker stands in the zone of the one that held most, else
      `out_of_zone`; only where both zones are known.
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

    def record(self, seen: SeenRequest) -> None:
        record = seen.record
        if record.worker and record.policy:
            self._decisions.add(1, self._policies.label(record.policy), self._reasons.label(record.reason))
        if record.held_tokens and record.predicted_tokens is not None:
            self._placed(record, there=record.predicted_tokens >= record.held_tokens)
        if seen.completed and record.predicted_tokens is not None and seen.cached_tokens is not None:
            self._predicted.add(record.predicted_tokens)
            self._delivered.add(seen.cached_tokens)
            if record.held_tokens is not None:
                self._funnel.add(record.held_tokens, HELD)
                self._funnel.add(record.predicted_tokens, ROUTED)
                self._funnel.add(seen.cached_tokens, DELIVERED)

    def _placed(self, record: RequestRecord, *, there: bool) -> None:
        self._admissions.add(there, "held")
        self._admissions.add(not there, "elsewhere")
        holder, chosen = self._place_of(record.held_by).zone, self._place_of(record.worker).zone
        if holder and chosen:
            self._topology.add(holder == chosen, "in_zone")
            self._topology.add(holder != chosen, "out_of_zone")

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        for tally in (
            self._decisions,
            self._topology,
            self._predicted,
            self._delivered,
            self._funnel,
            self._admissions,
        ):
            yield tally.metric()
