"""The last half hour in a few columns: what the charts draw, and rates and quantiles over the last minute.

Samples are taken every few seconds whether or not somebody looks, so the page has a past when it is opened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import Metric

from exporters.families import MIN_OBSERVATIONS, NAMESPACE
from exporters.fleet import FleetNumbers, merged_by
from exporters.histogram import Histogram
from exporters.target import Target
from kvcache.cache_class import HIT, MISS

SAMPLES = 360
EVERY_SECONDS = 5.0
WINDOW_SECONDS = 60.0

Families = Mapping[str, Metric]
"""By name, without the namespace."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment. None is unknown; counts are since the exporter's start."""

    unix_seconds: float
    monotonic_seconds: float
    hit_ratio: float | None
    loads: tuple[float, float, float] | None
    """Most, mean and least of the workers."""
    ttft: Mapping[str, Histogram]
    """By cache class."""
    goodput_requests: float | None
    requests: float | None


def by_name(families: Iterable[Metric]) -> Families:
    return {family.name.removeprefix(NAMESPACE): family for family in families}


def total(families: Families, name: str) -> float | None:
    """The sum over a family's series; None without any. A counter's creation times are no part of it."""
    family = families.get(name)
    values = [s.value for s in family.samples if not s.name.endswith("_created")] if family else []
    return sum(values) if values else None


def histograms(family: Metric, label: str) -> dict[str, Histogram]:
    """A histogram family's series by the value of one label."""
    counts: dict[str, dict[float, float]] = {}
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            counts.setdefault(sample.labels[label], {})[float(sample.labels["le"])] = sample.value
    return {value: Histogram(tuple(sorted(by)), tuple(by[bound] for bound in sorted(by))) for value, by in counts.items()}


def take_sample(
    targets: Sequence[Target], fleet: FleetNumbers, families: Families, unix_seconds: float, monotonic_seconds: float
) -> Sample:
    """What the charts need of this moment."""
    loads = list(fleet.loads.values())
    if told := families.get("ttft_seconds"):
        ttft = histograms(told, "cache")
    else:
        ttft = {cache: merged.histogram for cache, merged in merged_by(targets, "ttft_by_cache", "cache").items()}
    return Sample(
        unix_seconds,
        monotonic_seconds,
        hit_ratio=fleet.hit_ratio,
        loads=(max(loads), sum(loads) / len(loads), min(loads)) if loads else None,
        ttft=ttft,
        goodput_requests=total(families, "goodput_requests"),
        requests=total(families, "requests"),
    )


class History:
    """Samples of the last half hour, and what lies between them."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples: deque[Sample] = deque(maxlen=samples)

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def ttft_quantile(self, cache: str, q: float, sample: Sample | None = None) -> float | None:
        """Of the first tokens in the last minute; None where there were fewer than 20, or it isn't known."""
        newest, oldest = self._ends(sample)
        if newest is None or oldest is None or cache not in newest.ttft:
            return None
        grown = _grown(newest.ttft[cache], oldest.ttft.get(cache))
        return grown.quantile(q) if grown is not None and grown.count >= MIN_OBSERVATIONS else None

    def goodput(self, sample: Sample | None = None) -> tuple[float, float, float] | None:
        """Good requests, requests, and the seconds they ended in, of the last minute."""
        newest, oldest = self._ends(sample)
        if newest is None or oldest is None:
            return None
        known = (newest.goodput_requests, oldest.goodput_requests, newest.requests, oldest.requests)
        if None in known or newest is oldest:
            return None
        good, all_of_them = newest.goodput_requests - oldest.goodput_requests, newest.requests - oldest.requests  # type: ignore[operator]  # None was ruled out above
        if all_of_them <= 0 or good < 0:
            return None
        return good, all_of_them, newest.monotonic_seconds - oldest.monotonic_seconds

    def columns(self) -> dict[str, list[Any]]:
        """Columns of equal length, oldest first; null is unknown."""
        load = [sample.loads or (None, None, None) for sample in self._samples]
        goodput = self._each(self.goodput)
        return {
            "unix_seconds": [round(sample.unix_seconds, 1) for sample in self._samples],
            "hit_ratio": [sample.hit_ratio for sample in self._samples],
            "load_max": [most for most, _, _ in load],
            "load_mean": [mean for _, mean, _ in load],
            "load_min": [least for _, _, least in load],
            "ttft_hit_p50": self._each(lambda sample: self.ttft_quantile(HIT, 0.5, sample)),
            "ttft_miss_p50": self._each(lambda sample: self.ttft_quantile(MISS, 0.5, sample)),
            "goodput_ratio": [None if found is None else found[0] / found[1] for found in goodput],
        }

    def _each(self, of: Callable[[Sample], Any]) -> list[Any]:
        return [of(sample) for sample in self._samples]

    def _ends(self, newest: Sample | None) -> tuple[Sample | None, Sample | None]:
        """A sample, the newest if none is given, and the last that is a minute older; else the oldest there is."""
        if newest is None:
            newest = self._samples[-1] if self._samples else None
        if newest is None:
            return None, None
        oldest = None
        for sample in self._samples:
            if oldest is None or sample.monotonic_seconds <= newest.monotonic_seconds - WINDOW_SECONDS:
                oldest = sample
            else:
                break
        return newest, oldest


def _grown(newest: Histogram, oldest: Histogram | None) -> Histogram | None:
    """What came in between; None when it began again, or its buckets changed."""
    if oldest is None:
        return newest
    if oldest.bounds != newest.bounds:
        return None
    counts = tuple(new - old for new, old in zip(newest.counts, oldest.counts, strict=True))
    return None if min(counts, default=0.0) < 0 else Histogram(newest.bounds, counts)
