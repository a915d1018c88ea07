"""Which workers may take requests, by probes and at once by requests that fail.

A refused connection means that the process is gone, and its cache with it; any other failure takes the worker out until
a probe of its `/health` succeeds. An up worker is only taken out for being slow when two probes in a row time out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic

import aiohttp

from prefixwatch.router.config import HealthConfig, WorkerConfig

_SLOW_PROBES_ALLOWED = 1
_log = logging.getLogger(__name__)


class Fault(StrEnum):
    """What a worker did wrong."""

    REFUSED = "refused"
    """Nothing listens there."""
    RESET = "reset"
    """The connection ended before an answer."""
    UNHEALTHY = "unhealthy"
    """It answered, but with a server error."""
    SLOW = "slow"
    """No answer in time."""
    OURS = "out_of_files"
    """Not the worker's: this process may open no more files."""

    @property
    def shown(self) -> str:
        """What clients learn of it: nothing of addresses or of the engine's own words."""
        return _SHOWN[self]


_SHOWN = {
    Fault.REFUSED: "refuses connections",
    Fault.RESET: "broke the connection",
    Fault.UNHEALTHY: "failed and is not healthy",
    Fault.SLOW: "did not respond in time",
    Fault.OURS: "can't be reached, because the router may open no more files",
}


def connect_fault(error: aiohttp.ClientConnectorError) -> Fault:
    """Whose fault it is that a connection couldn't be made."""
    if error.os_error.errno in (errno.EMFILE, errno.ENFILE):
        return Fault.OURS
    return Fault.REFUSED if error.os_error.errno == errno.ECONNREFUSED else Fault.RESET


@dataclass(slots=True)
class WorkerState:
    """One worker's standing; starts as down, until a first probe says otherwise."""

    config: WorkerConfig
    up: bool = False
    reason: str = "not probed yet"
    draining: bool = False
    """An administrator wants no new requests there, until its process ends or they change their mind."""
    slow_probes: int = 0
    faults: int = 0
    failures: int = 0
    """In a row."""
    successes: int = 0
    """In a row."""
    flaps: int = 0
    """How often it left after it had been up."""
    heard_at: float = -math.inf
    """When it last answered a request, by the monitor's clock."""
    silent_until: float = -math.inf
    kick: asyncio.Event = field(default_factory=asyncio.Event)


class HealthMonitor:
    """Keeps every worker's state; `on_up` and `on_gone` are called with the worker's name at the transitions.

    `on_gone` is for a process that is no more, not for one that is merely unwell.
    """

    def __init__(
        self,
        workers: list[WorkerConfig],
        config: HealthConfig,
        *,
        on_up: Callable[[str], None],
        on_gone: Callable[[str], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.clock = clock
        self._config = config
        self._on_up = on_up
        self._on_gone = on_gone
        self.states = {worker.name: WorkerState(worker) for worker in workers}
        self.on_trial: set[str] = set()
        """Workers that let a request time out and have answered none since, however healthy they say they are."""

    def is_up(self, name: str) -> bool:
        state = self.states[name]
        return state.up and not state.draining

    def up(self) -> dict[str, bool]:
        return {name: state.up for name, state in self.states.items()}

    def flaps(self) -> dict[str, int]:
        """How often each worker left after it had been up."""
        return {name: state.flaps for name, state in self.states.items()}

    def heard(self, name: str) -> None:
        """A request's answer began."""
        state = self.states[name]
        state.heard_at = self.clock()
        self.on_trial.discard(name)
        if state.up:
            state.failures = 0

    def passed(self, name: str) -> None:
        """The worker answered a probe."""
        state = self.states[name]
        state.slow_probes = state.failures = 0
        state.successes += 1
        known = state.flaps > 0  # the first time, one success is enough
        if state.up or self.clock() < state.silent_until:
            return
        if not known or state.successes >= self._config.successes_to_return:
            state.up, state.reason = True, ""
            self._on_up(name)

    def failed(self, name: str, fault: Fault, reason: str) -> None:
        """A request or probe failed: after enough of them the worker is out, and probed without delay."""
        if fault is Fault.OURS:
            return
        state = self.states[name]
        state.faults += 1
        state.failures += 1
        state.successes = 0
        state.kick.set()
        if fault is Fault.REFUSED or not state.up or state.failures >= self._config.failures_to_leave:
            self._leave(state, reason)
        if fault is Fault.REFUSED:
            state.draining = False
            self.on_trial.discard(name)
            self._on_gone(name)

    def timed_out(self, name: str, sent_at: float, reason: str, *, replaceable: bool = True) -> None:
        """A request that was sent then got no answer in time.

        A worker that answered others meanwhile is only slow, and one that no other can replace is better than none.
        """
        state = self.states[name]
        if replaceable and state.heard_at < sent_at:
            state.silent_until = self.clock() + self._config.silent_seconds
            self.on_trial.add(name)
            state.faults += 1
            state.successes = 0
            self._leave(state, reason)

    def _leave(self, state: WorkerState, reason: str) -> None:
        state.flaps += state.up
        state.up, state.reason = False, reason

    def slow(self, name: str) -> None:
        """A probe timed out."""
        state = self.states[name]
        state.slow_probes += 1
        if not state.up or state.slow_probes > _SLOW_PROBES_ALLOWED:
            self.failed(name, Fault.SLOW, f"no answer from /health in {self._config.timeout_seconds:g} s")

    async def probe(self, name: str, session: aiohttp.ClientSession) -> bool:
        """Ask one worker's `/health` now; a fault that requests found meanwhile outranks a good answer."""
        state = self.states[name]
        before = state.faults
        timeout = aiohttp.ClientTimeout(total=self._config.timeout_seconds)
        try:
            async with session.get(f"{state.config.url}/health", timeout=timeout) as answer:
                status = answer.status
        except TimeoutError:
            self.slow(name)
        except aiohttp.ClientConnectorError as error:
            self.failed(name, connect_fault(error), f"can't connect: {error.os_error.strerror or error}")
        except aiohttp.ClientError as error:
            self.failed(name, Fault.RESET, f"/health failed: {error}")
        else:
            if status >= 500:
                self.failed(name, Fault.UNHEALTHY, f"/health answers {status}")
            elif state.faults == before:
                self.passed(name)
        return state.up

    async def run(self, name: str, session: aiohttp.ClientSession) -> None:
        """Probe one worker forever, more often while it is down."""
        state = self.states[name]
        while True:
            interval = self._config.interval_seconds if state.up else self._config.down_interval_seconds
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await state.kick.wait()
            state.kick.clear()
            try:
                await self.probe(name, session)
            except Exception:  # whatever the answer was: probing must go on
                _log.exception("the health of %s can't be probed", name)
