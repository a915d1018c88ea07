"""When sessions start: arrivals drawn before the run, from a process and a rate that may change with time.

A process is a row of gaps with mean 1; a rate curve stretches it: an arrival at unit time u happens when the integral
of the rate reaches u. So every process goes with every curve, and Poisson stays Poisson (time rescaling; Brown et al.,
"The time-rescaling theorem", 2002).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi, tau
from typing import Literal

import numpy as np
import numpy.typing as npt

from prefixwatch.documents.errors import InputError

Process = Literal["poisson", "gamma", "constant"]
Floats = npt.NDArray[np.float64]

_GRID_POINTS = 4096
"""Points at which a changing rate's integral is known exactly; between them it is interpolated."""
_MOST_POINTS = 4_000_000
MOST_REQUESTS = 10_000_000
"""In one run: their prompts are made beforehand and kept."""


class ArrivalError(InputError, ValueError):
    """More requests than a plan can hold."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of time in which the rate goes straight from one value to another, requests a second."""

    seconds: float
    start_rate: float
    end_rate: float


@dataclass(frozen=True, slots=True)
class RateCurve:
    """The expected number of arrivals until each of these times, both ascending from 0."""

    times: Floats
    expected: Floats

    @property
    def total(self) -> float:
        """Arrivals expected in the whole curve."""
        return float(self.expected[-1])

    def times_of(self, units: Floats) -> Floats:
        """When the expected number of arrivals reaches each of `units`."""
        return np.interp(units, self.expected, self.times)


def constant_rate(rate_per_second: float, duration_seconds: float) -> RateCurve:
    """The same rate from 0 to the end."""
    return RateCurve(np.array([0.0, duration_seconds]), np.array([0.0, rate_per_second * duration_seconds]))


def staged_rate(stages: Sequence[Stage], duration_seconds: float) -> RateCurve:
    """Ramps and steps one after another; the last stage's end rate holds until the end."""
    times, expected = [np.zeros(1)], [np.zeros(1)]
    start, total = 0.0, 0.0
    rest = max(duration_seconds - sum(stage.seconds for stage in stages), 0.0)
    for stage in [*stages, Stage(rest, stages[-1].end_rate, stages[-1].end_rate)]:
        if stage.seconds <= 0 or start >= duration_seconds:
            continue
        seconds = min(stage.seconds, duration_seconds - start)
        at = np.linspace(0.0, seconds, 2 if stage.start_rate == stage.end_rate else _GRID_POINTS)[1:]
        slope = (stage.end_rate - stage.start_rate) / stage.seconds
        grown = stage.start_rate * at + slope * at**2 / 2
        times.append(start + at)
        expected.append(total + grown)
        start, total = start + seconds, total + float(grown[-1])
    return RateCurve(np.concatenate(times), np.concatenate(expected))


def diurnal_rate(
    low_per_second: float, high_per_second: float, period_seconds: float, peak_seconds: float, duration_seconds: float
) -> RateCurve:
    """A cosine between two rates, highest at `peak_seconds` and every period from there."""
    times = np.linspace(0.0, duration_seconds, _periodic_points(duration_seconds / period_seconds))
    mean, swing = (high_per_second + low_per_second) / 2, (high_per_second - low_per_second) / 2
    phase = tau * (times - peak_seconds) / period_seconds
    offset = np.sin(-tau * peak_seconds / period_seconds)
    return RateCurve(times, mean * times + swing * period_seconds / (2 * pi) * (np.sin(phase) - offset))


def _periodic_points(periods: float) -> int:
    return int(min(max(_GRID_POINTS, 64 * periods), _MOST_POINTS))


def check_number(requests: float) -> None:
    """Raises ArrivalError for a run that no memory would hold."""
    if requests > MOST_REQUESTS:
        raise ArrivalError(
            f"{requests:.4g} requests, sessions or users in one run are more than a plan can hold, "
            f"{MOST_REQUESTS:,}: lower the rate, the number or the duration"
        )


def arrival_times(
    process: Process, curve: RateCurve, rng: np.random.Generator, *, burstiness: float = 1.0
) -> list[float]:
    """Arrival times within the curve, seconds, ascending.

    `burstiness` is the gamma process's shape, as in vLLM's bench: 1 is Poisson, less is burstier (the gaps'
    coefficient of variation is 1/√burstiness). Raises ArrivalError for too many.
    """
    total = curve.total
    check_number(total)
    if process == "constant":
        return _stretched(curve, np.arange(0.0, total))
    batch = max(16, int(total * 1.2))
    units = np.zeros(0)
    last = 0.0
    while last < total:
        gaps = rng.exponential(1.0, batch) if process == "poisson" else rng.gamma(burstiness, 1 / burstiness, batch)
        units = np.concatenate([units, last + np.cumsum(gaps)])
        last = float(units[-1])
    return _stretched(curve, units[units < total])


def _stretched(curve: RateCurve, units: Floats) -> list[float]:
    times: list[float] = curve.times_of(units).tolist()
    return times
