"""When sessions start: open-loop arrivals, drawn before the run."""

from __future__ import annotations

import numpy as np


def poisson_times(rate_per_second: float, duration_seconds: float, rng: np.random.Generator) -> list[float]:
    """Arrival times in [0, duration), seconds, ascending: independent exponential gaps of mean 1/rate."""
    times: list[float] = []
    batch = max(16, int(rate_per_second * duration_seconds * 1.2))
    now = 0.0
    while True:
        for time in (now + np.cumsum(rng.exponential(1.0 / rate_per_second, batch))).tolist():
            if time >= duration_seconds:
                return times
            times.append(time)
            now = time
