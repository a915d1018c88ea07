"""Power of two choices: the better of two random workers.

Draw two different workers. Where the engines of both report their KV usage, the one with the lower usage
wins, else the one with fewer requests in flight from this router. On equality the one drawn first wins. A
single worker is taken as it is. No tunable defaults; the draw is seeded.

Source: the SGLang gateway, `power_of_two`, which compares KV tokens in use. Usage is compared as a ratio
here, which orders workers of one size the same way.
"""

from __future__ import annotations

from prefixwatch.router.policy import Decision, Fleet, Needs, Policy, RouteRequest


class PowerOfTwo(Policy):
    """The less loaded of two workers drawn at random."""

    name = "power_of_two"
    source = "SGLang gateway (smg) power_of_two"
    needs = Needs(engine_load=True)
    reasons = ("only_worker", "lower_kv_usage", "fewer_in_flight")

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        if len(fleet.workers) == 1:
            return Decision(fleet.workers[0].name, "only_worker")
        first, second = self.rng.sample(list(fleet.workers), 2)
        usage = first.kv_usage_ratio, second.kv_usage_ratio
        if usage[0] is not None and usage[1] is not None:
            reason, loads = "lower_kv_usage", (usage[0], usage[1])
        else:
            reason, loads = "fewer_in_flight", (float(first.in_flight), float(second.in_flight))
        chosen = first if loads[0] <= loads[1] else second
        return Decision(chosen.name, reason, scores={first.name: loads[0], second.name: loads[1]})
