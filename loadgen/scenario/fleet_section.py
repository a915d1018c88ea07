"""The `fleet` and `events` sections of a scenario: unlike workers, and what happens to them during the run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from prefixwatch.documents.units import MOST_WORKERS, BlocksOrNone
from prefixwatch.loadgen.scenario.section import Section

_WORKER = re.compile(r"engine-(\d{1,5})")
_ACTIONS = ("kill", "start", "add", "drain", "slow", "partition", "restart")
Action = Literal["kill", "start", "drain", "slow", "partition", "heal", "restart_router"]


class Workers(Section):
    """Equal workers of a fleet. They are numbered in the order of the list: engine-0, engine-1, …"""

    count: int = Field(default=1, ge=1, le=MOST_WORKERS, description="number of these workers")
    profile: str | None = Field(
        default=None, description="speed profile of these simulated engines; default: engine.profile"
    )
    capacity_blocks: BlocksOrNone = Field(
        default=None, ge=1, description="KV blocks of each; default: engine.capacity_blocks"
    )
    kind: Literal["vllm", "sglang", "tensorrt-llm"] | None = Field(
        default=None, description="system that these simulated engines imitate; default: vllm"
    )
    region: str = Field(
        default="", description="where they run: the cluster label of the router's records; for policy `topology`"
    )
    zone: str = Field(default="", description="their availability zone")
    node: str = Field(default="", description="their machine")
    gpu_group: str = Field(
        default="", description="GPUs of the machine that share NVLink or a NUMA domain; for policy `topology`"
    )
    role: Literal["prefill", "decode"] | None = Field(
        default=None, description="one side of a split fleet; `simulate` only, and then for all workers"
    )


class SlowDown(Section):
    """A worker whose steps take longer."""

    worker: str = Field(description="engine-0, engine-1, …")
    factor: float = Field(gt=1, le=1000, description="how many times as long its steps take")
    seconds: float | None = Field(default=None, gt=0, description="how long; default: to the end of the run")


class Partition(Section):
    """A worker that no longer answers, and keeps its cache."""

    worker: str = Field(description="engine-0, engine-1, …")
    seconds: float = Field(gt=0, description="how long nothing comes back from it")


class Event(Section):
    """One event at one moment; a new worker has the next number."""

    at: float = Field(ge=0, description="seconds from the start of duration_seconds")
    kill: str | None = Field(default=None, description="this worker's process is killed; its cache is lost")
    start: str | None = Field(default=None, description="a killed or drained worker starts again with an empty cache")
    add: int | None = Field(default=None, ge=1, le=1000, description="this number of workers joins the fleet")
    drain: str | None = Field(
        default=None, description="this worker gets no new requests and stops when its last one has ended"
    )
    slow: SlowDown | None = Field(default=None, description="a worker becomes slower")
    partition: Partition | None = Field(default=None, description="a worker can't be reached for a while")
    restart: Literal["router"] | None = Field(
        default=None, description="`router`: the router restarts and has lost what it remembered"
    )

    @model_validator(mode="after")
    def _one_action(self) -> Self:
        given = [name for name in _ACTIONS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"needs exactly one action and has {', '.join(given) or 'none'}: give one of {', '.join(_ACTIONS)}"
            )
        return self


@dataclass(frozen=True, slots=True)
class PlannedEvent:
    """One thing to do to the fleet."""

    at_s: float
    action: Action
    worker: int = 0
    factor: float = 1.0
    """Of `slow`; 1 is the worker's own speed again."""
    seconds: float = 0.0
    """Of `partition`."""
    title: str = ""
    """The event in words; empty for the end of an earlier one."""


@dataclass(frozen=True, slots=True)
class EventPlan:
    """All that happens, in order. Workers from number `workers` on join later."""

    events: Sequence[PlannedEvent]
    workers: int
    added: int

    @property
    def all_workers(self) -> int:
        """Workers at the start and those that join."""
        return self.workers + self.added


def event_plan(events: Sequence[Event], workers: int) -> EventPlan:
    """What happens to a fleet of this size. Raises ValueError for a worker that isn't there, or not in that state."""
    planned: list[PlannedEvent] = []
    up = dict.fromkeys(range(workers), True)
    for event in sorted(events, key=lambda each: each.at):
        where = f"events, at {event.at:g}: "
        if event.add is not None:
            first = len(up)
            title = f"{event.add} worker{'s' if event.add > 1 else ''} added"
            for number in range(first, first + event.add):
                up[number] = True
                planned.append(PlannedEvent(event.at, "start", number, title=title if number == first else ""))
        elif event.restart is not None:
            planned.append(PlannedEvent(event.at, "restart_router", title="router restarted"))
        elif event.slow is not None:
            slow, number = event.slow, _number(event.slow.worker, up, where, alive=True)
            title = f"{slow.worker} {slow.factor:g} times slower"
            planned.append(PlannedEvent(event.at, "slow", number, slow.factor, title=title))
            if slow.seconds is not None:
                planned.append(PlannedEvent(event.at + slow.seconds, "slow", number))
        elif event.partition is not None:
            cut, number = event.partition, _number(event.partition.worker, up, where, alive=True)
            title = f"{cut.worker} unreachable for {cut.seconds:g} s"
            planned.append(PlannedEvent(event.at, "partition", number, seconds=cut.seconds, title=title))
            planned.append(PlannedEvent(event.at + cut.seconds, "heal", number))
        elif event.start is not None:
            number = _number(event.start, up, where, alive=False)
            up[number] = True
            planned.append(PlannedEvent(event.at, "start", number, title=f"{event.start} started"))
        else:
            name = event.kill or event.drain or ""
            number = _number(name, up, where, alive=True)
            up[number] = False
            action: Action = "kill" if event.kill else "drain"
            planned.append(PlannedEvent(event.at, action, number, title=f"{name} {action}ed"))
        if not any(up.values()):
            raise ValueError(f"{where}no worker is left: keep at least one")
    planned.sort(key=lambda each: each.at_s)
    return EventPlan(planned, workers, len(up) - workers)


def _number(name: str, up: dict[int, bool], where: str, *, alive: bool) -> int:
    found = _WORKER.fullmatch(name)
    number = int(found[1]) if found else -1
    if number not in up:
        raise ValueError(f"{where}no worker '{name}': the fleet then has engine-0 to engine-{len(up) - 1}")
    if up[number] is not alive:
        state, first = ("runs already", "a kill or drain") if up[number] else ("isn't running", "a start")
        raise ValueError(f"{where}{name} {state}: take the event out, or put {first} before it")
    return number
