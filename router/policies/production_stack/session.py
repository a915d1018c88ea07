"""Session: a session has a home on a ring; requests without one go where the request rate is lowest.

Session named (the router's `tenants.session_header`): its worker on `uhashring`'s ring, 160 places a worker, over the
workers that may take the request; of n workers one joining or leaving moves about 1/n of the sessions. No session:
arrivals of the last `statistics_window_seconds`, lowest first, except that the first worker listed that never had
a request wins outright.

`placement: modulo` takes the hash of the session modulo the number of workers instead, as a gateway without a ring
does; the source has no such option. It is here for comparison: one worker joining or leaving moves nearly all sessions.

Defaults: statistics_window_seconds 60, placement ring. Ties: the first listed. Deterministic. Blind to load and
cache: a busy session's worker is never left.

Source: vllm-project/production-stack `session` (`--session-key`, `--request-stats-window`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from prefixwatch.router.policies.shared.session_placement import REASONS, STATISTICS_WINDOW_SECONDS, SessionPlacement
from prefixwatch.router.policy import Decision, Fleet, Policy, RouteRequest


@dataclass(frozen=True, slots=True)
class SessionOptions:
    statistics_window_seconds: float = STATISTICS_WINDOW_SECONDS
    placement: Literal["ring", "modulo"] = "ring"


class Session(Policy):
    """Every session stays on its worker; the rest goes by request rate."""

    name = "session"
    source = "vllm-project/production-stack session"
    reasons = REASONS
    deterministic = True
    Options = SessionOptions
    options: SessionOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        modulo = self.options.placement == "modulo"
        self._placement = SessionPlacement(self.options.statistics_window_seconds, modulo=modulo)

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        return self._placement.place(request, fleet)

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self._placement.rates.arrived(worker, now_seconds)

    def on_worker_removed(self, worker: str) -> None:
        self._placement.forget(worker)
