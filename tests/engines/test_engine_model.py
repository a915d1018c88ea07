"""The engine model: continuous batching, prefix reuse, preemption, and the published hit rates of real traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.engines.model.accounts import BlockEvicted, BlocksStored, CacheCleared
from prefixwatch.engines.model.engine import EngineConfig, EngineModel
from prefixwatch.engines.model.sequence import RequestError, SequenceState, SimRequest, TokenOut
from prefixwatch.engines.model.step_time import StepTime

SIZE = 4
TRACES = Path(__file__).parents[3] / "shared" / "data" / "mooncake"


def engine(capacity_blocks: int | None = None, **limits: int | bool | None) -> EngineModel:
    values = {"step_time": StepTime(1.0), "block_size": SIZE, "capacity_blocks": capacity_blocks, **limits}
    return EngineModel(EngineConfig(**values))  # type: ignore[arg-type]  # a mixed dictionary of keyword arguments


def request(name: str, prompt_tokens: int, max_tokens: int = 1, family: int = 0, shared_blocks: int = 99) -> SimRequest:
    """A prompt that shares its first blocks with its family and is its own after them."""
    own = 1000 * (1 + sum(map(ord, name)))
    blocks = [(family * 100 if k < shared_blocks else own) + k for k in range(prompt_tokens // SIZE)]
    return SimRequest(name, blocks, prompt_tokens, max_tokens)


def run(model: EngineModel, now_s: float = 0.0) -> list[tuple[float, list[TokenOut]]]:
    """Step until idle; the time each step ended and what came out."""
    found = []
    while (step := model.begin_step(now_s)) is not None:
        now_s += step.duration_s
        found.append((now_s, model.end_step(now_s)))
    return found


def names(tokens: list[TokenOut]) -> list[str]:
    return [token.request_id for token in tokens]


def test_a_lone_request_takes_a_step_to_prefill_and_one_for_each_further_token() -> None:
    model = engine()
    sequence = model.submit(request("a", 10, max_tokens=3), now_s=5.0)
    assert [(at, names(tokens)) for at, tokens in run(model, 5.0)] == [(6.0, ["a"]), (7.0, ["a"]), (8.0, ["a"])]
    assert (sequence.scheduled_s, sequence.first_token_s, sequence.last_token_s) == (5.0, 6.0, 8.0)
    assert (sequence.cached_tokens, sequence.finish_reason) == (0, "length")


def test_the_last_token_of_a_prompt_is_never_reused() -> None:
    model = engine()
    for name, prompt_tokens, cached in (("a", 16, 0), ("b", 16, 12), ("c", 17, 16), ("d", 18, 16)):
        sequence = model.run_alone(request(name, prompt_tokens))
        assert (name, sequence.cached_tokens) == (name, cached)
    assert model.counters.hit_blocks == 0 + 4 + 4 + 4


def test_a_hit_needs_every_block_before_it() -> None:
    model = engine()
    model.run_alone(SimRequest("a", [1, 2, 3], 12, 1))
    assert model.hit_depth([1, 2, 9]) == 2
    assert model.hit_depth([9, 2, 3]) == 0


def test_blocks_can_be_reused_only_after_the_step_that_computes_them() -> None:
    model = engine()
    first, second = model.submit(request("a", 12)), model.submit(request("b", 12))
    model.begin_step(0.0)
    third = model.submit(request("c", 12))
    model.end_step(1.0)
    run(model, 1.0)
    assert [sequence.cached_tokens for sequence in (first, second, third)] == [0, 0, 8]
    assert model.pool.cached_blocks == 3


def test_a_long_prompt_is_prefilled_in_chunks_beside_running_decodes() -> None:
    model = engine(max_num_batched_tokens=8)
    model.submit(request("a", 4, max_tokens=4))
    model.submit(request("b", 20, max_tokens=1, family=1))
    steps = []
    while (step := model.begin_step(0.0)) is not None:
        steps.append((step.prefill_tokens, step.decode_sequences, names(model.end_step(0.0))))
    assert steps == [(8, 0, ["a"]), (7, 1, ["a"]), (7, 1, ["a"]), (2, 1, ["a", "b"])]


def test_a_chunk_can_be_reused_while_the_rest_of_its_prompt_waits() -> None:
    model = engine(max_num_batched_tokens=8)
    model.submit(request("a", 24))
    model.begin_step(0.0)
    model.end_step(1.0)
    assert model.hit_depth(request("b", 24).blocks) == 2


def test_first_come_first_served_within_the_sequence_limit() -> None:
    model = engine(max_num_seqs=2)
    for name in "abc":
        model.submit(request(name, 4, max_tokens=2))
    model.begin_step(0.0)
    assert (model.running, model.waiting) == (2, 1)
    assert [names(tokens) for _, tokens in [(0, model.end_step(1.0)), *run(model, 1.0)]] == [
        ["a", "b"],
        ["a", "b"],
        ["c"],
        ["c"],
    ]


def test_step_time_sees_the_work_of_the_batch() -> None:
    step_time = StepTime(0.0, 1.0, 0.0, 100.0, 10_000.0, 0.0)
    model = EngineModel(EngineConfig(step_time=step_time, block_size=SIZE))
    model.submit(request("a", 6, max_tokens=2))
    durations = []
    while (step := model.begin_step(0.0)) is not None:
        durations.append(step.duration_s)
        model.end_step(0.0)
    assert durations == [106.0, 10_000.0]


def test_preempted_work_is_recomputed_and_not_booked_as_prefix_hits() -> None:
    """vllm-project/vllm#25780 (EM01): a workload without reuse must show no hits, however often it is preempted."""
    model = engine(capacity_blocks=6)
    sequences = [model.submit(request(name, 8, max_tokens=12, family=k)) for k, name in enumerate("ab")]
    run(model)
    assert model.counters.preempted_requests >= 1
    assert model.counters.recomputed_tokens >= 8
    assert (model.counters.hit_tokens, model.counters.query_tokens) == (0, 16)
    assert [(s.generated_tokens, s.cached_tokens) for s in sequences] == [(12, 0), (12, 0)]
    assert sum(s.preemptions for s in sequences) == model.counters.preempted_requests


