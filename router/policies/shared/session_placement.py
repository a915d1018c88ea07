"""Where production-stack sends a request that it places by nothing else: by session, or by request rate.

By session: `uhashring.HashRing` (MD5, 160 places a worker) over the workers that may take the request, at the session.

By rate: arrivals of the last `window_seconds` / `window_seconds`, lowest first; the first worker listed that never
had a request wins outright. Ties: the first listed.

Source: vllm-project/production-stack `routing_logic.py` (`SessionRouter`, `_qps_routing`).
"""

from __future__ import annotations

from collections.abc import Sequence

from uhashring import HashRing

from prefixwatch.router.policies.shared.hash_ring import ring_position
from prefixwatch.router.policies.shared.recent_requests import RecentRequests
from prefixwatch.router.policy import Decision, Fleet, RouteRequest, Worker

REASONS = ("session", "no_statistics", "lowest_rate")
STATISTICS_WINDOW_SECONDS = 60.0


class RequestRates:
    """The request rate of each worker, as this router placed requests."""

    def __init__(self, window_seconds: float = STATISTICS_WINDOW_SECONDS) -> None:
        self._recent = RecentRequests(window_seconds)
        self._known: set[str] = set()

    def lowest(self, workers: Sequence[Worker], now_seconds: float) -> Decision:
        for worker in workers:
            if worker.name not in self._known:
                return Decision(worker.name, "no_statistics")
        self._recent.expire(now_seconds)
        rates = {worker.name: self._recent.count(worker.name) / self._recent.window_seconds for worker in workers}
        return Decision(min(rates, key=rates.__getitem__), "lowest_rate", scores=rates)

    def arrived(self, worker: str, now_seconds: float) -> None:
        self._known.add(worker)
        self._recent.expire(now_seconds)
        self._recent.add(worker, now_seconds)

    def forget(self, worker: str) -> None:
        self._known.discard(worker)
        self._recent.forget(worker)


class SessionPlacement:
    """By session where there is one, else by rate."""

    def __init__(self, window_seconds: float = STATISTICS_WINDOW_SECONDS, *, modulo: bool = False) -> None:
        """`modulo`: the session's hash modulo the number of workers, instead of the ring."""
        self.rates = RequestRates(window_seconds)
        self._modulo = modulo
        self._ring = HashRing()
        self._members: set[str] = set()

    def place(self, request: RouteRequest, fleet: Fleet) -> Decision:
        if not request.session:
            return self.rates.lowest(fleet.workers, fleet.now_seconds)
        if self._modulo:
            names = sorted(worker.name for worker in fleet.workers)
            return Decision(names[ring_position(_encodable(request.session)) % len(names)], "session")
        self._follow({worker.name for worker in fleet.workers})
        return Decision(self._ring.get_node(_encodable(request.session)), "session")

    def forget(self, worker: str) -> None:
        self.rates.forget(worker)
        self._follow(self._members - {worker})

    def _follow(self, members: set[str]) -> None:
        """Make the ring that of these workers, adding and removing only what differs."""
        for name in sorted(members - self._members):
            self._ring.add_node(name)
        for name in self._members - members:
            self._ring.remove_node(name)
        self._members = members


def _encodable(session: str) -> str:
    """Bytes of a header that are no text arrive as lone surrogates, which the ring's hash can't encode."""
    return session.encode("utf-8", "replace").decode()
