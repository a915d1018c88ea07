"""Runs an engine model in real time: one task that sleeps each step's duration and hands on what came out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from prefixwatch.engines.model.engine import EngineModel
from prefixwatch.engines.model.sequence import TokenOut

_MAX_LAG_SECONDS = 0.1
"""How late the loop may be and still catch up by sleeping less; a longer stall (a suspended process) is dropped."""


class StepLoop:
    """Times are `time.monotonic` seconds. `deliver` gets every step's tokens and the time it ended."""

    def __init__(self, model: EngineModel, deliver: Callable[[list[TokenOut], float], None]) -> None:
        self._model = model
        self._deliver = deliver
        self._work = asyncio.Event()

    def wake(self) -> None:
        """A request was submitted."""
        self._work.set()

    async def run(self) -> None:
        """Until cancelled.

        Sleeps overshoot (by up to 1 ms with uvloop, more on a busy machine). Each step is due a duration after the
        one before it was *due*, so the overshoot of one shortens the next and the mean step time is right.
        """
        due = monotonic()
        while True:
            now = monotonic()
            step = self._model.begin_step(now)
            if step is None:
                self._work.clear()
                await self._work.wait()
                due = monotonic()
                continue
            due = max(due, now - _MAX_LAG_SECONDS) + step.duration_s
            await asyncio.sleep(max(0.0, due - monotonic()))
            now = monotonic()
            self._deliver(self._model.end_step(now), now)
