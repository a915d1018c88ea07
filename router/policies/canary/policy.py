"""Canary: one policy beside another, by a share of the sessions, until an objective decides between them.

A session (a request without one: by itself) belongs to the canary where xxh3_64(its name) / 2^64 < share, so it stays
with its policy throughout a trial, in every router and after a restart. A request is good when its first token comes
within `ttft_seconds` of its placement. `router.policies.canary.trial` says when the canary takes over or goes.

Both policies see the whole fleet and its load; each hears of its own requests only. A turn that a move placed
(`router.sessions.moving`) counts for the arm of its session. The arms share the workers, so
a canary that spoils caches or builds queues harms its control too: with a large share a trial understates the
difference.

Reasons are <arm>_<state>; the scores are the chosen policy's. Defaults: share 0.1, ttft_seconds 0.5, min_requests 200,
margin_ratio 0.02, most_seconds 3600, cool_down_seconds 3600.

Source: ours.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from xxhash import xxh3_64_intdigest

from prefixwatch.router.policies.canary.trial import Arm, Limits, State, Trial
from prefixwatch.router.policy import Decision, Fleet, Memory, Needs, Policy, RouteRequest

_log = logging.getLogger("prefixwatch.router")


@dataclass(frozen=True, slots=True)
class CanaryOptions:
    control: str = "cache_aware"
    canary: str = "score"
    share: float = 0.1
    ttft_seconds: float = 0.5
    min_requests: int = 200
    margin_ratio: float = 0.02
    most_seconds: float = 3600.0
    cool_down_seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request that isn't judged yet, or that its policy hasn't seen the end of."""

    arm: Arm
    began_seconds: float
    judged: bool = False


class Canary(Policy):
    """Two policies side by side, by session; the better one stays."""

    name = "canary"
    source = "prefixwatch"
    needs = Needs(tokens=True, cache_view=True, engine_load=True)
    reasons = ("canary_trial", "control_trial", "canary_promoted", "control_rolled_back")
    Options = CanaryOptions
    options: CanaryOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        own = self.options
        self.arms: dict[Arm, Policy] = {
            "canary": _arm("canary", own.canary, seed),
            "control": _arm("control", own.control, seed),
        }
        self.needs = _union(*(policy.needs for policy in self.arms.values()))
        self.trial = Trial(Limits(own.min_requests, own.margin_ratio, own.most_seconds, own.cool_down_seconds))
        self._pending: dict[RouteRequest, _Pending] = {}
        self._chosen: tuple[RouteRequest | None, Arm] = (None, "control")

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        arm, state = self._arm_of(request, fleet.now_seconds)
        decision = self.arms[arm].choose(request, fleet)
        self._chosen = request, arm
        return replace(decision, reason=f"{arm}_{state}")

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        before = self._pending.get(request)
        chosen, arm = self._chosen
        if before is not None:
            arm = before.arm
        elif chosen is not request:  # placed by a policy around this one, such as a move
            arm, _ = self._arm_of(request, now_seconds)
        self._pending[request] = _Pending(arm, before.began_seconds if before is not None else now_seconds)
        self.arms[arm].on_admit(request, worker, now_seconds)

    def on_first_token(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        own = self._pending.get(request)
        if own is None:
            return
        self._judge(own, now_seconds - own.began_seconds <= self.options.ttft_seconds, now_seconds)
        self._pending[request] = replace(own, judged=True)
        self.arms[own.arm].on_first_token(request, worker, now_seconds)

    def on_end(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        own = self._pending.pop(request, None)
        if own is None:
            return
        self._judge(own, False, now_seconds)
        self.arms[own.arm].on_end(request, worker, now_seconds)

    def on_worker_removed(self, worker: str) -> None:
        for policy in self.arms.values():
            policy.on_worker_removed(worker)

    def on_close(self) -> None:
        for policy in self.arms.values():
            policy.on_close()

    def memory(self) -> Memory:
        sizes = [policy.memory() for policy in self.arms.values()]
        return Memory(sum(size.entries for size in sizes), sum(size.bytes for size in sizes))

    def _arm_of(self, request: RouteRequest, now_seconds: float) -> tuple[Arm, State]:
        """Whose the request is in the state that the trial is in now."""
        changes = len(self.trial.transitions)
        state = self.trial.advance(now_seconds)
        self._report(changes)
        return (
            "canary" if state == "promoted" or (state == "trial" and self._in_canary(request)) else "control"
        ), state

    def _in_canary(self, request: RouteRequest) -> bool:
        name = (request.session or request.id).encode("utf-8", "surrogateescape")
        return xxh3_64_intdigest(name) < self.options.share * 2**64

    def _judge(self, own: _Pending, good: bool, now_seconds: float) -> None:
        if own.judged:
            return
        changes = len(self.trial.transitions)
        self.trial.ended(own.arm, good, own.began_seconds, now_seconds)
        self._report(changes)

    def _report(self, changes: int) -> None:
        for change in self.trial.transitions[changes:]:
            names = self.options.canary, self.options.control
            _log.info("canary %s beside %s: %s (%s)", *names, change.state, change.why)


def _arm(arm: str, spec: str, seed: int) -> Policy:
    from prefixwatch.router.policies import make_policy  # noqa: PLC0415  # which lists this module

    if spec.partition("{")[0].strip() == Canary.name:
        raise ValueError(f"policy canary: {arm} is {spec}: a canary has no canary of its own: name another policy")
    policy = make_policy(spec, seed=seed)
    if policy.needs.truth:
        raise ValueError(f"policy canary: {arm} is {spec}: it needs the engines' true state: name another policy")
    return policy


def _union(one: Needs, other: Needs) -> Needs:
    return Needs(
        tokens=one.tokens or other.tokens,
        cache_view=one.cache_view or other.cache_view,
        events=one.events or other.events,
        engine_load=one.engine_load or other.engine_load,
        blocks_only=one.blocks_only and other.blocks_only,
        text=one.text or other.text,
    )
