"""How long a prefill worker stays out of a split fleet, and what one that hangs costs: for any course of events."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import cast

import aiohttp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from yarl import URL

from prefixwatch.router.config import HealthConfig, SplitConfig, WorkerConfig
from prefixwatch.router.exchange.prompt import Prompt
from prefixwatch.router.placement.ledger import Ledger, Ticket
from prefixwatch.router.serving import split as module
from prefixwatch.router.serving.health import Fault, HealthMonitor
from prefixwatch.router.serving.split import Prefilled, Split
from tests.router.fake_engine import until

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["passed", "slow", "reset", "refused", "timed_out", "heard"]),
        st.floats(0, 100),
        st.floats(0, 300),
    ),
    max_size=30,
)


class Side:
    """One prefill worker in virtual time; its `/health` always answers."""

    def __init__(self, **health: float) -> None:
        self.now = 0.0
        self.config = HealthConfig.model_validate(health)
        self.ledger = Ledger()
        self.monitor = HealthMonitor(
            [WorkerConfig(name="p", url="http://engine")],
            self.config,
            on_up=self._up,
            on_gone=self.ledger.leave,
            clock=lambda: self.now,
        )
        session = cast(aiohttp.ClientSession, None)  # nothing is sent
        self.split = Split(
            SplitConfig(), {"p"}, self.ledger, session, url=lambda worker, path: URL(), health=self.monitor
        )  # fmt: skip
        self.monitor.passed("p")

    def _up(self, name: str) -> None:
        self.ledger.join(name)


@given(EVENTS, st.integers(1, 3), st.integers(1, 4), st.floats(0, 60))
def test_whatever_happened_a_worker_that_is_well_is_back_within_its_silence_and_its_probes(
    events: list[tuple[str, float, float]], to_leave: int, to_return: int, silence: float
) -> None:
    side = Side(failures_to_leave=to_leave, successes_to_return=to_return, silent_seconds=silence)
    monitor = side.monitor
    for kind, passes, patience in events:
        side.now += passes
        if kind == "timed_out":
            monitor.timed_out("p", side.now - patience, "no answer")
        elif kind in ("reset", "refused"):
            monitor.failed("p", Fault(kind), kind)
        else:
            getattr(monitor, kind)("p")
    steps = 0
    while not monitor.is_up("p"):
        side.now += side.config.down_interval_seconds
        monitor.passed("p")
        steps += 1
        assert steps <= math.ceil(silence / side.config.down_interval_seconds) + to_return
    assert side.split.least_loaded(None) == "p"
    monitor.heard("p")
    assert "p" not in monitor.on_trial


@given(st.lists(st.floats(0.01, 20), min_size=1, max_size=150), st.floats(0, 500), st.floats(1, 40), st.floats(1, 60))
def test_a_worker_that_hangs_costs_one_prompt_per_silence_after_its_first_time_out(
    gaps: list[float], hangs_s: float, patience: float, silence: float
) -> None:
    """Prompts come after these gaps; until `hangs_s` none is answered, later ones at once."""
    side = Side(silent_seconds=silence)
    monitor, ledger = side.monitor, side.ledger
    sent, timed_out = [], []
    waiting: list[tuple[float, float, int]] = []
    tickets: dict[int, Ticket] = {}
    arrivals, at = [], 0.0
    for gap in gaps:
        at += gap
        arrivals.append(at)
    ends = max(at, hangs_s) + patience + silence + 2.0
    probes = [k * 0.25 for k in range(1, int(ends / 0.25))]
    for time, comes in sorted([(each, True) for each in arrivals] + [(each, False) for each in probes]):
        while waiting and waiting[0][0] <= time:
            side.now, sent_at, number = heapq.heappop(waiting)
            ledger.end(tickets[number])
            monitor.timed_out("p", sent_at, "no prefill")
            timed_out.append(side.now)
        side.now = time
        if not comes:
            monitor.passed("p")
        elif side.split.least_loaded(None) is not None:
            sent.append(time)
            if time < hangs_s:
                tickets[len(sent)] = ledger.admit("p", 100, time)
                heapq.heappush(waiting, (time + patience, time, len(sent)))
            else:
                monitor.heard("p")
    if timed_out:
        late = [each for each in sent if timed_out[0] <= each < hangs_s]
        assert all(b - a >= silence for a, b in pairwise(late))
    assert monitor.is_up("p")
    assert not waiting


async def test_prompts_that_wait_at_a_worker_which_is_found_to_hang_go_on_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one's patience ends; of the others nobody's would."""
    side, ends, waiting = Side(), asyncio.Event(), 0

    @asynccontextmanager
    async def silent(*_: object, timeout_seconds: float) -> AsyncIterator[None]:
        nonlocal waiting
        waiting += 1
        await (ends if waiting == 1 else asyncio.Event()).wait()
        raise TimeoutError
        yield

    monkeypatch.setattr(module, "opened", silent)
    prompt = Prompt(b"{}", "m", True, 1, None, np.empty(0, dtype=np.uint64), 0.0, 0.0)
    side.now = 1.0
    tasks = [
        asyncio.create_task(side.split.prefill("/v1/completions", prompt, CIMultiDict(), 5000, None)) for _ in range(5)
    ]  # fmt: skip
    await until(lambda: waiting == 5)
    ends.set()
    async with asyncio.timeout(60):
        assert await asyncio.gather(*tasks) == [(Prefilled.FAILED, "p")] * 5
    assert side.ledger.in_flight() == {"p": 0}
    assert (side.monitor.is_up("p"), side.monitor.flaps()) == (False, {"p": 1})
