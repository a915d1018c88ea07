"""A split fleet in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulated import SharedPrefixWorkload, session_requests, shared_prefix_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.loadgen.request_log.records import Outcome
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policy import Decision, Fleet, Policy, RouteRequest
from prefixwatch.simulator.disaggregation.fleet import (
    DisaggregatedResult,
    DisaggregatedSimulation,
    simulate_disaggregated,
)
from prefixwatch.simulator.disaggregation.policies import Disaggregated, DisaggregationOptions
from prefixwatch.simulator.traffic.trace import SimulatedRequest

BASE_S, PER_TOKEN_S = 0.01, 1 / 12_000
ENGINE = EngineConfig(StepTime(base_s=BASE_S, per_prefill_token_s=PER_TOKEN_S), block_size=16, capacity_blocks=2000)
FREE = DisaggregationOptions(transfer_base_seconds=0.0, transfer_seconds_per_token=0.0)
CONDITIONAL = DisaggregationOptions(conditional=True)
MANY = shared_prefix_requests(
    SharedPrefixWorkload(requests=300, rate_per_second=30, groups=10, shared_blocks=32, unique_blocks=4), seed=1
)


def run(requests: list[SimulatedRequest], **arguments: Any) -> DisaggregatedResult:
    defaults: dict[str, Any] = {
        "prefill_workers": 1,
        "decode_workers": 1,
        "prefill_policy": "round_robin",
        "decode_policy": "round_robin",
        "engine": ENGINE,
    }
    return simulate_disaggregated(requests, **{**defaults, **arguments})


def prompts(*arrivals_s: float, output_tokens: int = 16) -> list[SimulatedRequest]:
    """Prompts of 48 tokens that share nothing."""
    workload = SharedPrefixWorkload(requests=len(arrivals_s), shared_blocks=0, unique_blocks=3)
    return [
        SimulatedRequest(f"r{k}", arrival_s, 48, output_tokens, request.blocks, request.tokens)
        for k, (arrival_s, request) in enumerate(zip(arrivals_s, shared_prefix_requests(workload, seed=1), strict=True))
    ]


def again(request: SimulatedRequest, arrival_s: float) -> SimulatedRequest:
    return SimulatedRequest("again", arrival_s, request.prompt_tokens, 16, request.blocks, request.tokens)


def test_alone_and_with_free_transfers_ttft_is_prefill_and_one_step() -> None:
    (record,) = run(prompts(0.0), options=FREE).records
    assert record.outcome is Outcome.COMPLETED
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (48, 0, 16)
    assert record.ttft_s == pytest.approx((BASE_S + 48 * PER_TOKEN_S) + (BASE_S + PER_TOKEN_S))
    assert (record.queue_s, record.migrate_s) == (0.0, 0.0)
    assert record.prefill_s == pytest.approx(record.ttft_s)
    assert record.tpot_s == pytest.approx(BASE_S)
    assert (record.worker, record.reason) == ("decode-0", "remote:prefill-0")


def test_moving_the_kv_adds_its_time() -> None:
    free, paid = (run(prompts(0.0), options=options).records[0] for options in (FREE, DisaggregationOptions()))
    assert free.ttft_s is not None
    assert paid.ttft_s == pytest.approx(free.ttft_s + 0.026 + 48 * 4.2e-6)


def test_only_what_the_decode_worker_lacks_is_moved() -> None:
    first, *_ = prompts(0.0)
    record = run([first, again(first, 9.0)]).records[1]
    assert record.cached_tokens == 32
    assert record.ttft_s == pytest.approx((BASE_S + 16 * PER_TOKEN_S) + (BASE_S + PER_TOKEN_S))


def test_ttft_has_the_wait_for_the_prefill_before() -> None:
    prefill_s, first_token_s = BASE_S + 48 * PER_TOKEN_S, BASE_S + PER_TOKEN_S
    records = run(prompts(0.0, 0.0, output_tokens=1), options=FREE).records
    assert [record.ttft_s for record in records] == [
        pytest.approx(prefill_s + first_token_s),
        pytest.approx(2 * prefill_s + first_token_s),
    ]


def test_decoding_is_not_held_up_by_prefills() -> None:
    """What disaggregation is for: a long prompt that arrives during an answer doesn't stretch its tokens' gaps."""
    first, second = prompts(0.0, 0.1, output_tokens=64)
    (long,) = shared_prefix_requests(SharedPrefixWorkload(requests=1, shared_blocks=0, unique_blocks=500), seed=2)
    long = SimulatedRequest("long", 0.2, long.prompt_tokens, 1, long.blocks, long.tokens)
    record = run([first, second, long], options=FREE).records[0]
    assert record.tpot_s == pytest.approx(BASE_S, rel=0.01)


@pytest.mark.parametrize(
    ("prefill_policy", "decode_policy"),
    [("round_robin", "flexlb_decode"), ("mooncake", "least_load"), ("dynamo_kv", "dynamo_kv")],
)
@pytest.mark.parametrize("view", ["history", "events"])
@pytest.mark.parametrize("options", [DisaggregationOptions(), CONDITIONAL])
def test_everything_completes_and_both_ledgers_return_to_zero(
    prefill_policy: str, decode_policy: str, view: Any, options: DisaggregationOptions
) -> None:
    policies = Disaggregated(make_policy(prefill_policy), make_policy(decode_policy), options)
    simulation = DisaggregatedSimulation(policies, ENGINE, 2, 3, view=view)
    result = simulation.run(MANY)
    assert {record.outcome for record in result.records} == {Outcome.COMPLETED}
    for worker in (*simulation.prefill.workers, *simulation.decode.workers):
        assert (worker.in_flight, worker.prefill_tokens) == (0, 0)
    for model in (*simulation.prefill.models.values(), *simulation.decode.models.values()):
        assert model.pool.used_blocks == 0
    assert sum(worker.requests for worker in result.workers) == len(MANY)
    remote = sum(record.reason.startswith("remote:") for record in result.records)
    assert sum(worker.requests for worker in result.prefill_workers) == remote


class Witness(Policy):
    """Takes the only worker and writes down its books."""

    name = "witness"
    source = "test"
    reasons = ("only",)

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        (worker,) = fleet.workers
        self.seen.append((worker.in_flight, worker.prefill_tokens))
        return Decision(worker.name, "only")


def test_a_prompt_in_work_is_prefill_on_the_one_side_and_a_coming_request_on_the_other() -> None:
    prefill, decode = Witness(), Witness()
    DisaggregatedSimulation(Disaggregated(prefill, decode), ENGINE, 1, 1).run(prompts(0.0, 0.001, 0.025, 9.0))
    assert prefill.seen == [(0, 0), (1, 48), (1, 48), (0, 0)]
    assert decode.seen == [(0, 0), (1, 0), (2, 0), (0, 0)]


def test_equal_seeds_give_equal_runs() -> None:
    fleet: Any = {"prefill_workers": 2, "decode_workers": 2, "decode_policy": "flexlb_decode"}
    assert run(MANY, seed=5, **fleet) == run(MANY, seed=5, **fleet)
    assert run(MANY, seed=5, **fleet) != run(MANY, seed=6, **fleet)


def test_the_prefill_side_ignores_the_decode_side() -> None:
    """The same prefill workers get the same requests, however decode is routed."""
    fleet: Any = {"prefill_workers": 3, "decode_workers": 3, "prefill_policy": "cache_aware", "seed": 2}
    by_decode = [
        [record.reason for record in run(MANY, decode_policy=policy, **fleet).records]
        for policy in ("round_robin", "flexlb_decode", "least_load")
    ]
    assert by_decode[0] == by_decode[1] == by_decode[2]


def test_cache_aware_prefill_finds_more_than_round_robin_and_predicts_it() -> None:
    fleet: Any = {"prefill_workers": 4, "decode_workers": 2, "view": "events"}
    blind = run(MANY, **fleet)
    aware = run(MANY, prefill_policy="score", **fleet)
    assert blind.token_hit_ratio is not None
    assert aware.token_hit_ratio is not None
    assert aware.token_hit_ratio > blind.token_hit_ratio + 0.05
    assert {record.predicted_tokens is None for record in blind.records} == {True}
    exact = [record.prediction_cause in {"exact", "within_block"} for record in aware.records]
    assert sum(exact) > 0.8 * len(exact)


def test_conditional_mode_keeps_what_is_mostly_cached_at_the_decode_worker() -> None:
    first, *_ = prompts(0.0)
    records = run([first, again(first, 9.0)], options=CONDITIONAL).records
    assert [record.reason for record in records] == ["remote:prefill-0", "local"]
    assert [record.predicted_tokens for record in records] == [None, 48]
    assert [record.cached_tokens for record in records] == [0, 32]
    assert records[1].ttft_s == pytest.approx(BASE_S + 16 * PER_TOKEN_S)


def test_conditional_mode_sends_long_prompts_away_however_much_is_cached() -> None:
    options = DisaggregationOptions(conditional=True, local_below_tokens=64)
    talks = session_requests(1, 4, turn_blocks=4, think_seconds=5.0)
    assert [record.reason for record in run(talks, options=options).records] == ["remote:prefill-0"] * 4
    assert [record.reason for record in run(talks, options=CONDITIONAL).records].count("local") == 3


def test_a_request_that_fits_no_engine_fails_and_leaves_nothing_behind() -> None:
    tiny = EngineConfig(ENGINE.step_time, block_size=16, capacity_blocks=4)
    policies = Disaggregated(make_policy("dynamo_kv"), make_policy("least_load"))
    simulation = DisaggregatedSimulation(policies, tiny, 1, 1)
    long_answer, *_ = prompts(0.0, output_tokens=64)  # fits the prefill engine, not the decode engine
    records = simulation.run([long_answer, *MANY[1:3]]).records
    assert [(record.outcome, record.status) for record in records] == [(Outcome.FAILED, 400)] * 3
    assert "KV blocks" in records[0].error
    for worker in (*simulation.prefill.workers, *simulation.decode.workers):
        assert (worker.in_flight, worker.prefill_tokens) == (0, 0)


def test_a_full_decode_side_refuses_as_flexlb_does() -> None:
    tiny = EngineConfig(ENGINE.step_time, block_size=16, capacity_blocks=8)
    burst = prompts(*[0.0] * 6)
    records = run(burst, decode_policy="flexlb_decode", engine=tiny).records
    assert [record.outcome for record in records] == [Outcome.COMPLETED] * 2 + [Outcome.REFUSED] * 4


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="at least 1 prefill worker, got 0"):
        run(MANY[:1], prefill_workers=0)
    with pytest.raises(ValueError, match="at least 1 decode worker, got 0"):
        run(MANY[:1], decode_workers=0)
    with pytest.raises(ValueError, match="unknown policy 'fastest'"):
        run(MANY[:1], decode_policy="fastest")
    with pytest.raises(ValueError, match="policy oracle needs the engines' true state"):
        run(MANY[:1], prefill_policy="oracle")


def test_transfers_take_turns_on_a_shared_link() -> None:
    """Two prompts of 48 tokens on a link that carries 48 a second: the second one arrives a second after the first."""
    link = DisaggregationOptions(transfer_base_seconds=0.0, transfer_seconds_per_token=0.0, link_tokens_per_second=48.0)
    first, second = run(prompts(0.0, 0.0), options=link, prefill_workers=2, decode_workers=2).records
    assert first.first_token_s is not None
    assert second.first_token_s is not None
    assert second.first_token_s - first.first_token_s == pytest.approx(1.0)


def test_the_prefill_side_may_have_other_hardware() -> None:
    fast = EngineConfig(StepTime(base_s=0.0, per_prefill_token_s=0.0), block_size=16, capacity_blocks=2000)
    (record,) = run(prompts(0.0), options=FREE, prefill_engine=fast).records
    assert record.first_token_s == pytest.approx(BASE_S + PER_TOKEN_S)  # the decode side's own step
