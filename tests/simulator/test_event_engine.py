"""Jumping from event to event gives what stepping one by one gives, request by request."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.kinds import KINDS
from prefixwatch.engines.model.profiles import profile
from prefixwatch.engines.model.sequence import SimRequest
from prefixwatch.engines.model.step_table import Grid, StepTable
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.router.policies import make_policy
from prefixwatch.simulator.event_engine import EventEngine
from prefixwatch.simulator.fleet import FleetSimulation
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.simulator.router import ViewKind
from prefixwatch.simulator.traffic.trace import SimulatedRequest

BLOCK = 4
STEP = StepTime(0.01, 1e-4, 1e-7, 1e-3, 1e-4, 1e-6)
TABLE = StepTable(
    Grid((1, 32, 64), (0, 64, 128), ((0.01, 0.012, 0.016), (0.02, 0.025, 0.031), (0.04, 0.05, 0.07))),
    Grid((1, 4, 8), (1, 30, 60), ((0.01, 0.011, 0.013), (0.012, 0.015, 0.02), (0.02, 0.03, 0.05))),
)
"""A table whose columns are crossed while requests decode."""

ROW = st.tuples(
    st.integers(0, 5),  # which opening
    st.integers(1, 12),  # blocks of it
    st.integers(0, 9),  # tokens after it
    st.integers(1, 40),  # output tokens
    st.floats(0.0, 0.4),  # seconds since the request before
)


def requests_of(rows: list[tuple[int, int, int, int, float]]) -> list[SimulatedRequest]:
    requests, now_s = [], 0.0
    for number, (opening, blocks, rest, output, gap) in enumerate(rows):
        now_s += gap + 1e-4 * math.sqrt(number + 2)  # no arrival at the very moment at which a step ends
        shared = [1 + opening * 1000 + k for k in range(blocks)]
        own = [10**6 + number * 100 + k for k in range(rest // BLOCK)]
        requests.append(
            SimulatedRequest(
                id=f"r{number}",
                arrival_s=now_s,
                prompt_tokens=blocks * BLOCK + rest,
                output_tokens=output,
                blocks=np.array(shared + own, dtype=np.uint64),
            )
        )
    return requests


def simulate(
    requests: list[SimulatedRequest], *, jumps: bool, policy: str, workers: int, view: ViewKind, **engine: Any
) -> SimulationResult:
    config = EngineConfig(block_size=BLOCK, **{"step_time": STEP, **engine})
    return FleetSimulation([make_policy(policy, seed=3)], config, workers, view=view, jumps=jumps).run(requests)


def assert_equal_runs(jumping: SimulationResult, stepping: SimulationResult) -> None:
    for one, other in zip(jumping.records, stepping.records, strict=True):
        for name in ("worker", "outcome", "cached_tokens", "output_tokens", "predicted_tokens", "prediction_cause"):
            assert getattr(one, name) == getattr(other, name), (one.id, name)
        for name in ("first_token_s", "end_s"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9, abs=1e-9), (one.id, name)
    assert jumping.workers == stepping.workers  # requests, counters (preemptions and recomputed tokens), evictions


@pytest.mark.parametrize(
    ("policy", "view"),
    [
        ("round_robin", "history"),
        ("least_load", "history"),
        ("cache_aware", "history"),
        ("dynamo_kv", "events"),
        ("score", "snapshots"),
        ("llmd_precise", "events"),
        ("oracle", "history"),
    ],
)
@given(
    rows=st.lists(ROW, min_size=1, max_size=40),
    workers=st.integers(1, 3),
    engine=st.fixed_dictionaries(
        {
            "step_time": st.sampled_from([STEP, TABLE]),
            "capacity_blocks": st.one_of(st.none(), st.integers(30, 80)),
            "max_num_seqs": st.integers(1, 8),
            "max_num_batched_tokens": st.integers(4, 64),
            "kind": st.sampled_from(KINDS),
        }
    ),
)
@settings(max_examples=25, deadline=None)
def test_jumps_equal_steps(
    policy: str,
    view: ViewKind,
    rows: list[tuple[int, int, int, int, float]],
    workers: int,
    engine: dict[str, Any],
) -> None:
    """Chunked prefill (small budgets), waiting requests, evictions and preemptions (small caches) included."""
    runs = [
        simulate(requests_of(rows), jumps=jumps, policy=policy, workers=workers, view=view, **engine)
        for jumps in (True, False)
    ]
    assert_equal_runs(*runs)


def test_the_drawn_fleets_preempt_evict_and_chunk() -> None:
    """The property above means something only if such fleets occur in it."""
    rng = np.random.default_rng(1)
    rows = [(int(rng.integers(6)), int(rng.integers(1, 13)), 3, 40, 0.02) for _ in range(40)]
    config = {"capacity_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    runs = [
        simulate(requests_of(rows), jumps=jumps, policy="dynamo_kv", workers=1, view="events", **config)
        for jumps in (True, False)
    ]
    assert_equal_runs(*runs)
    (worker,) = runs[0].workers
    assert worker.counters.preempted_requests > 10
    assert worker.evicted_blocks > 100


def test_a_decoding_engine_jumps_to_the_end_of_its_next_request() -> None:
    """Two requests of 1,000 and 400 output tokens: one prefill step, then two jumps."""
    engine = EventEngine(EngineConfig(step_time=profile("assumed-gpu").step_time))
    for number, tokens in enumerate((1000, 400)):
        engine.submit(SimRequest(str(number), [], 10, tokens))
    now_s, ends = 0.0, []
    while engine.begin(now_s):
        now_s = engine.ends_s
        ends.append([token.request_id for token in engine.end(now_s) if token.finish_reason is not None])
    assert ends == [[], ["1"], ["0"]]


def test_an_arrival_during_a_jump_is_admitted_at_the_end_of_the_step_in_work() -> None:
    """Steps of exactly 1 s: a request that arrives at 3.5 s is in the batch that begins at 4 s."""
    engine = EventEngine(EngineConfig(step_time=StepTime(1.0)))
    engine.submit(SimRequest("long", [], 1, 100))
    assert engine.begin(0.0)
    engine.end(engine.ends_s)
    assert engine.begin(1.0)
    assert engine.ends_s == 100.0
    late = engine.submit(SimRequest("late", [], 1, 1), 3.5)
    assert (engine.ends_s, engine.step_ends_s) == (4.0, 4.0)
    engine.end(4.0)
    assert engine.begin(4.0)
    engine.end(engine.ends_s)
    assert (late.scheduled_s, late.first_token_s) == (4.0, 5.0)
