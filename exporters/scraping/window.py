"""Counters that never go backwards, and what they grew by in the last while.

Resets are handled series by series, before anything is summed: two engines' counters added first would turn
one engine's restart into a spike of everything the other one ever counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


_MOST_SAMPLES = 16


class CounterBank:
    """Each series' total over all lives of its process: what it shows now plus what it showed before each reset.

    A series that disappears keeps its total, so sums over the bank stay monotonic.
    """

    def __init__(self) -> None:
        self._shown: Vector = np.zeros(0)
        self._before_resets: Vector = np.zeros(0)
        self.known = np.zeros(0, dtype=np.bool_)
        """Of each series: whether it ever had a value that a counter can have."""

    def leave(self) -> Vector:
        """The process that counted until now is not the one that counts next: what it showed, for `resume`."""
        shown, self._shown = self._shown, np.zeros(len(self._shown))
        self._before_resets += shown
        return shown

    def resume(self, shown: Vector) -> None:
        """A process that was left is back: it goes on from what it showed."""
        self._shown[: len(shown)] = shown
        self._before_resets[: len(shown)] -= shown

    def grow(self, count: int) -> None:
        """Have this many series; new ones come last and begin at 0."""
        added = np.zeros(count - len(self._shown))
        self._shown = np.append(self._shown, added)
        self._before_resets = np.append(self._before_resets, added)
        self.known = np.append(self.known, np.zeros(len(added), dtype=np.bool_))

    def update(self, places: Indices, values: Vector) -> bool:
        """Take new values of the series at these places; True when any of them was reset.

        Values that no counter can have (NaN, infinite, negative) leave a series as it was.
        """
        shown = self._shown[places]
        if ((values >= shown) & (values < np.inf)).all():  # as nearly always; NaN is neither
            self._shown[places] = values
            self.known[places] = True
            return False
        valid = np.isfinite(values) & (values >= 0)
        self.known[places] |= valid
        reset = valid & (values < shown)
        any_reset = bool(reset.any())
        if any_reset:
            self._before_resets[places[reset]] += shown[reset]
        self._shown[places] = np.where(valid, values, shown)
        return any_reset

    def shown(self, places: Indices) -> Vector:
        """What these series show now."""
        return self._shown[places]

    def everything_shown(self) -> Vector:
        """What all series show now."""
        return self._shown.copy()

    def correct(self, places: Indices, values: Vector) -> None:
        """These series show less than before, all of which was counted already: their totals stay."""
        self._before_resets[places] += self._shown[places] - values
        self._shown[places] = values

    def retire(self, places: Indices, *, keep: bool) -> None:
        """These series are read no more. What they showed is kept, as after a reset, or is part of other series now."""
        if keep:
            self._before_resets[places] += self._shown[places]
        self._shown[places] = 0.0

    def totals(self) -> Vector:
        return self._shown + self._before_resets


@dataclass(frozen=True, slots=True)
class Increase:
    """What every group of counters grew by, and over how many seconds."""

    seconds: float
    vector: Vector


class Window:
    """The last `horizon_seconds` of a growing vector of totals. Empty until two samples are in it.

    However often samples come, about `_MOST_SAMPLES` of them are kept: only the oldest and the newest matter, those
    between are oldest ones to come.
    """

    def __init__(self, horizon_seconds: float) -> None:
        self._horizon_seconds = horizon_seconds
        self._samples: deque[tuple[float, Vector]] = deque()
        self._increase: Increase | None = None
        """Once somebody asked for it: scrapes are more frequent than readers."""

    def add(self, at_seconds: float, totals: Vector) -> None:
        """Add a sample; `at_seconds` is of a monotonic clock. Older samples fall out, except for the last one."""
        self._increase = None
        samples = self._samples
        if len(samples) > 2 and samples[-1][0] - samples[-2][0] < self._horizon_seconds / _MOST_SAMPLES:
            samples.pop()
        samples.append((at_seconds, totals))
        while len(samples) > 2 and samples[0][0] < at_seconds - self._horizon_seconds:
            samples.popleft()

    def restart(self) -> None:
        """Forget everything: what was before can't be compared with what comes."""
        self._increase = None
        self._samples.clear()

    def increase(self) -> Increase | None:
        """Growth from the oldest to the newest sample, None when there aren't two.

        A vector that became longer in between was 0 in its new places: a counter shows up with its first event.
        """
        if self._increase is not None or len(self._samples) < 2:
            return self._increase
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        if last_at <= first_at:
            return None
        if len(first) < len(last):
            first = np.append(first, np.zeros(len(last) - len(first)))
        self._increase = Increase(last_at - first_at, last - first)
        return self._increase


class LoadWindow:
    """Mean of sampled gauges over the last `horizon_seconds`; one sample of a load says little."""

    def __init__(self, horizon_seconds: float) -> None:
        self._horizon_seconds = horizon_seconds
        self._samples: deque[tuple[float, Mapping[str, float]]] = deque()
        self._means: dict[str, float] | None = None
        """Once somebody asked for them."""

    def add(self, at_seconds: float, loads: Mapping[str, float]) -> None:
        self._means = None
        self._samples.append((at_seconds, loads))
        while self._samples[0][0] < at_seconds - self._horizon_seconds:
            self._samples.popleft()

    def clear(self) -> None:
        self._means = None
        self._samples.clear()

    @property
    def samples(self) -> Sequence[tuple[float, Mapping[str, float]]]:
        """All of the window, oldest first."""
        return tuple(self._samples)

    def means(self) -> Mapping[str, float]:
        """By name, for the names in the newest sample: what has gone has no load."""
        if self._means is None:
            present = self._samples[-1][1] if self._samples else {}
            self._means = {name: mean([loads[name] for _, loads in self._samples if name in loads]) for name in present}
        return self._means


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value. Each is divided before they are added, so that no figure that a target sends,
    however large, overflows."""
    return sum([value / len(values) for value in values])