def test_the_last_admitted_request_is_preempted_and_nobody_overtakes_it() -> None:
    model = engine(capacity_blocks=4)
    first = model.submit(request("first", 7, max_tokens=9))
    last = model.submit(request("last", 7, max_tokens=9, family=1))
    later = model.submit(request("later", 3, max_tokens=1, family=2))
    run(model)
    assert (first.preemptions, last.preemptions) == (0, 1)
    assert first.last_token_s is not None
    assert later.scheduled_s is not None
    assert later.scheduled_s >= first.last_token_s
    assert model.pool.used_blocks == 0


def test_an_abort_leaves_nothing_behind_wherever_the_request_is() -> None:
    model = engine(max_num_seqs=1)
    model.submit(request("running", 8, max_tokens=5))
    model.submit(request("waiting", 8, max_tokens=5))
    model.begin_step(0.0)
    assert model.abort("running", 0.5)
    assert model.abort("waiting", 0.5)
    assert model.end_step(1.0) == []
    assert (model.running, model.waiting, model.pool.used_blocks, model.pool.cached_blocks) == (0, 0, 0, 0)
    assert model.begin_step(1.0) is None
    assert not model.abort("running", 2.0)


def test_an_aborted_request_leaves_the_batch_and_the_others_go_on() -> None:
    model = engine()
    model.submit(request("a", 8, max_tokens=3))
    model.submit(request("b", 8, max_tokens=3, family=1))
    model.begin_step(0.0)
    model.abort("a", 0.5)
    assert names(model.end_step(1.0)) == ["b"]
    assert [names(tokens) for _, tokens in run(model, 1.0)] == [["b"], ["b"]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (SimRequest("a", [], 32, 1), "leaves no room for output: the model's maximum length is 32"),
        (SimRequest("a", [], 0, 1), "at least 1 prompt token"),
        (SimRequest("a", [], 1, 0), "at least 1 prompt token and 1 output token"),
        (SimRequest("a", [1, 2, 3], 8, 1), "3 block hashes for a prompt of 8 tokens in blocks of 4"),
        (SimRequest("a", [], 20, 12), "needs 8 KV blocks and the engine has 7"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused(wrong: SimRequest, message: str) -> None:
    model = engine(capacity_blocks=7, max_model_len=32)
    with pytest.raises(RequestError, match=message):
        model.submit(wrong)
    assert model.begin_step(0.0) is None


def test_an_id_in_use_is_refused() -> None:
    model = engine()
    model.submit(request("a", 8))
    with pytest.raises(RequestError, match="'a' is already being served"):
        model.submit(request("a", 8))


def test_output_ends_at_the_models_length_whatever_was_asked() -> None:
    model = engine(max_model_len=16)
    sequence = model.run_alone(SimRequest("a", [], 10, 100, finish_reason="stop"))
    assert (sequence.generated_tokens, sequence.finish_reason) == (6, "length")


def test_events_tell_every_block_that_came_and_went_in_order() -> None:
    model = engine(capacity_blocks=3, report_events=True)
    model.run_alone(request("a", 8))
    model.run_alone(request("b", 9))
    model.run_alone(request("c", 8, family=1))
    assert not model.reset_prefix_cache() or model.pool.cached_blocks == 0
    assert model.drain_events() == [
        BlocksStored("a", 0, 2),
        BlockEvicted(1),
        BlocksStored("c", 0, 2),
        CacheCleared(),
    ]
    assert model.drain_events() == []


def test_the_cache_is_not_reset_under_a_running_request() -> None:
    model = engine()
    model.run_alone(request("a", 8))
    model.submit(request("b", 8))
    model.begin_step(0.0)
    assert not model.reset_prefix_cache()
    model.end_step(1.0)
    assert model.reset_prefix_cache()
    assert model.run_alone(request("c", 8)).cached_tokens == 0


def test_the_same_requests_give_the_same_run() -> None:
    def once() -> list[tuple[float, list[tuple[str, int]]]]:
        model = engine(capacity_blocks=12, max_num_batched_tokens=16)
        for k in range(20):
            model.submit(request(f"r{k}", 4 + k, max_tokens=1 + k % 5, family=k % 3, shared_blocks=2))
        return [(at, [(token.request_id, token.position) for token in tokens]) for at, tokens in run(model)]

    assert once() == once()


plans = st.lists(
    st.tuples(st.integers(1, 24), st.integers(1, 8), st.integers(0, 2), st.integers(0, 6), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(plans, st.integers(8, 16), st.integers(1, 20), st.integers(1, 4))
def test_every_request_ends_and_the_books_balance(
    plan: list[tuple[int, int, int, int, bool]], capacity: int, budget: int, seqs: int
) -> None:
    """Whatever the load, with preemptions and aborts: right token counts, no block held at the end, sums that agree."""
    model = engine(capacity_blocks=capacity, max_num_batched_tokens=budget, max_num_seqs=seqs, report_events=True)
    sequences: list[SequenceState] = []
    for k, (prompt, output, family, shared, _) in enumerate(plan):
        sequences.append(model.submit(request(f"r{k}", prompt, output, family, shared)))
    for steps in range(2000):
        if model.begin_step(steps) is None:
            break
        for sequence, (*_, aborts) in zip(sequences, plan, strict=True):
            if aborts and steps == 3:
                model.abort(sequence.id, steps)
        model.end_step(steps + 1)
    whole = [sequence for sequence in sequences if sequence.finish_reason != "abort"]
    assert all(sequence.generated_tokens == sequence.max_tokens for sequence in whole)
    assert (model.running, model.waiting, model.pool.used_blocks) == (0, 0, 0)
    assert model.counters.generation_tokens == sum(sequence.generated_tokens for sequence in sequences)
    assert model.counters.hit_tokens == sum(sequence.cached_tokens or 0 for sequence in sequences)
    events = model.drain_events()
    stored = sum(event.count for event in events if isinstance(event, BlocksStored))
    evicted = sum(isinstance(event, BlockEvicted) for event in events)
    assert stored - evicted == model.pool.cached_blocks


@pytest.mark.parametrize("capacity", [None, 1000, 5000, 10_000, 50_000])
@pytest.mark.parametrize("trace", ["conversation", "synthetic"])
def test_block_hit_rates_of_the_mooncake_traces(trace: str, capacity: int | None) -> None:
    """Mooncake FAST'25, one engine, served one after another: the reference figures of an LRU cache, in percent."""
    file = TRACES / f"{trace}_trace.jsonl"
    if not file.is_file():
        pytest.skip(f"the public trace is not at {file}")
    expected = {
        ("conversation", None): 36.64,
        ("conversation", 1000): 4.45,
        ("conversation", 5000): 11.18,
        ("conversation", 10_000): 21.16,
        ("conversation", 50_000): 35.46,
        ("synthetic", None): 63.96,
        ("synthetic", 1000): 8.41,
        ("synthetic", 5000): 27.93,
        ("synthetic", 10_000): 42.39,
        ("synthetic", 50_000): 63.96,
    }
    model = EngineModel(EngineConfig(StepTime(0.0), 512, capacity, max_num_batched_tokens=1 << 20))
    for number, line in enumerate(file.read_text().splitlines()):
        row = json.loads(line)
        model.run_alone(SimRequest(str(number), row["hash_ids"], row["input_length"], max_tokens=1))
    rate = 100 * model.counters.hit_blocks / model.counters.query_blocks
    assert rate == pytest.approx(expected[trace, capacity], abs=0.01)
