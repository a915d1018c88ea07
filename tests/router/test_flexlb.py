from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulated import SharedPrefixWorkload, shared_prefix_requests
from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.step_time import StepTime
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policies.flexlb.batch_queue import BatchQueue, fixed_window_wait_ms
from prefixwatch.router.policies.flexlb.formula import FlexLbFormula
from prefixwatch.router.policies.flexlb.inflight_ledger import InflightLedger
from prefixwatch.router.policies.flexlb.learning import ExecutionTimes, FlexLbLearning
from prefixwatch.router.policies.flexlb.prefill_predictor import FormulaPredictor, LearningPredictor, Prefill
from prefixwatch.router.policy import LoadReport, Policy, RouteRequest
from prefixwatch.router.sessions.moving import MovingPolicy
from prefixwatch.simulator.runs import simulate_requests
from tests.router.fleets import a_fleet, a_request

AT_ONCE: dict[str, Any] = {"batcher": "none", "ledger_cache_ms": 0.0}
"""No batch queue and no stale ledger."""


def put(policy: Policy, prompt_tokens: int, worker: str, now: float = 0.0, hits: dict[str, int] | None = None) -> Any:
    """A request sent to this worker, whatever the policy would choose."""
    request = a_request(prompt_tokens=prompt_tokens)
    policy.choose(request, a_fleet([0, 0], hits, now))
    policy.on_admit(request, worker, now)
    return request


def scores(policy: Policy, request: RouteRequest | None = None, now: float = 0.0, **fleet: Any) -> Any:
    return policy.choose(request or a_request(), a_fleet([0, 0], now=now, **fleet)).scores


@pytest.mark.parametrize(
    ("queued", "elapsed_ms", "wait_ms"),
    [(0, 0, 300), (1, 0, 300), (1, 120, 180), (3, 400, 0), (7, 10, 0), (8, 10, 300), (15, 0, 0), (16, 500, 300)],
)
def test_fixed_window_wait_equals_the_golden_vector(queued: int, elapsed_ms: float, wait_ms: float) -> None:
    assert fixed_window_wait_ms(queued, elapsed_ms) == wait_ms


def test_no_batching_means_no_wait() -> None:
    assert [fixed_window_wait_ms(queued, 0.0, size_max=1) for queued in (0, 1, 9)] == [0, 0, 0]


def a_queue(kind: Any, size_max: int = 8) -> BatchQueue:
    return BatchQueue(kind, size_max, 300.0, FormulaPredictor().predict_ms)


def test_a_fixed_window_closes_when_full_or_when_its_head_has_waited() -> None:
    queue = a_queue("fixed_window", size_max=3)
    for name, now in (("a", 0.0), ("b", 0.1), ("c", 0.2), ("d", 0.25)):
        queue.add(name, Prefill(16, 0), now, 0.0)
    assert [(left.at, list(left.members)) for left in queue.departures(0.3)] == [(0.2, ["a", "b", "c"])]
    assert queue.departures(0.5) == []
    assert [(left.at, list(left.members)) for left in queue.departures(0.6)] == [(0.55, ["d"])]


def test_an_slo_budget_orders_by_the_latest_dispatch_and_batches_what_fits() -> None:
    queue = a_queue("slo_budget")
    assert queue.wait_ms(0.0) == 0
    queue.add("patient", Prefill(30, 0), 0.0, budget_ms=400.0)
    queue.add("urgent", Prefill(100, 0), 0.0, budget_ms=150.0)
    queue.add("large", Prefill(500, 0), 0.0, budget_ms=500.0)
    assert queue.wait_ms(0.05) == pytest.approx(100.0)
    assert queue.departures(0.10) == []
    (left,) = queue.departures(0.12)
    assert left.at == pytest.approx(0.11)
    assert list(left.members) == ["urgent", "patient"]


def test_two_parallel_batches_are_taken_as_served_one_after_another() -> None:
    """F-16: two batches of 5 s side by side, 1 s in: 9 s by the ledger where 8 s are left."""
    ledger = InflightLedger()
    for name in ("a", "b"):
        ledger.dispatch({name: Prefill(5000, 0)}, 5000.0, 0.0)
    assert ledger.remaining_ms(1.0) == 9000.0


def test_progress_starts_when_the_engine_no_longer_reports_the_batch_as_queued() -> None:
    ledger = InflightLedger()
    ledger.dispatch({"a": Prefill(5000, 0)}, 5000.0, 0.0)
    ledger.note_report(LoadReport(2.0, running=0, waiting=1))
    assert ledger.remaining_ms(3.0) == 4000.0
    ledger.note_report(LoadReport(4.0, running=1, waiting=0))
    ledger.note_report(LoadReport(5.0, running=0, waiting=1))
    assert ledger.remaining_ms(5.0) == 2000.0


