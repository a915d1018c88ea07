"""A prompt whose KV was computed by another engine."""

from __future__ import annotations

from prefixwatch.engines.model.accounts import BlocksStored
from prefixwatch.engines.model.engine import EngineConfig, EngineModel, Step
from prefixwatch.engines.model.sequence import SimRequest
from prefixwatch.engines.model.step_time import StepTime

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


def test_received_blocks_are_hits_behind_cached_ones_and_only_there() -> None:
    model = an_engine()
    model.submit(SimRequest("first", BLOCKS[:1], 5, 1))
    step(model, 0.0)
    behind = model.submit(SimRequest("behind", [*BLOCKS, 4], 17, 1, received_from=1, received_to=3))
    apart = model.submit(SimRequest("apart", [7, 8], 9, 1, received_from=1, received_to=2))
    step(model, 1.0)
    assert (behind.hit_blocks, behind.cached_tokens) == (1, 12)
    assert (apart.hit_blocks, apart.cached_tokens) == (0, 0)
    assert (model.counters.hit_tokens, model.counters.external_hit_tokens) == (12, 8)


def test_a_request_that_may_strand_is_given_back_when_what_it_follows_is_gone() -> None:
    model = an_engine()
    model.submit(SimRequest("lost", BLOCKS, 12, 1, received_from=1, received_to=2, may_strand=True))
    assert model.begin_step(0.0) is None
    (stranded,) = model.take_stranded()
    assert (stranded.id, model.waiting, model.take_stranded()) == ("lost", 0, [])
    kept = model.submit(SimRequest("lost", BLOCKS, 12, 1, received_from=1, received_to=2))
    step(model, 0.0)
    assert kept.cached_tokens == 0


def test_a_request_whose_kv_took_time_keeps_its_place_in_the_queue() -> None:
    model = EngineModel(EngineConfig(StepTime(1.0), block_size=4, max_num_seqs=1))
    model.submit(SimRequest("running", [9], 5, 3), 0.0)
    model.begin_step(0.0)
    for name, came_s in (("b", 1.0), ("c", 2.0)):
        model.submit(SimRequest(name, [], 4, 1), came_s)
    model.submit(SimRequest("a", [], 4, 1, queued_s=0.5), 3.0)
    order = []
    now_s = 1.0
    while model.running:
        order += [token.request_id for token in model.end_step(now_s) if token.finish_reason]
        if model.begin_step(now_s) is None:
            break
        now_s += 1.0
    assert order == ["running", "a", "b", "c"]
