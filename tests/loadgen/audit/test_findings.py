"""What an audit says of samples whose truth is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prefixwatch.loadgen.audit.findings import State, Verdict, judge
from prefixwatch.loadgen.audit.plan import AuditSettings
from prefixwatch.loadgen.audit.price import Prices, price
from prefixwatch.loadgen.audit.samples import Arm, Order, Probe, Samples

SETTINGS = AuditSettings(samples=100, prompt_tokens=1000)
HIT, MISS = 960, 0


def samples(
    hits: set[Arm],
    *,
    seed: int = 0,
    count: int = 100,
    gap: float = 3.0,
    tier: str | None = "gpu",
    reported: bool = True,
    emptied: bool = False,
) -> Samples:
    """Probes of which these arms hit, in this tier, `gap` standard deviations faster."""
    rng = np.random.default_rng(seed)
    probes = [
        Probe(
            arm,
            emptied,
            float(rng.normal(0.3, 0.02)) - 0.02 * gap * (arm in hits),
            (HIT if arm in hits else MISS) if reported else None,
            1000,
            ({tier: HIT} if arm in hits else {}) if tier is not None and reported else None,
        )
        for arm in (Arm.COLD, Arm.OWN, Arm.CROSS)
        for _ in range(count)
    ]
    return Samples(probes)


def states(verdict: Verdict) -> dict[tuple[str, str], str]:
    return {(each.test, each.tier): each.state.value for each in verdict.findings}


def test_isolated_needs_an_own_hit_and_power() -> None:
    verdict = judge(samples({Arm.OWN}), SETTINGS)
    assert (verdict.state, verdict.exit_code) == (State.ISOLATED, 0)
    assert states(verdict) == {
        ("tokens", "all"): "isolated",
        ("tokens", "gpu"): "isolated",
        ("tokens", "outer"): "unavailable",
        ("timing", "all"): "isolated",
    }


def test_a_cache_that_is_off_is_not_isolation() -> None:
    """vllm-project/vllm#53347 (IS03)."""
    verdict = judge(samples(set()), SETTINGS)
    assert (verdict.state, verdict.exit_code) == (State.INCONCLUSIVE, 3)
    assert "switch prefix caching on" in " ".join(verdict.remedies)
    assert "isolated" not in states(verdict).values()


def test_a_leak_is_found_by_tokens_and_by_time() -> None:
    verdict = judge(samples({Arm.OWN, Arm.CROSS}), SETTINGS)
    assert (verdict.state, verdict.exit_code) == (State.LEAK, 1)
    found = states(verdict)
    assert (found["tokens", "all"], found["tokens", "gpu"], found["timing", "all"]) == ("leak",) * 3


def test_time_alone_decides_where_answers_report_no_tokens() -> None:
    """IS11: a gap that no threshold on medians would find, 1.5 sd and 10 %."""
    leaking = judge(samples({Arm.OWN, Arm.CROSS}, gap=1.5, reported=False), SETTINGS)
    assert (leaking.state, states(leaking)["timing", "all"]) == (State.LEAK, "leak")
    kept = judge(samples({Arm.OWN}, gap=2.0, reported=False), SETTINGS)
    assert (kept.state, states(kept)["tokens", "all"]) == (State.ISOLATED, "unavailable")
    assert "Not tested: tokens (all tiers)" in kept.statement


@pytest.mark.parametrize("gap", [0.0, 0.5])
def test_hits_that_are_hardly_faster_prove_nothing(gap: float) -> None:
    verdict = judge(samples({Arm.OWN}, gap=gap), SETTINGS)
    assert (verdict.state, states(verdict)["timing", "all"]) == (State.INCONCLUSIVE, "inconclusive")
    assert "raise --samples" in " ".join(verdict.remedies)
    assert judge(samples({Arm.OWN}, gap=gap), replace(SETTINGS, tests=("tokens",))).state is State.ISOLATED


def test_few_samples_are_inconclusive_and_the_remedy_says_how_many_it_takes() -> None:
    verdict = judge(samples({Arm.OWN}, count=10), replace(SETTINGS, samples=10))
    timing = next(each for each in verdict.findings if each.test == "timing")
    assert (timing.state, timing.remedy) == (State.INCONCLUSIVE, "raise --samples to 15 or more")
    few = judge(samples({Arm.OWN}, count=3), replace(SETTINGS, samples=3, tests=("tokens",)))
    assert (few.state, few.remedies) == (State.INCONCLUSIVE, ["raise --samples or --victim-requests"])


