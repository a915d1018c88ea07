"""Session moves in the live router: what connects its workers, and the moves of a worker that drains.

Workers with the same `kv_store` read each other's blocks from it (a shared folder, LMCache, Mooncake store): a session
that goes to such a worker finds its blocks there, and nothing has to be sent. Between all others a move is hard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from prefixwatch.kvcache.transfer_link import KvLink
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.degradation.policy import DegradingPolicy
from prefixwatch.router.placement.dispatch import Dispatcher
from prefixwatch.router.policy import Policy, RouteRequest
from prefixwatch.router.sessions.moving import Move, MovingPolicy, Trigger

DRAIN_REASONS = (Trigger.DRAIN.value, Trigger.SCALE_IN.value)


def moving_policy(policy: Policy) -> MovingPolicy | None:
    """The part of a router's policy that moves sessions; None where it has none."""
    inner = policy.inner if isinstance(policy, DegradingPolicy) else policy
    return inner if isinstance(inner, MovingPolicy) else None


class LiveDriver:
    """The router around a moving policy."""

    sends_ahead = False

    def __init__(self, config: RouterConfig, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._stores = {worker.name: worker.kv_store for worker in config.workers}
        own = config.moves
        self._link = (
            None
            if own.kv_bytes_per_token is None
            else KvLink(own.link_gbit_per_second, own.kv_bytes_per_token, own.link_latency_seconds)
        )

    def depths(self, request: RouteRequest) -> Mapping[str, int]:
        return self._dispatcher.depths(request)

    def may_take(self, worker: str, request: RouteRequest) -> bool:
        return self._dispatcher.may_take(worker, request)

    def link(self, source: str, destination: str) -> KvLink | None:
        store = self._stores.get(source)
        return self._link if store and store == self._stores.get(destination) else None

    def link_wait_seconds(self, source: str, now: float) -> float:
        """The store serves whoever reads."""
        return 0.0

    def carry(self, move: Move) -> None:
        """The destination reads the blocks itself when the session comes."""


def moved(policy: MovingPolicy, dispatcher: Dispatcher, worker: str, trigger: str) -> dict[str, Any]:
    """Move the sessions of a worker that has begun to drain; the answer to whoever drains it."""
    moves = policy.leave(worker, Trigger(trigger), dispatcher.healthy(), dispatcher.now())
    return {
        "sessions": len(moves),
        **Counter(move.choice.kind.value for move in moves),
        "why": dict(Counter(move.choice.why.value for move in moves)),
    }
