"""The loop that serves a simulated engine live gives what the simulator computes, on a clock that only ticks in sleeps.

`benchmarks.predict_fleet --engine simulated` compares whole processes, on the machine's clock.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import defaultdict
from typing import Any

import pytest

from benchmarks.simulated import SharedPrefixWorkload, shared_prefix_requests
from prefixwatch.engines.model.engine import EngineConfig, EngineModel
from prefixwatch.engines.model.kinds import KINDS, EngineKind
from prefixwatch.engines.model.profiles import profile
from prefixwatch.engines.model.sequence import SequenceState, SimRequest, TokenOut
from prefixwatch.engines.simulated import step_loop
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.runs import simulate_requests
from prefixwatch.simulator.traffic.trace import SimulatedRequest

REQUESTS = shared_prefix_requests(SharedPrefixWorkload(150, 60.0, groups=6, shared_blocks=20, output_tokens=40), seed=5)


class _Selector(selectors.SelectSelector):
    """Instead of waiting, the loop's time goes on."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.passed_s += timeout or 0.0
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.passed_s


def live(
    requests: list[SimulatedRequest], placed: SimulationResult, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> dict[str, SequenceState]:
    """Each request to the engine that it was placed on, when it arrives; what became of it."""
    loop = _VirtualLoop()
    monkeypatch.setattr(step_loop, "monotonic", loop.time)
    done: dict[str, SequenceState] = {}

    async def serve() -> None:
        all_done = asyncio.Event()

        def deliver(tokens: list[TokenOut], _now_s: float) -> None:
            done.update({token.request_id: token.sequence for token in tokens if token.finish_reason})
            if len(done) == len(requests):
                all_done.set()

        models: dict[str, EngineModel] = defaultdict(lambda: EngineModel(config))
        loops = {name: step_loop.StepLoop(models[name], deliver) for name in {each.worker for each in placed.records}}
        tasks = [asyncio.create_task(each.run()) for each in loops.values()]
        for request, record in zip(requests, placed.records, strict=True):
            await asyncio.sleep(request.arrival_s - loop.time())
            blocks, name = request.blocks.tolist(), record.worker
            models[name].submit(
                SimRequest(request.id, blocks, request.prompt_tokens, request.output_tokens), loop.time()
            )
            loops[name].wake()
        await all_done.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(serve())
    return done


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity_blocks", [None, 200])
def test_live_and_virtual_engines_agree_request_by_request(
    kind: EngineKind, capacity_blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, Any] = {"kind": kind, "capacity_blocks": capacity_blocks, "max_num_batched_tokens": 512}
    config = EngineConfig(profile("h100-llama-8b").step_time.scaled(2), **limits)
    run = simulate_requests(REQUESTS, policy="cache_aware", workers=2, engine=config, arrivals="trace")
    served = live(REQUESTS, run, config, monkeypatch)
    assert len({record.worker for record in run.records}) == 2
    assert sum(worker.counters.hit_tokens for worker in run.workers) > 0
    for record in run.records:
        sequence = served[record.id]
        assert sequence.cached_tokens == record.cached_tokens
        assert sequence.first_token_s == pytest.approx(record.first_token_s, abs=1e-6)
        assert sequence.last_token_s == pytest.approx(record.end_s, abs=1e-6)
    if capacity_blocks:
        assert sum(worker.evicted_blocks for worker in run.workers) > 0
