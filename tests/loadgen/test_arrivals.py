from __future__ import annotations

import numpy as np
import pytest

from loadgen.arrivals import poisson_times


def test_poisson_gaps_have_mean_and_spread_of_the_rate() -> None:
    times = poisson_times(50.0, 400.0, np.random.default_rng(1))
    gaps = np.diff(times)
    assert len(times) == pytest.approx(20_000, rel=0.03)
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps.std() == pytest.approx(0.02, rel=0.03)


def test_times_ascend_and_stay_inside_the_duration() -> None:
    times = poisson_times(3.0, 7.0, np.random.default_rng(2))
    assert times == sorted(times)
    assert times[0] > 0.0
    assert times[-1] < 7.0


def test_the_same_seed_gives_the_same_times() -> None:
    assert poisson_times(5, 9, np.random.default_rng(3)) == poisson_times(5, 9, np.random.default_rng(3))