def test_the_ledger_forgets_a_batch_after_300_seconds_and_never_owes_less_than_nothing() -> None:
    ledger = InflightLedger()
    ledger.dispatch({"a": Prefill(10, 0)}, 10.0, 0.0)
    assert ledger.remaining_ms(299.0) == 0.0
    ledger.expire(300.0)
    assert ledger.requests == 1
    ledger.expire(300.1)
    assert ledger.requests == 0


def test_a_batch_is_measured_from_when_the_one_before_was_through() -> None:
    ledger = InflightLedger()
    for name in ("a", "b"):
        ledger.dispatch({name: Prefill(100, 0)}, 100.0, 0.0)
    ledger.dispatch({"c": Prefill(1, 0), "d": Prefill(2, 0)}, 3.0, 0.0)
    first, second = ledger.first_token("a", 1.0), ledger.first_token("b", 1.5)
    assert first is not None
    assert second is not None
    assert (first.milliseconds, second.milliseconds) == (1000.0, 500.0)
    assert ledger.first_token("c", 1.75) is None
    ledger.fail("d")
    assert ledger.requests == 0


def test_a_batch_with_a_failed_member_has_no_label() -> None:
    ledger = InflightLedger()
    ledger.dispatch({"a": Prefill(1, 0), "b": Prefill(2, 0)}, 3.0, 0.0)
    ledger.fail("a")
    assert ledger.first_token("b", 1.0) is None


def test_the_score_is_prefill_and_queue_in_whole_milliseconds() -> None:
    policy = make_policy("flexlb_formula", options=AT_ONCE)
    put(policy, 4800, "w0")
    decision = policy.choose(a_request(), a_fleet([1, 0], {"w0": 9, "w1": 3}, now=0.5))
    assert decision.scores == {"w0": int(160 - 0.7 * 144) + 4300, "w1": int(160 - 0.7 * 48)}
    assert (decision.worker, decision.reason, decision.hit_blocks) == ("w1", "least_cost", 3)


def test_a_full_hit_still_computes_its_last_block() -> None:
    decision = make_policy("flexlb_formula", options=AT_ONCE).choose(a_request(), a_fleet([0, 0], {"w0": 10}))
    assert decision.scores["w0"] == int(160 - 0.7 * 144)


def test_a_newcomer_pays_the_wait_of_the_batch_it_would_join() -> None:
    policy = make_policy("flexlb_formula", options={"ledger_cache_ms": 0.0})
    put(policy, 160, "w0")
    assert scores(policy, now=0.12) == {"w0": 160 + 180, "w1": 160 + 300}
    assert scores(policy, now=0.3625) == {"w0": 160 + 97 + 300, "w1": 160 + 300}  # sent 62.5 ms ago, 97.5 ms left


def test_near_ties_are_drawn_uniformly() -> None:
    hits = {"w1": 1, "w2": 3}
    policy = make_policy("flexlb_formula", options=AT_ONCE)
    request = a_request(prompt_tokens=1600)
    drawn = Counter(policy.choose(request, a_fleet([0] * 4, hits)).worker for _ in range(2000))
    assert all(400 < drawn[f"w{k}"] < 600 for k in range(4))  # 1600, 1588, 1566: within a tenth of 1566
    first = make_policy("flexlb_formula", options={**AT_ONCE, "random_near_ties": False})
    assert {first.choose(request, a_fleet([0] * 4, hits)).worker for _ in range(20)} == {"w2"}


def test_the_band_of_near_ties_is_at_least_20_ms() -> None:
    policy = make_policy("flexlb_formula", options=AT_ONCE)
    drawn = {policy.choose(a_request(), a_fleet([0, 0], {"w0": depth})).worker for depth in [1] * 50}
    assert drawn == {"w0", "w1"}  # 148 and 160 ms
    apart = {policy.choose(a_request(), a_fleet([0, 0], {"w0": depth})).worker for depth in [2] * 50}
    assert apart == {"w0"}  # 137 and 160 ms


def test_a_hotspot_is_passed_over_even_for_its_cache() -> None:
    policy = make_policy("flexlb_formula", options=AT_ONCE)
    for _ in range(5):
        put(policy, 16, "w0")
    fleet = a_fleet([0] * 5, {"w0": 900})  # 5 pending against a mean of 1
    request = a_request(prompt_tokens=16_000)
    decision = policy.choose(request, fleet)
    assert decision.scores["w0"] < decision.scores["w1"]
    assert decision.worker != "w0"


