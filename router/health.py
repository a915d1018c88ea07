"""Which workers may take requests: told by probes, and at once by requests that fail.

A refused connection means that the process is gone, and its cache with it; any other failure takes the worker out until
a probe of its `/health` succeeds. An up worker is only taken out for being slow when two probes in a row time out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import aiohttp

from router.config import HealthConfig, WorkerConfig

_SLOW_PROBES_ALLOWED = 1


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
    slow_probes: int = 0
    faults: int = 0
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
    ) -> None:
        self._config = config
        self._on_up = on_up
        self._on_gone = on_gone
        self.states = {worker.name: WorkerState(worker) for worker in workers}

    def is_up(self, name: str) -> bool:
        return self.states[name].up

    def up(self) -> dict[str, bool]:
        return {name: state.up for name, state in self.states.items()}

    def passed(self, name: str) -> None:
        """The worker answered a probe."""
        state = self.states[name]
        state.slow_probes = 0
        if not state.up:
            state.up, state.reason = True, ""
            self._on_up(name)

    def failed(self, name: str, fault: Fault, reason: str) -> None:
        """A request or probe failed: the worker is out at once, and probed without delay."""
        if fault is Fault.OURS:
            return
        state = self.states[name]
        state.faults += 1
        if state.up:
            state.kick.set()
        state.up, state.reason = False, reason
        if fault is Fault.REFUSED:
            self._on_gone(name)

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
        """Probe one worker for ever; more often while it is down."""
        state = self.states[name]
        while True:
            interval = self._config.interval_seconds if state.up else self._config.down_interval_seconds
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await state.kick.wait()
            state.kick.clear()
            await self.probe(name, session)
