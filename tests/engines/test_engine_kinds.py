"""The schedulers of vLLM, SGLang and TensorRT-LLM: what all have in common, and in what they differ."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.engines.model.engine import EngineConfig, EngineModel
from prefixwatch.engines.model.kinds import KINDS, LONGEST_SORTED_QUEUE, EngineKind
from prefixwatch.engines.model.sequence import SequenceState, SimRequest
from prefixwatch.engines.model.step_time import StepTime

SIZE = 4
ROW = st.tuples(st.integers(0, 3), st.integers(1, 10), st.integers(0, 7), st.integers(1, 30), st.integers(0, 6))


def model_of(kind: EngineKind, capacity: int | None = 40, tokens: int = 64, sequences: int = 8) -> EngineModel:
    config = EngineConfig(
        StepTime(1.0),
        block_size=SIZE,
        capacity_blocks=capacity,
        max_num_batched_tokens=tokens,
        max_num_seqs=sequences,
        kind=kind,
    )
    return EngineModel(config)


def submit(model: EngineModel, name: str, blocks: Sequence[int], output: int = 1, rest: int = 0) -> SequenceState:
    return model.submit(SimRequest(name, list(blocks), len(blocks) * SIZE + rest, output))


def step(model: EngineModel) -> list[str]:
    """One step; the requests that gave a token."""
    assert model.begin_step(0.0) is not None
    return [token.request_id for token in model.end_step(1.0)]


@pytest.mark.parametrize("kind", KINDS)
@given(
    rows=st.lists(ROW, min_size=1, max_size=25),
    capacity=st.integers(20, 60),
    tokens=st.integers(4, 64),
    sequences=st.integers(1, 6),
)
@settings(max_examples=40, deadline=None)
def test_every_kind_serves_all_within_its_limits(
    kind: EngineKind, rows: list[tuple[int, int, int, int, int]], capacity: int, tokens: int, sequences: int
) -> None:
    """Every token asked for is generated, once; blocks, batch and budget are never exceeded; nothing is kept."""
    model = model_of(kind, capacity, tokens, sequences)
    due = sorted(rows, key=lambda row: row[4])
    submitted: list[SequenceState] = []
    generated = steps = 0
    while due or model.running or model.waiting:
        while due and due[0][4] <= steps:
            opening, blocks, rest, output, _ = due.pop(0)
            submitted.append(
                submit(model, str(len(submitted)), [opening * 100 + k for k in range(blocks)], output, rest)
            )
        started = model.begin_step(float(steps))
        steps += 1
        assert steps < 20_000
        if started is None:
            continue
        assert started.prefill_tokens + started.decode_sequences <= tokens
        assert started.prefill_tokens + started.decode_sequences > 0
        assert kind != "sglang" or not (started.prefill_tokens and started.decode_sequences)
        assert model.running <= sequences
        assert model.pool.used_blocks <= capacity
        assert model.pool.cached_blocks <= capacity
        generated += len(model.end_step(float(steps)))
    asked = [row[3] for row in rows]
    assert sorted(each.generated_tokens for each in submitted) == sorted(asked)
    assert generated == model.counters.generation_tokens == sum(asked)
    assert model.counters.query_tokens == sum(each.prompt_tokens for each in submitted)
    assert model.counters.hit_tokens == sum(each.cached_tokens or 0 for each in submitted)
    assert model.pool.used_blocks == 0
    assert kind != "tensorrt-llm" or model.counters.preempted_requests == 0


def test_sglang_computes_prompts_before_it_generates() -> None:
    model = model_of("sglang")
    submit(model, "old", [1, 2], 9)
    assert step(model) == ["old"]
    submit(model, "new", [3, 4], 9)

    assert step(model) == ["new"]
    assert step(model) == ["old", "new"]


def test_vllm_computes_a_prompt_in_the_step_in_which_others_generate() -> None:
    model = model_of("vllm")
    submit(model, "old", [1, 2], 9)
    step(model)
    submit(model, "new", [3, 4], 9)

    assert step(model) == ["old", "new"]


@pytest.mark.parametrize(("kind", "first"), [("sglang", "cached"), ("vllm", "cold"), ("tensorrt-llm", "cold")])
def test_sglang_serves_the_longest_cached_prefix_first(kind: EngineKind, first: str) -> None:
    model = model_of(kind, sequences=1)
    submit(model, "warm", [1, 2, 3])
    step(model)
    submit(model, "cold", [7, 8, 9])
    submit(model, "cached", [1, 2, 3])

    assert step(model) == [first]


def test_sglang_serves_a_long_queue_in_order_of_arrival() -> None:
    model = model_of("sglang", capacity=None, sequences=1)
    submit(model, "warm", [1, 2, 3])
    step(model)
    for number in range(LONGEST_SORTED_QUEUE):
        submit(model, f"cold-{number}", [100 + number])
    submit(model, "cached", [1, 2, 3])

    assert step(model) == ["cold-0"]
    assert step(model) == ["cached"]


def test_sglang_retracts_the_request_that_generated_least_and_keeps_its_prefix() -> None:
    """Both prompts take 4 of 10 blocks. `late` has generated less when a sixth block each is needed: it gives way."""
    model = model_of("sglang", capacity=10)
    early = submit(model, "early", [1, 2, 3, 4], 20)
    step(model)
    step(model)
    late = submit(model, "late", [5, 6, 7, 8], 20)
    while not model.counters.preempted_requests:
        step(model)

    assert (early.preemptions, late.preemptions) == (0, 1)
    assert late.generated_tokens < early.generated_tokens
    assert model.hit_depth(late.blocks) == 4
    assert (model.running, model.waiting) == (1, 1)


def test_tensorrt_llm_waits_until_the_whole_answer_fits() -> None:
    """Two prompts of 4 blocks fit into 10, but not with 3 blocks of answer each; vLLM admits both, and preempts."""
    model, other = model_of("tensorrt-llm", capacity=10), model_of("vllm", capacity=10)
    for each in (model, other):
        submit(each, "a", [1, 2, 3, 4], 12)
        submit(each, "b", [5, 6, 7, 8], 12)
        step(each)

    assert (model.running, model.waiting) == (1, 1)
    assert (other.running, other.waiting) == (2, 0)
    while model.waiting:
        step(model)
    assert model.running == 1
    while other.running or other.waiting:
        step(other)
    assert other.counters.preempted_requests > 0


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'tgi' is not a known engine; choose one of vllm, sglang, tensorrt-llm"):
        model_of("tgi")  # type: ignore[arg-type]