def test_a_worker_at_its_limit_returns_15_percent_below_it() -> None:
    policy = make_policy("flexlb_formula", options={**AT_ONCE, "pending_max": 20})
    sent = [put(policy, 1, "w0") for _ in range(20)]
    chosen = []
    for request in sent:
        chosen.append({policy.choose(a_request(), a_fleet([0, 0], {"w0": 9})).worker for _ in range(3)})
        policy.on_first_token(request, "w0", 0.0)
    back = chosen.index({"w0"})
    assert chosen[:back] == [{"w1"}] * 3  # at 20, 19 and 18 pending; back at 20 − int(3.0)
    assert all("w0" in each for each in chosen[back:])


def test_when_every_worker_is_at_its_limit_the_least_wait_takes_it() -> None:
    policy = make_policy("flexlb_formula", options={**AT_ONCE, "pending_max": 7})
    for _ in range(7):
        put(policy, 3200, "w0")
        put(policy, 1600, "w1")
    decision = policy.choose(a_request(), a_fleet([7, 7]))
    assert (decision.worker, decision.reason) == ("w1", "all_busy")


def test_when_every_worker_misses_the_slo_the_least_wait_takes_it() -> None:
    policy = make_policy("flexlb_formula", options={**AT_ONCE, "slo_filter": True})
    put(policy, 160, "w0")
    decision = policy.choose(a_request(prompt_tokens=1600), a_fleet([1, 0]))
    assert (decision.worker, decision.reason) == ("w1", "all_filtered")


def test_the_ledger_is_read_at_most_every_two_milliseconds() -> None:
    policy = make_policy("flexlb_formula", options={"batcher": "none"})
    assert scores(policy)["w0"] == 160
    put(policy, 1600, "w0")
    assert scores(policy, now=0.001)["w0"] == 160
    assert scores(policy, now=0.003)["w0"] == 160 + 1597


@pytest.mark.parametrize("name", ["flexlb_formula", "flexlb_learning"])
def test_without_batch_queue_and_cache_requests_in_flight_are_seen(name: str) -> None:
    """sgl-project/sglang#15473 (RT03), where the batch queue would hide them."""
    policy, counts = make_policy(name, options=AT_ONCE), Counter[str]()
    for k in range(8):
        request = a_request(100_000 * k, 32_768)
        worker = policy.choose(request, a_fleet([0, 0])).worker
        policy.on_admit(request, worker, 0.0)
        counts[worker] += 1
    assert counts == {"w0": 4, "w1": 4}


def test_a_burst_with_a_new_prefix_is_prefilled_on_every_worker() -> None:
    """F-13: until a snapshot shows the first copy, 120 concurrent requests for one prefix go everywhere."""
    policy, counts = make_policy("flexlb_formula"), Counter[str]()
    for k in range(120):
        request = a_request(prompt_tokens=4096)
        worker = policy.choose(request, a_fleet([0] * 4, now=0.001 * k)).worker
        policy.on_admit(request, worker, 0.001 * k)
        counts[worker] += 1
    assert len(counts) == 4
    assert min(counts.values()) > 10


def test_each_worker_has_a_predictor_of_its_own_fed_by_first_tokens() -> None:
    policy = make_policy("flexlb_learning", options=AT_ONCE)
    assert isinstance(policy, FlexLbLearning)
    before = scores(policy, a_request(prompt_tokens=4096))
    assert before == {"w0": 320, "w1": 320}
    for k in range(4):
        request = put(policy, 4096, "w0", now=float(k))
        policy.on_first_token(request, "w0", k + 0.2)
        policy.on_end(request, "w0", k + 0.3)
    assert scores(policy, a_request(prompt_tokens=4096), now=9.0) == {"w0": 315, "w1": 320}


def test_a_request_answered_while_its_batch_was_still_open_is_a_batch_of_one() -> None:
    policy = make_policy("flexlb_learning")
    for k in range(4):
        request = put(policy, 4096, "w0", now=float(k))
        policy.on_first_token(request, "w0", k + 0.2)
    assert scores(policy, a_request(prompt_tokens=4096), now=9.0) == {"w0": 615, "w1": 620}


def test_a_failed_request_leaves_queue_and_ledger_and_teaches_nothing() -> None:
    for options in ({}, AT_ONCE):
        policy = make_policy("flexlb_learning", options=options)
        fresh = scores(policy, now=50.0)
        for k in range(8):
            request = put(policy, 4096, "w0", now=float(k))
            policy.on_end(request, "w0", k + 0.1)
            policy.on_first_token(request, "w0", k + 0.2)
        assert scores(policy, now=50.0) == fresh