def test_a_leak_in_an_outer_tier_clears_the_gpu_tier() -> None:
    """IS04: the GPU tier keeps the salt, the outer one drops it."""
    mixed = samples({Arm.OWN})
    mixed.probes = [
        replace(probe, cached_tokens=HIT, tiers={"remote": HIT}) if probe.arm is Arm.CROSS else probe
        for probe in mixed.probes
    ]
    verdict = judge(mixed, replace(SETTINGS, tests=("tokens",)))
    assert states(verdict) == {("tokens", "all"): "leak", ("tokens", "gpu"): "isolated", ("tokens", "outer"): "leak"}
    assert "Isolated: tokens (GPU tier)" in verdict.statement


def test_emptied_engine_caches_leave_the_outer_tier() -> None:
    """Where own repeats then hit, the outer tier is on, and what the victim sent must not."""
    settings = replace(SETTINGS, emptied=True)
    both = Samples(samples({Arm.OWN}).probes + samples({Arm.OWN}, tier="remote", emptied=True, seed=1).probes)
    assert states(judge(both, settings)) == {
        ("tokens", "all"): "isolated",
        ("tokens", "gpu"): "isolated",
        ("tokens", "outer"): "isolated",
        ("timing", "all"): "isolated",
        ("timing", "outer"): "isolated",
    }


def test_tokens_of_a_shared_chat_template_are_no_leak() -> None:
    """Every prompt of a model begins alike: cold probes hit these tokens, too."""
    templated = samples({Arm.OWN})
    templated.probes = [replace(p, cached_tokens=max(p.cached_tokens or 0, 64), tiers=None) for p in templated.probes]
    assert states(judge(templated, SETTINGS))["tokens", "all"] == "isolated"


def test_a_leak_that_only_a_part_of_the_probes_reach_is_found() -> None:
    """Eight replicas, of which one has it."""
    mixed = samples({Arm.OWN})
    crossed = [place for place, probe in enumerate(mixed.probes) if probe.arm is Arm.CROSS]
    mixed.probes[crossed[17]] = replace(mixed.probes[crossed[17]], cached_tokens=HIT, tiers=None)
    verdict = judge(mixed, SETTINGS)
    assert verdict.state is State.LEAK
    assert "1 of 100 probes" in verdict.findings[0].says


@pytest.mark.parametrize(
    ("own", "crossed", "state"),
    [
        ([1] * 10, [8, 3, 15, 12, 1, 9, 16, 5, 7, 11], "isolated"),
        ([1] * 10, [1] * 9 + [2], "leak"),
        ([8, 3, 15, 12, 1, 9, 16, 5, 7, 11], [4, 9, 2, 16, 11, 8, 13, 6, 10, 7], "unavailable"),
        ([1] * 10, [3, 5, 2, 4, 6, 1, 3, 8, 2, 5], "inconclusive"),
        ([], [], "inconclusive"),
    ],
)
def test_the_order_of_answers_leaks_where_own_repeats_come_first(
    own: list[int], crossed: list[int], state: str
) -> None:
    """IS14, B7: longest-prefix-match scheduling."""
    orders = [Order(Arm.OWN, rank, 16) for rank in own] + [Order(Arm.CROSS, rank, 16) for rank in crossed]
    verdict = judge(Samples(orders=orders), AuditSettings(tests=("order",)))
    assert states(verdict) == {("order", "all"): state}


def test_200_audits_without_a_leak_never_say_leak() -> None:
    settings = replace(SETTINGS, tests=("timing",))
    verdicts = [judge(samples({Arm.OWN}, seed=seed), settings).state for seed in range(200)]
    assert State.LEAK not in verdicts
    assert verdicts.count(State.ISOLATED) >= 196


def test_the_price_is_what_was_measured_and_unknown_where_nothing_was() -> None:
    measured = samples({Arm.OWN}, gap=5.0)
    found = price(measured, Prices(gpus_per_worker=2, gpu_hour_price=3.6, lost_hit_tokens=9600))
    assert found.hit_tokens == HIT
    assert found.seconds == pytest.approx(0.1, abs=0.01)
    assert found.gpu_seconds == pytest.approx(2 * (found.seconds or 0))
    assert found.money == pytest.approx((found.gpu_seconds or 0) / 1000)
    assert found.lost_gpu_seconds == pytest.approx(10 * (found.gpu_seconds or 0))
    assert found.unknown == ()
    unknown = price(samples(set(), reported=False), Prices())
    assert (unknown.hit_tokens, unknown.gpu_seconds, unknown.money, unknown.lost_hit_tokens) == (None,) * 4
    assert "GPUs of a worker: give --gpus-per-worker" in unknown.unknown


def test_samples_come_back_from_their_document() -> None:
    one = samples({Arm.OWN}, count=2)
    one.orders.append(Order(Arm.CROSS, 3, 16))
    assert Samples.from_document(one.document()) == one
