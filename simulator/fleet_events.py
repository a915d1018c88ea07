"""Events of a fleet in virtual time: workers are killed, join, drain, slow down, can't be reached; routers restart.

As in a live fleet: requests that had no answer yet when their worker died are sent to another one, and streams that had
begun are cut off. A worker that can't be reached stands still, and routers avoid it once two health checks have timed
out. A restarted router has lost what it remembered, while engines report again what they hold; its requests in flight
end as they would have.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.loadgen.request_log.records import Outcome
from prefixwatch.loadgen.scenario.fleet_section import EventPlan, PlannedEvent
from prefixwatch.router.config import HealthConfig
from prefixwatch.router.policy import Place, Policy
from prefixwatch.simulator.fleet import EVENT, FleetSimulation
from prefixwatch.simulator.multi_router import replicas, spread_over
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.router import Placement, ViewKind, make_views
from prefixwatch.simulator.traffic.trace import SimulatedRequest
from prefixwatch.simulator.watching import Watch, unwatched

UNSEEN_SECONDS = 2 * HealthConfig().timeout_seconds
"""From the loss of a worker's answers to the second health check that has timed out."""
_Do = Callable[[float], None]


def simulate_events(
    requests: Sequence[SimulatedRequest],
    events: EventPlan,
    *,
    policy: str,
    engines: Sequence[EngineConfig],
    seed: int = 0,
    routers: int = 1,
    view: ViewKind = "history",
    concurrency: int | None = None,
    watch: Watch = unwatched,
    places: Sequence[Place] = (),
) -> SimulationResult:
    """Serve these requests while the events happen; workers beyond the list of `engines` are like its last one.
    `places` says where the first workers are.

    Raises ValueError for a wrong policy or option.
    """
    policies = partial(replicas, policy, seed, routers)
    via = spread_over(routers, len(requests), "random", seed)
    fleet = ChangingFleet(policies, engines, events, view=view, places=places)
    return fleet.run(requests, via=via, concurrency=concurrency, watchers=watch(fleet.engines, requests))


class ChangingFleet(FleetSimulation):
    """A fleet to which things happen. `policies` makes those of the routers, at the start and when they restart."""

    def __init__(
        self,
        policies: Callable[[], Sequence[Policy]],
        engines: Sequence[EngineConfig],
        events: EventPlan,
        *,
        view: ViewKind = "history",
        places: Sequence[Place] = (),
    ) -> None:
        self._make_policies = policies
        super().__init__(policies(), engines, events.workers, view=view, spare=events.added, places=places)
        self._unreachable: set[int] = set()
        self._agenda = sorted(self._steps(events.events), key=lambda step: step[0])

    def _at_time(self, at_s: float, do: _Do) -> None:
        """Do this then, beside what was planned."""
        heapq.heappush(self._events, (at_s, EVENT, len(self._agenda)))
        self._agenda.append((at_s, do))

    def _event_times(self) -> Iterable[float]:
        return [at_s for at_s, _ in self._agenda]

    def _happen(self, number: int, now_s: float) -> None:
        self._agenda[number][1](now_s)

    def _steps(self, events: Iterable[PlannedEvent]) -> Iterable[tuple[float, _Do]]:
        for event in events:
            worker = event.worker
            does: dict[str, _Do] = {
                "kill": partial(self._kill, worker),
                "start": partial(self._start, worker),
                "drain": partial(self._drain, worker),
                "slow": partial(self._slow, worker, event.factor),
                "partition": partial(self._cut_off, worker, event.seconds),
                "heal": partial(self._heal, worker),
                "restart_router": self._restart_routers,
            }
            yield event.at_s, does[event.action]
            if event.action == "partition" and event.seconds > UNSEEN_SECONDS:
                yield event.at_s + UNSEEN_SECONDS, partial(self._avoid, worker)

    def _kill(self, number: int, now_s: float) -> None:
        name = self._names[number]
        retried = [stay for stay in self._at(name) if self._ends_with_its_worker(stay, now_s) == "retry"]
        self._renew(number)
        self._leave(number, now_s)
        for stay in retried:
            stay.record.retries += 1
            self._send(self._requests[stay.record.index], stay.record, now_s)

    def _at(self, name: str) -> list[Placement]:
        return [stay for stay in self._placements.values() if stay.record.worker == name]

    def _ends_with_its_worker(self, stay: Placement, now_s: float) -> Literal["retry", "lost"]:
        record = stay.record
        del self._placements[record.id]
        self._blocks.pop(record.id, None)
        if record.first_token_s is None:
            stay.router.fail(stay, now_s)
            return "retry"
        stay.router.end(stay, now_s)
        record.end_s, record.outcome, record.error = now_s, Outcome.CUT_OFF, "the worker was killed"
        self._send_next(record, now_s)
        return "lost"

    def _renew(self, number: int) -> None:
        """A new process takes the worker's name: nothing in its cache, nothing to do."""
        name = self._names[number]
        self._past_lives.append((name, self._models[number]))
        self._models[number] = self._by_name[name] = self._new_engine(number)
        self._due_s[number] = float("inf")
        self._unreachable.discard(number)

    def _start(self, number: int, now_s: float) -> None:
        model, name = self._models[number], self._names[number]
        if model.counters.query_tokens and not model.busy:  # drained: it had stopped
            self._renew(number)
        for router in self._routers:
            router.leave(name)
            router.join(name)

    def _drain(self, number: int, now_s: float) -> None:
        self._leave(number, now_s)

    def _leave(self, number: int, now_s: float) -> None:
        for router in self._routers:
            router.leave(self._names[number])

    def _avoid(self, number: int, now_s: float) -> None:
        if number in self._unreachable:
            for router in self._routers:
                router.avoid(self._names[number])

    def _slow(self, number: int, factor: float, now_s: float) -> None:
        model = self._models[number]
        model.at_speed(self._new_engine(number).config.step_time.scaled(factor), now_s)
        self._reschedule(number, now_s)

    def _cut_off(self, number: int, seconds: float, now_s: float) -> None:
        self._unreachable.add(number)
        if self._models[number].busy:
            self._models[number].stand_still(now_s, seconds)
            self._reschedule(number, now_s)

    def _heal(self, number: int, now_s: float) -> None:
        if number not in self._unreachable:  # killed meanwhile
            return
        self._unreachable.discard(number)
        for router in self._routers:
            router.join(self._names[number])
        if not self._models[number].busy:
            self._begin_jump(number, now_s)

    def _begin_jump(self, number: int, now_s: float) -> None:
        if number not in self._unreachable:
            super()._begin_jump(number, now_s)

    def _reschedule(self, number: int, now_s: float) -> None:
        if self._models[number].busy:
            self._schedule(number, now_s)

    def _restart_routers(self, now_s: float) -> None:
        policies = self._make_policies()
        views = [router.view for router in self._routers]
        if self._index is None and not policies[0].needs.truth:
            views, _ = make_views(policies, self._engine, self._view_kind)
        self._routers = [
            self._new_router(policy, view, old.present)
            for policy, view, old in zip(policies, views, self._routers, strict=True)
        ]
