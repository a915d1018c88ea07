"""A scenario's events, done to running engines and their router while a load is sent.

A slow engine: a simulated one computes slower; the processes of a real one are stopped for a part of each tenth of a
second. An unreachable engine: its processes are stopped and go on later, with their cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

from prefixwatch.engines import fleet
from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.engines.process import ManagedProcess
from prefixwatch.loadgen.scenario.fleet_section import EventPlan, PlannedEvent
from prefixwatch.router.config import RouterConfig
from prefixwatch.stack.local.fleet import start_router

_PERIOD_SECONDS = 0.1
_POLL_SECONDS = 0.1
_TIMEOUT = aiohttp.ClientTimeout(total=10.0)


class LocalRouter:
    """A router process that can be restarted, and asked to drain a worker."""

    def __init__(self, config: RouterConfig, folder: Path) -> None:
        self.url = f"http://{config.host}:{config.port}"
        self._config = config
        self._folder = folder
        self._process: ManagedProcess | None = None
        self._starts = 0

    async def start(self) -> None:
        """Raises ProcessFailed naming its log."""
        folder = self._folder / f"restart-{self._starts}" if self._starts else self._folder
        self._starts += 1
        self._process = await start_router(self._config, folder)

    async def stop(self) -> None:
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def drain(self, worker: str) -> int:
        """No new requests for this worker; returns how many it still has."""
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            address = f"{self.url}/router/workers/{worker}/drain"
            async with session.post(address) as response:
                response.raise_for_status()
                return int((await response.json())["in_flight"])


class FleetDriver:
    """Does what a plan says to these engines. The list has those that join later too, and gets the restarted ones."""

    def __init__(self, plan: EventPlan, engines: list[EngineHandle]) -> None:
        self._plan = plan
        self._engines = engines
        self._zero: asyncio.Future[float] | None = None
        self._slow: dict[int, asyncio.Task[None]] = {}
        self.failures: list[str] = []
        """Events that couldn't be done, and why."""

    async def prepare(self) -> None:
        """The fleet as it is at the start of a run."""
        for number, engine in enumerate(self._engines):
            if number >= self._plan.workers:
                await asyncio.to_thread(engine.process.kill)
            elif not engine.process.alive:
                self._engines[number] = await fleet.restart(engine)

    @property
    def present(self) -> list[EngineHandle]:
        """The engines of the start."""
        return self._engines[: self._plan.workers]

    @contextlib.asynccontextmanager
    async def acting(self, router: LocalRouter) -> AsyncIterator[Callable[[dict[str, Any]], None]]:
        """Inside, the events happen; the value takes the load generator's progress, which has its clock."""
        loop = asyncio.get_running_loop()
        zero = self._zero = loop.create_future()

        def heard(progress: dict[str, Any]) -> None:
            if progress.get("elapsed_s") is not None and not zero.done():
                zero.set_result(time.monotonic() - progress["elapsed_s"])

        tasks = [asyncio.create_task(self._when_due(event, router)) for event in self._plan.events]
        try:
            yield heard
        finally:
            for task in (*tasks, *self._slow.values()):
                task.cancel()
            await asyncio.gather(*tasks, *self._slow.values(), return_exceptions=True)
            self._slow.clear()
            for engine in self._engines:
                engine.process.resume()
                if engine.process.alive:
                    await self._set_speed(engine, 1.0)

    async def _when_due(self, event: PlannedEvent, router: LocalRouter) -> None:
        assert self._zero is not None
        zero = await asyncio.shield(self._zero)
        await asyncio.sleep(max(0.0, zero + event.at_s - time.monotonic()))
        try:
            await self._do(event, router)
        except Exception as error:  # whatever it was, the run goes on and says so
            self.failures.append(f"{event.title or event.action} at {event.at_s:g} s: {error}")

    async def _do(self, event: PlannedEvent, router: LocalRouter) -> None:
        engine = self._engines[event.worker]
        match event.action:
            case "kill":
                await asyncio.to_thread(engine.process.kill)
            case "start":
                self._engines[event.worker] = await fleet.restart(engine)
            case "drain":
                in_flight = await router.drain(engine.name)
                while in_flight:
                    await asyncio.sleep(_POLL_SECONDS)
                    in_flight = await router.drain(engine.name)
                await asyncio.to_thread(engine.process.stop)
            case "slow":
                await self._slow_down(event.worker, event.factor)
            case "partition":
                engine.process.pause()
            case "heal":
                engine.process.resume()
            case "restart_router":
                await router.restart()

    async def _slow_down(self, number: int, factor: float) -> None:
        engine = self._engines[number]
        if engine.kind == "simulated":
            await self._set_speed(engine, factor)
            return
        if (earlier := self._slow.pop(number, None)) is not None:
            earlier.cancel()
            engine.process.resume()
        if factor > 1:
            self._slow[number] = asyncio.create_task(_stutter(engine.process, factor))

    async def _set_speed(self, engine: EngineHandle, factor: float) -> None:
        if engine.kind != "simulated" or not any(event.action == "slow" for event in self._plan.events):
            return
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            address = f"{engine.url}/simulation/slow_factor"
            async with session.post(address, json={"slow_factor": factor}) as response:
                response.raise_for_status()


async def _stutter(process: ManagedProcess, factor: float) -> None:
    """Let the process run for one part in `factor` of the time."""
    while True:
        process.pause()
        await asyncio.sleep(_PERIOD_SECONDS * (1 - 1 / factor))
        process.resume()
        await asyncio.sleep(_PERIOD_SECONDS / factor)
