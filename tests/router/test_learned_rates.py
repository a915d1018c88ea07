"""Rates learnt from answers: of unlike engines in virtual time, with noise, and when they must stay unknown."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policy import Fleet, Worker
from prefixwatch.router.rates import LEAST_SAMPLES, Hardware, LearnedRates
from prefixwatch.simulator.fleet import FleetSimulation
from prefixwatch.simulator.traffic.trace import SimulatedRequest
from tests.router.fleets import a_request

FAST = StepTime(base_s=0.008, per_prefill_token_s=1 / 12_000, per_decode_sequence_s=0.0004)
SLOW = StepTime(base_s=0.020, per_prefill_token_s=1 / 3_000, per_decode_sequence_s=0.001)


def _requests(count: int, rate_per_second: float) -> list[SimulatedRequest]:
    """Prompts of 256 to 4,096 tokens that share nothing."""
    rng, at_s, requests = random.Random(1), 0.0, []
    for k in range(count):
        at_s += rng.expovariate(rate_per_second)
        blocks = rng.randint(16, 256)
        hashes = np.arange(1000 * k, 1000 * k + blocks, dtype=np.uint64)
        requests.append(SimulatedRequest(f"r{k}", at_s, blocks * 16, rng.randint(16, 128), hashes))
    return requests


def test_rates_of_unlike_engines_are_learnt_within_15_percent_from_200_answers_each() -> None:
    """By round robin, which asks for nothing: learning is the router's, not the policy's."""
    policy = make_policy("round_robin")
    engines = [EngineConfig(time, capacity_blocks=20_000) for time in (FAST, SLOW)]
    fleet = FleetSimulation([policy], engines, 2)
    fleet.run(_requests(400, rate_per_second=1.0))
    for worker, true in zip(fleet.workers, (FAST, SLOW), strict=True):
        assert worker.rates.prefill_tokens_per_second == pytest.approx(1 / true.per_prefill_token_s, rel=0.15)
        alone_s = true.base_s + true.per_decode_sequence_s
        assert worker.rates.decode_tokens_per_second == pytest.approx(1 / alone_s, rel=0.15)


@pytest.mark.parametrize("seed", range(20))
def test_noise_and_one_wrong_answer_in_ten_move_a_rate_by_less_than_15_percent(seed: int) -> None:
    rng, rates = random.Random(seed), LearnedRates()
    for _ in range(200):
        tokens, streams, wrong = rng.randint(200, 6000), rng.randint(1, 12), rng.random() < 0.1
        noise = rng.lognormvariate(0.0, 0.2) * (5.0 if wrong else 1.0)
        rates.first_token(tokens, (0.02 + tokens / 8000) * noise)
        rates.answered(64, 63 * (0.02 + 0.0005 * (streams - 1)) * noise, streams)
    assert rates.prefill_tokens_per_second == pytest.approx(8000, rel=0.15)
    assert rates.decode_tokens_per_second == pytest.approx(50, rel=0.15)


def test_what_answers_do_not_tell_stays_unknown() -> None:
    rates = LearnedRates()
    for _ in range(LEAST_SAMPLES - 1):
        rates.first_token(1000, 0.1)
        rates.answered(7, 0.1, 1)
    assert (rates.prefill_tokens_per_second, rates.decode_tokens_per_second) == (None, None)
    for _ in range(50):
        rates.first_token(1000, 0.1)  # equally long prompts have no slope
    assert rates.prefill_tokens_per_second is None
    assert rates.over(Hardware(5000.0, 40.0, 1e9)) == Hardware(5000.0, 40.0, 1e9)


def test_learnt_rates_count_before_stated_ones_where_affinity_learns() -> None:
    slow, fast = Worker("slow"), Worker("fast")
    for worker, rate in ((slow, 1000), (fast, 10_000)):
        for k in range(40):
            worker.rates.first_token(500 + 50 * k, (500 + 50 * k) / rate)
    stated = {"slow": {"prefill_tokens_per_second": 9000}, "fast": {"prefill_tokens_per_second": 9000}}
    request = replace(a_request(1, 160), max_output_tokens=100)  # short: prefill counts
    plain, learning = (
        make_policy("affinity", options={"hardware": stated, "learn_hardware": learns, "home_ratio": 0.0})
        for learns in (False, True)
    )
    fleet = Fleet([slow, fast], lambda request: {}, 0.0)
    scores = plain.choose(request, fleet).scores
    assert scores["slow"] == scores["fast"]
    scores = learning.choose(request, fleet).scores
    assert scores["slow"] == pytest.approx(0.1 * scores["fast"])


def test_score_weighs_each_workers_own_rate_where_it_learns() -> None:
    slow, fast = Worker("slow"), Worker("fast")
    for worker, rate in ((slow, 1000), (fast, 10_000)):
        for k in range(40):
            worker.rates.first_token(500 + 50 * k, (500 + 50 * k) / rate)
    policy = make_policy("score", options={"learn_rates": True, "hotspot_weight": 0.0})
    scores = policy.choose(a_request(1, 160), Fleet([slow, fast], lambda request: {}, 0.0)).scores
    assert scores["fast"] - scores["slow"] == pytest.approx(160 * (1.0 - 0.1))  # ms
