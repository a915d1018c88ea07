"""Round robin: each worker in turn.

One counter for each set of candidates, over their names in sorted order; a change of membership starts the
new set's turn from its first worker. No ties, no defaults. Counters are kept for the 64 sets used last.

Source: vllm-project/production-stack `roundrobin` (index per sorted set of URLs). The SGLang gateway's
differs in one point: a single counter modulo the number of healthy workers.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from prefixwatch.router.policy import Decision, Fleet, Policy, RouteRequest

_SETS_REMEMBERED = 64


class RoundRobin(Policy):
    """Each worker in turn, blind to load and cache."""

    name = "round_robin"
    source = "vllm-project/production-stack roundrobin"
    reasons = ("next_in_turn",)
    deterministic = True

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._turn: OrderedDict[tuple[str, ...], int] = OrderedDict()

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        names = tuple(sorted(worker.name for worker in fleet.workers))
        turn = self._turn.get(names, 0)
        self._turn[names] = turn + 1
        self._turn.move_to_end(names)
        if len(self._turn) > _SETS_REMEMBERED:
            self._turn.popitem(last=False)
        return Decision(names[turn % len(names)], "next_in_turn")

    def on_worker_removed(self, worker: str) -> None:
        for names in [names for names in self._turn if worker in names]:
            del self._turn[names]