def test_a_calibration_replaces_the_placeholder_prices() -> None:
    calibration = [[1000, 0, 60.0], [2000, 0, 110.0], [2000, 1000, 60.0]]
    policy = make_policy("flexlb_formula", options={**AT_ONCE, "calibration": calibration})
    assert isinstance(policy, FlexLbFormula)
    decision = policy.choose(a_request(prompt_tokens=1600), a_fleet([0, 0], {"w0": 50}))
    assert decision.scores == pytest.approx({"w0": 50, "w1": 90}, abs=1)
    with pytest.raises(ValueError, match="policy flexlb_formula: a calibration needs at least 2"):
        make_policy("flexlb_formula", options={"calibration": [[1000, 0, 60.0]]})


def report(at: float, seconds: float, count: int) -> LoadReport:
    return LoadReport(at, prefill_seconds_total=seconds, prefills_total=count)


def test_the_learning_predictor_is_taught_execution_time_without_the_engines_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two batches waited 400 and 100 ms of their 500 and 200 ms; the engine worked 0.3 s on three prompts."""
    taught: list[float] = []
    times = ExecutionTimes()
    monkeypatch.setattr(LearningPredictor, "learn", lambda self, batch, ms: taught.append(ms))
    pair, single = [Prefill(1000, 0), Prefill(900, 0)], [Prefill(800, 0)]
    times.learn(single, 70.0)  # nothing is reported yet
    times.hear(report(0.0, 5.0, 40))
    times.learn(pair, 500.0)
    times.learn(single, 200.0)
    assert taught == [70.0]
    times.hear(report(1.0, 5.0, 40))
    assert taught == [70.0]
    times.hear(report(2.0, 5.3, 43))
    assert taught[1:] == pytest.approx([125.0, 50.0])  # 100 ms a prompt on average, in the proportion of 5 to 2
    times.learn(single, 200.0)
    times.hear(report(3.0, 0.1, 1))  # another process
    times.learn(single, 200.0)
    times.hear(report(4.0, 0.2, 2))
    assert taught[3:] == pytest.approx([100.0])


def test_weights_are_kept_in_a_file_and_loaded(tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    policy = make_policy("flexlb_learning", options={"weights": str(file)})
    assert isinstance(policy, FlexLbLearning)
    slow, fast = (policy._make_predictor(name) for name in ("slow", "fast"))
    for _ in range(8):
        slow.learn([Prefill(4000, 0)], 900.0)
    fast.learn([Prefill(4000, 0)], 20.0)
    policy.on_close()
    again = make_policy("flexlb_learning", options={"weights": str(file)})
    assert isinstance(again, FlexLbLearning)
    cold = LearningPredictor().predict_ms([Prefill(4000, 0)])
    assert again._make_predictor("slow").predict_ms([Prefill(4000, 0)]) == slow.predict_ms([Prefill(4000, 0)]) != cold
    newcomer = again._make_predictor("new").predict_ms([Prefill(4000, 0)])
    assert newcomer == slow.predict_ms([Prefill(4000, 0)])  # it learned from most batches
    again.on_close()
    assert json.loads(file.read_text())["slow"]["batches"] == 8


@pytest.mark.parametrize("around", ["topology", "moving"])
def test_a_policy_around_it_keeps_the_weights_too(tmp_path: Path, around: str) -> None:
    file = tmp_path / "weights.json"
    spec = f"flexlb_learning{{weights={file}}}"
    outer = (
        make_policy("topology", options={"worker": spec}) if around == "topology" else MovingPolicy(make_policy(spec))
    )
    outer.on_close()
    assert json.loads(file.read_text()) == {}


def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    for content in ("{", '{"a": {"weights": [1, 2]}}', '["a"]'):
        file.write_text(content)
        with pytest.raises(ValueError, match="name a file that this policy wrote"):
            make_policy("flexlb_learning", options={"weights": str(file)})


def test_a_file_that_could_not_be_written_in_the_end_is_refused_at_the_start(tmp_path: Path) -> None:
    """A simulation lost its results to it."""
    with pytest.raises(ValueError, match="its folder can't be written to: make it, or name another file"):
        make_policy("flexlb_learning", options={"weights": str(tmp_path / "nowhere" / "weights.json")})


def test_a_simulation_leaves_the_weights_that_it_learned(tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    workload = SharedPrefixWorkload(
        requests=60, rate_per_second=20, groups=3, zipf_exponent=1.0, shared_blocks=4, unique_blocks=1,
        output_tokens=4, block_size=512,
    )  # fmt: skip
    engine = EngineConfig(StepTime(base_s=0.01, per_prefill_token_s=1 / 12_000), block_size=512)
    simulate_requests(
        shared_prefix_requests(workload, seed=1), policy="flexlb_learning", workers=2, engine=engine,
        policy_options={"weights": str(file)}, arrivals="trace",
    )  # fmt: skip
    kept = json.loads(file.read_text())
    assert set(kept) == {"worker-0", "worker-1"}
    assert sum(own["batches"] for own in kept.values()) > 4
