"""What is probed when, what it may cost, and what the pairs say: pure."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from prefixwatch.exporters.probes.config import ProbeConfig
from prefixwatch.exporters.probes.findings import Findings, Pair
from prefixwatch.exporters.probes.plan import Spending, TargetPlan, TokenBudget, unique_prompt
from prefixwatch.exporters.probes.prefill_baseline import PrefillBaseline
from prefixwatch.exporters.probes.request import ProbeAnswer


def plan(*lengths: int, interval: float = 60.0, jitter: float = 0.0) -> TargetPlan:
    return TargetPlan(lengths or (256, 1024, 4096), interval, jitter, random.Random(1), now=0.0)


def test_no_two_prompts_share_their_opening() -> None:
    rng = random.Random(7)
    prompts = [unique_prompt(rng, 40) for _ in range(2_000)]
    assert len({prompt.split()[0] for prompt in prompts}) == 2_000
    assert {len(prompt.split()) for prompt in prompts} == {40}


def test_lengths_come_in_turn_shortest_first() -> None:
    schedule = plan()
    seen = []
    for _ in range(4):
        seen.append(schedule.length())
        schedule.done(0.0)
    assert seen == [256, 1024, 4096, 256]


def test_words_follow_from_what_the_engine_counted() -> None:
    schedule = plan()
    assert schedule.words(1024) == 1024
    schedule.learn(words=256, prompt_tokens=512)
    assert schedule.words(1024) == 512


def test_a_length_that_is_rejected_is_left_out_once_a_shorter_one_was_taken() -> None:
    schedule = plan()
    schedule.done(0.0)
    schedule.done(0.0, rejected=True)
    assert schedule.lengths == [256]


def test_an_endpoint_that_rejects_everything_is_still_asked() -> None:
    schedule = plan()
    for _ in range(6):
        schedule.done(0.0, rejected=True)
    assert schedule.lengths == [256, 1024, 4096]


def test_rounds_stray_by_the_jitter_and_no_further() -> None:
    schedule = plan(jitter=0.25)
    gaps = []
    for _ in range(200):
        schedule.done(1_000.0)
        gaps.append(schedule.due_seconds - 1_000.0)
    assert 45 <= min(gaps) < 48
    assert 72 < max(gaps) <= 75


def test_pauses_grow_with_failures_and_end_with_success() -> None:
    schedule = plan()
    pauses = []
    for _ in range(6):
        schedule.done(0.0, failed=True)
        pauses.append(schedule.due_seconds)
    schedule.done(0.0)
    assert pauses == [60, 120, 240, 480, 480, 480]
    assert schedule.due_seconds == 60


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50)), max_size=40))
def test_no_minute_holds_more_than_the_budget(asked: list[tuple[float, int]]) -> None:
    budget, now, sent = TokenBudget(100), 0.0, []
    for gap, tokens in asked:
        now += gap
        if budget.affords(tokens, now):
            budget.add(Spending(now, tokens))
            sent.append((now, tokens))
    for start, _ in sent:
        assert sum(tokens for at, tokens in sent if start <= at < start + 60) <= 100


def test_the_budget_must_hold_the_longest_prompt_and_its_repeat() -> None:
    document = {
        "targets": [{"name": "a", "url": "http://a"}],
        "prompt_tokens": [4096],
        "target_tokens_per_minute": 8199,
    }
    with pytest.raises(ValidationError, match="cost 8200, more than target_tokens_per_minute 8199"):
        ProbeConfig.model_validate(document)
    assert ProbeConfig.model_validate(document | {"target_tokens_per_minute": 8200})


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://host:99999", "http://", "http://me:secret@host"])
def test_a_target_needs_an_address(url: str) -> None:
    with pytest.raises(ValidationError, match=r"is not an http|put them into basic_auth"):
        ProbeConfig.model_validate({"targets": [{"name": "a", "url": url}]})


def test_a_canary_needs_two_tenants() -> None:
    same = {"first": {"salted": False}, "second": {"salted": False}}
    with pytest.raises(ValidationError, match="the same tenant"):
        ProbeConfig.model_validate({"targets": [{"name": "a", "url": "http://a/v1"}], "isolation": same})


def pair(
    cold: int | None, repeat: int | None, seconds: tuple[float | None, float | None] = (1.0, 0.2), tokens: int = 1000
) -> Pair:
    def answer(cached: int | None, ttft: float | None) -> ProbeAnswer:
        return ProbeAnswer("completed", "", ttft, 2.0, tokens, cached, 4)

    return Pair(answer(cold, seconds[0]), answer(repeat, seconds[1]))


def flags(*pairs: Pair) -> dict[str, bool]:
    findings = Findings()
    for each in pairs:
        findings.add(each)
    return dict(findings.flags())


def test_a_working_cache() -> None:
    assert flags(pair(0, 992)) == {
        "caching_off": False,
        "cached_tokens_unreported": False,
        "cold_prompt_hit": False,
    }
    assert flags(*[pair(0, 992)] * 3)["repeat_not_faster"] is False


def test_repeats_that_report_0_mean_that_caching_is_off() -> None:
    assert flags(*[pair(0, 0, (1.0, 1.0))] * 3) == {
        "caching_off": True,
        "cached_tokens_unreported": False,
        "repeat_not_faster": True,
        "cold_prompt_hit": False,
    }


def test_two_such_repeats_may_be_chance() -> None:
    """A repeat may have been sent to another worker, or evicted: nothing is said yet."""
    assert "caching_off" not in flags(pair(0, 0), pair(0, 0))
    assert flags(pair(0, 0), pair(0, 0), pair(0, 992))["caching_off"] is False


def test_an_engine_that_reports_nothing_is_not_said_to_cache_nothing() -> None:
    """Absent is not 0: only the times tell."""
    assert flags(*[pair(None, None)] * 3) == {
        "cached_tokens_unreported": True,
        "repeat_not_faster": False,
        "cold_prompt_hit": False,
    }


def test_an_engine_that_leaves_out_a_0_means_0() -> None:
    """vLLM sends no prompt_tokens_details for a miss."""
    assert pair(None, 992).cold_tokens == 0
    assert pair(None, None).cold_tokens is None


def test_a_templates_opening_is_no_hit_and_more_is() -> None:
    assert pair(64, 992).was_cold
    assert flags(pair(512, 992))["cold_prompt_hit"] is True


def test_hits_that_take_as_long_as_misses_are_none() -> None:
    """The engine says that 992 tokens were cached, the clock says that nothing was."""
    assert flags(*[pair(0, 992, (1.0, 1.0))] * 3)["hits_not_faster"] is True
    assert flags(*[pair(0, 992)] * 3)["hits_not_faster"] is False
    assert "hits_not_faster" not in flags(*[pair(0, 0, (1.0, 1.0))] * 3)


@given(st.lists(st.integers(65, 4096), min_size=4, max_size=12), st.floats(0.0, 3.0), st.integers(0, 5_000))
def test_the_hit_counter_is_held_against_what_the_repeats_report(
    cached: list[int], counted: float, others: int
) -> None:
    """`counted` of each repeat's tokens are in the engine's counter, besides those of other requests."""
    findings, total = Findings(), 7_000.0
    for round_, tokens in enumerate(cached):
        findings.counted_hits.counted(total, 60.0 * round_)
        findings.counted_hits.reported(tokens, 60.0 * round_ + 1)
        total += tokens * counted + others
    findings.counted_hits.counted(total, 60.0 * len(cached))
    expected = counted * sum(cached) + others * len(cached) < 0.5 * sum(cached)
    assert findings.flags()["hits_not_counted"] is expected
    both = findings.counted_hits.both
    assert both is not None
    assert both[0] == sum(cached)
    assert both[1] == pytest.approx(total - 7_000.0)


def test_a_restarted_or_unknown_counter_begins_again() -> None:
    findings = Findings()
    for total in (5_000.0, 6_000.0, 10.0):
        findings.counted_hits.counted(total, 0.0)
        findings.counted_hits.reported(992, 0.0)
    assert findings.counted_hits.both is None
    findings.counted_hits.counted(None, 100.0)
    assert "hits_not_counted" not in findings.flags()


def test_short_prompts_dont_say_whether_the_repeat_is_faster() -> None:
    findings = Findings(lengths=2)
    for _ in range(3):
        findings.add(pair(0, 192, (0.011, 0.010), tokens=200))
        findings.add(pair(0, 992, (0.1, 0.01)))
    assert findings.flags()["repeat_not_faster"] is False


def test_the_canarys_last_answer_counts() -> None:
    findings = Findings()
    findings.add_canary(hit=True)
    assert findings.flags()["cross_tenant_hit"] is True
    findings.add_canary(hit=False)
    assert findings.flags()["cross_tenant_hit"] is False


def test_the_baseline_is_the_undisturbed_time() -> None:
    """Half of the probes shared a batch and took three times as long."""
    baseline = PrefillBaseline()
    for disturbed in (False, True) * 10:
        for tokens in (250, 1000, 4000):
            baseline.add("a", tokens, (0.01 + tokens * 1e-4) * (3 if disturbed else 1))
    estimates = baseline.estimates()
    assert {label: round(estimate.seconds, 6) for label, estimate in estimates.items()} == {
        "0-512": 0.035,
        "512-2048": 0.11,
        "2048-8192": 0.41,
    }
    assert (estimates["512-2048"].tokens, estimates["512-2048"].samples) == (1000, 20)
    assert estimates["512-2048"].low_seconds == pytest.approx(0.11)
    assert estimates["512-2048"].high_seconds == pytest.approx(0.33)
    line = baseline.line()
    assert line is not None
    assert line.intercept_seconds == pytest.approx(0.01)
    assert line.slope_seconds_per_token == pytest.approx(1e-4)


def test_of_several_targets_the_median_counts() -> None:
    baseline = PrefillBaseline()
    for target, seconds in (("a", 0.1), ("b", 0.2), ("slow", 0.9)):
        baseline.add(target, 1000, seconds)
    assert baseline.estimates()["512-2048"].seconds == 0.2


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [(1000, 0.11), (2500, 0.26), (8000, 0.81), (500, 0.06), (499, None), (8001, None)],
    ids=["probed", "between", "twice the longest", "half the shortest", "below", "above"],
)
def test_the_baseline_of_any_length_near_the_probed_ones(tokens: int, seconds: float | None) -> None:
    baseline = PrefillBaseline()
    baseline.add("a", 1000, 0.11)
    baseline.add("a", 4000, 0.41)
    assert baseline.seconds(tokens) == (None if seconds is None else pytest.approx(seconds))


def test_with_one_length_the_line_goes_through_the_origin() -> None:
    baseline = PrefillBaseline()
    assert baseline.seconds(1000) is None
    baseline.add("a", 1000, 0.11)
    assert baseline.seconds(1000) == 0.11
    assert baseline.seconds(500) == pytest.approx(0.055)
    assert baseline.seconds(2001) is None


def test_longer_prompts_that_seem_quicker_are_not_extrapolated() -> None:
    baseline = PrefillBaseline()
    baseline.add("a", 1000, 0.4)
    baseline.add("a", 4000, 0.2)
    assert (baseline.line(), baseline.seconds(5000)) == (None, None)
