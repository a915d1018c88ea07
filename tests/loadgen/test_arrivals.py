from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.loadgen.scenario.arrivals import Stage, arrival_times, constant_rate, diurnal_rate, staged_rate


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_poisson_gaps_have_mean_and_spread_of_the_rate() -> None:
    gaps = np.diff(arrival_times("poisson", constant_rate(50.0, 400.0), rng()))
    assert len(gaps) == pytest.approx(20_000, rel=0.03)
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps.std() == pytest.approx(0.02, rel=0.03)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_vary_as_the_burstiness_says(burstiness: float) -> None:
    gaps = np.diff(arrival_times("gamma", constant_rate(50.0, 400.0), rng(), burstiness=burstiness))
    assert gaps.mean() == pytest.approx(0.02, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_constant_arrivals_are_evenly_spaced_from_zero() -> None:
    assert arrival_times("constant", constant_rate(4.0, 1.0), rng()) == [0.0, 0.25, 0.5, 0.75]


@given(st.sampled_from(["poisson", "gamma", "constant"]), st.floats(0.1, 20), st.floats(0.5, 20), st.integers(0, 9))
def test_times_ascend_and_stay_inside_the_duration(process: str, rate: float, duration: float, seed: int) -> None:
    times = arrival_times(process, constant_rate(rate, duration), rng(seed))  # type: ignore[arg-type]  # sampled
    assert times == sorted(times)
    assert all(0 <= time < duration for time in times)
    assert times == arrival_times(process, constant_rate(rate, duration), rng(seed))  # type: ignore[arg-type]


def test_a_step_changes_the_rate_and_a_ramp_goes_straight_between_two() -> None:
    """10 s at 2/s, then 10 s from 2/s to 6/s, which then holds: 20, 40 and 30 arrivals."""
    curve = staged_rate([Stage(10, 2, 2), Stage(10, 2, 6)], 25)
    times = np.array(arrival_times("constant", curve, rng()))
    assert curve.total == pytest.approx(20 + 40 + 30)
    assert [int(((times >= a) & (times < b)).sum()) for a, b in ((0, 10), (10, 20), (20, 25))] == [20, 40, 30]
    assert curve.times_of(np.array([32.5]))[0] == pytest.approx(10 + 4.3, abs=0.1)  # 2t + 0.2t² = 12.5


def test_stages_after_the_end_are_left_out() -> None:
    assert staged_rate([Stage(10, 2, 2), Stage(10, 5, 5)], 4).total == pytest.approx(8)


def test_a_stage_without_traffic_has_no_arrivals() -> None:
    times = arrival_times("poisson", staged_rate([Stage(5, 20, 20), Stage(5, 0, 0), Stage(5, 20, 20)], 15), rng())
    assert len([time for time in times if 5 < time < 10]) == 0
    assert len(times) == pytest.approx(200, rel=0.2)


def test_a_day_peaks_where_it_should() -> None:
    """Between 1/s and 3/s: the mean is 2/s, the fastest quarter is around the peak, the slowest half a day from it."""
    curve = diurnal_rate(1, 3, 100, 30, 100)
    assert curve.total == pytest.approx(200, rel=1e-3)
    times = np.array(arrival_times("constant", curve, rng()))
    around = [int(((times >= at - 5) & (times < at + 5)).sum()) for at in (30, 80)]
    assert around[0] == pytest.approx(30, abs=1)
    assert around[1] == pytest.approx(10, abs=1)
