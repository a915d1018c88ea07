"""A prompt whose KV was computed by another engine."""

from __future__ import annotations

from engines.model import BlocksStored, EngineConfig, EngineModel, SimRequest, Step
from engines.step_time import StepTime

BLOCKS = [1, 2, 3]


def an_engine(capacity_blocks: int | None = 8) -> EngineModel:
    return EngineModel(EngineConfig(StepTime(1.0), block_size=4, capacity_blocks=capacity_blocks, report_events=True))


def arrived(name: str, blocks: list[int], prompt_tokens: int, max_tokens: int = 1) -> SimRequest:
    return SimRequest(name, blocks, prompt_tokens, max_tokens, arrived_with_kv=True)


def step(model: EngineModel, now_s: float) -> Step:
    found = model.begin_step(now_s)
    assert found is not None
    model.end_step(now_s + found.duration_s)
    return found


def test_only_the_last_token_is_computed_and_all_blocks_are_taken() -> None:
    model = an_engine()
    sequence = model.submit(arrived("a", BLOCKS, 12, max_tokens=2))
    begun = model.begin_step(0.0)
    assert begun is not None
    assert begun.prefill_tokens == 1
    assert model.pool.used_blocks == 3
    model.end_step(1.0)
    assert sequence.first_token_s == 1.0
    step(model, 1.0)
    assert (sequence.finish_reason, model.pool.used_blocks) == ("length", 0)


def test_its_blocks_are_there_for_later_prompts() -> None:
    model = an_engine()
    model.run_alone(arrived("a", BLOCKS, 12))
    assert model.drain_events() == [BlocksStored("a", 0, 3)]
    assert model.hit_depth(BLOCKS) == 3
    assert model.run_alone(SimRequest("b", BLOCKS, 12, 1)).cached_tokens == 8


def test_cached_blocks_are_shared_and_nothing_counts_as_looked_up() -> None:
    model = an_engine(capacity_blocks=5)
    model.run_alone(arrived("a", BLOCKS, 12))
    model.submit(arrived("b", [*BLOCKS, 4], 16))
    assert step(model, 0.0).prefill_tokens == 1
    assert (model.counters.query_tokens, model.counters.hit_tokens, model.counters.query_blocks) == (0, 0, 0)
    assert model.hit_depth([*BLOCKS, 4]) == 4


def test_it_waits_where_its_blocks_do_not_fit() -> None:
    model = an_engine(capacity_blocks=4)
    model.submit(arrived("a", BLOCKS, 12, max_tokens=2))
    model.submit(arrived("b", [7, 8], 8))
    step(model, 0.0)
    assert (model.running, model.waiting) == (1, 1)
    step(model, 1.0)
    step(model, 2.0)
    assert (model.running, model.waiting) == (0, 0)


def test_preempted_it_is_computed_like_any_other() -> None:
    model = an_engine(capacity_blocks=5)
    model.submit(arrived("a", [1, 2], 8, max_tokens=8))
    second = model.submit(arrived("b", [7, 8], 8, max_tokens=8))
    now_s, computed = 0.0, []
    while model.running or model.waiting:
        computed.append(step(model, now_s).prefill_tokens)
        now_s += 1.0
    assert second.preemptions == 1
    assert computed[0] == 2  # the last token of both
    assert max(computed[1:]) > 1
    assert model.pool.used_blocks == 0
