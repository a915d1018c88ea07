"""What a cold prompt costs on an idle worker, by its length: the yardstick that misses are measured by.

Everything that disturbs a probe (a queue, a batch that it shares) makes it slower, never faster. So of each target's
last samples of a length the median of the faster half is taken, and of the targets their median.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import linear_regression, median

import numpy as np

from prefixwatch.exporters.requests.request import LENGTHS, length_label

_KEPT = 50
_EXTRAPOLATED = 2.0
"""How far beyond the probed lengths the line is believed, as a factor."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a cold prefill of about `tokens` tokens; `low` to `high` is what half of all samples lie in."""

    seconds: float
    low_seconds: float
    high_seconds: float
    tokens: float
    samples: int


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = intercept + slope · tokens, by least squares over the buckets' estimates."""

    intercept_seconds: float
    slope_seconds_per_token: float


class PrefillBaseline:
    """Samples of cold prompts, the last 50 of each target and length bucket."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[str, deque[tuple[int, float]]]] = {}

    def add(self, target: str, computed_tokens: int, ttft_seconds: float) -> None:
        """A cold prompt with its number of computed tokens. Impossible values are left out."""
        if computed_tokens > 0 and ttft_seconds > 0:
            buckets = self._samples.setdefault(length_label(computed_tokens), {})
            buckets.setdefault(target, deque(maxlen=_KEPT)).append((computed_tokens, ttft_seconds))

    def estimates(self) -> Mapping[str, Estimate]:
        """By length label, in order of length; only the lengths that were probed."""
        return {label: _estimate(found) for label in LENGTHS if (found := self._samples.get(label))}

    def line(self) -> Line | None:
        """Through the origin where one length was probed; None before, or when longer prompts seem to be quicker."""
        points = [(estimate.tokens, estimate.seconds) for estimate in self.estimates().values()]
        if not points:
            return None
        if len(points) == 1:
            return Line(0.0, points[0][1] / points[0][0])
        slope, intercept = linear_regression(*zip(*points, strict=True))
        return Line(intercept, slope) if slope > 0 else None

    def seconds(self, tokens: int) -> float | None:
        """For a prompt of this length: between the probed lengths interpolated, outside by the line.

        None where nothing near was probed: below half of the shortest length or above twice the longest.
        """
        points = [(estimate.tokens, estimate.seconds) for estimate in self.estimates().values()]
        if not points or not points[0][0] / _EXTRAPOLATED <= tokens <= points[-1][0] * _EXTRAPOLATED:
            return None
        lengths, seconds = zip(*points, strict=True)
        if lengths[0] <= tokens <= lengths[-1]:
            return float(np.interp(tokens, lengths, seconds))
        line = self.line()
        nearest = seconds[0] if tokens < lengths[0] else seconds[-1]
        if line is None:
            return None
        anchor = lengths[0] if tokens < lengths[0] else lengths[-1]
        return max(0.0, float(nearest + line.slope_seconds_per_token * (tokens - anchor))) or None


class PrefillBaselines:
    """A baseline of each model: a cold prompt costs one model more than another."""

    def __init__(self) -> None:
        self._of: dict[str, PrefillBaseline] = {}

    def of(self, model: str) -> PrefillBaseline:
        return self._of.setdefault(model, PrefillBaseline())

    def seconds(self, model: str, tokens: int) -> float | None:
        """`PrefillBaseline.seconds` of this model. Where the model isn't named, of the only one that was probed."""
        known = self._of.get(model) or (self.only() if not model or "" in self._of else None)
        return known.seconds(tokens) if known else None

    def seconds_per_token(self, model: str) -> float | None:
        """The slope of this model's line. Where the model isn't named, of the only one that was probed."""
        known = self._of.get(model) or (self.only() if not model or "" in self._of else None)
        line = known.line() if known else None
        return None if line is None else line.slope_seconds_per_token

    def only(self) -> PrefillBaseline | None:
        """The baseline, where just one model was probed."""
        return next(iter(self._of.values())) if len(self._of) == 1 else None

    def estimates(self) -> Mapping[tuple[str, str], Estimate]:
        """By model and length label."""
        return {(model, length): found for model, one in self._of.items() for length, found in one.estimates().items()}

    def line(self) -> Line | None:
        """The line of the only model; None where there are several."""
        only = self.only()
        return only.line() if only else None


def _estimate(targets: Mapping[str, deque[tuple[int, float]]]) -> Estimate:
    own = [_fast_half(samples) for samples in targets.values() if samples]
    every = [seconds for samples in targets.values() for _, seconds in samples]
    low, high = np.quantile(every, (0.25, 0.75))
    return Estimate(
        seconds=median(seconds for _, seconds in own),
        low_seconds=float(low),
        high_seconds=float(high),
        tokens=median(tokens for tokens, _ in own),
        samples=len(every),
    )


def _fast_half(samples: deque[tuple[int, float]]) -> tuple[float, float]:
    """Median length and time of the faster half, by time per token: lengths in a bucket may differ a little."""
    ordered = sorted(samples, key=lambda sample: sample[1] / sample[0])
    half = ordered[: (len(ordered) + 1) // 2]
    return median(tokens for tokens, _ in half), median(seconds for _, seconds in half)
