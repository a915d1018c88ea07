"""The last half hour in a few columns: what the charts draw, and rates and quantiles over the last minute.

Samples are taken every few seconds whether or not somebody looks, so the page has a past when it is opened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import Metric

from prefixwatch.exporters.fleet.derivation import FleetNumbers, merged_over, stores
from prefixwatch.exporters.metrics_page.families import MIN_OBSERVATIONS, NAMESPACE
from prefixwatch.exporters.scraping.histogram import Histogram
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.kvcache.cache_class import HIT, MISS, PARTIAL

POINTS = 360
EVERY_SECONDS = 5.0
WINDOW_SECONDS = 60.0

Families = Mapping[str, Metric]
"""By name, without the namespace."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment; None is unknown, and counts are since the exporter's start."""

    unix_seconds: float
    monotonic_seconds: float
    hit_ratio: float | None
    loads: tuple[float, float, float] | None
    """Most, mean and least of the workers."""
    ttft: Mapping[str, Histogram]
    """By cache class."""
    goodput_requests: float | None
    requests: float | None


@dataclass(frozen=True, slots=True)
class Point:
    """What one moment and the minute before it say; None is unknown."""

    unix_seconds: float
    hit_ratio: float | None
    load_max: float | None
    load_mean: float | None
    load_min: float | None
    ttft_hit_p50_seconds: float | None
    ttft_partial_p50_seconds: float | None
    ttft_miss_p50_seconds: float | None
    good_requests: float | None
    requests: float | None
    seconds: float
    """That the requests ended in."""

    @property
    def goodput_ratio(self) -> float | None:
        return self.good_requests / self.requests if self.requests and self.good_requests is not None else None


class History:
    """Points of the last half hour, and the samples of the last minute that the next point is taken from."""

    def __init__(self, points: int = POINTS) -> None:
        self._points: deque[Point] = deque(maxlen=points)
        self._minute: deque[Sample] = deque()

    @property
    def newest(self) -> Point | None:
        return self._points[-1] if self._points else None

    def add(self, sample: Sample) -> None:
        """Samples come in the order of their times."""
        self._minute.append(sample)
        while len(self._minute) > 1 and self._minute[1].monotonic_seconds <= sample.monotonic_seconds - WINDOW_SECONDS:
            self._minute.popleft()
        self._points.append(_point(sample, self._minute[0]))

    def columns(self) -> dict[str, list[Any]]:
        """Columns of equal length, oldest first; null is unknown."""
        ttft = [f"ttft_{cache}_p50_seconds" for cache in (HIT, PARTIAL, MISS)]
        names = ("hit_ratio", "load_max", "load_mean", "load_min", *ttft)
        return {
            "unix_seconds": [round(point.unix_seconds, 1) for point in self._points],
            **{name: [getattr(point, name) for point in self._points] for name in (*names, "goodput_ratio")},
        }


def by_name(families: Iterable[Metric]) -> Families:
    return {family.name.removeprefix(NAMESPACE): family for family in families}


def total(families: Families, name: str) -> float | None:
    """The sum over a family's series; None without any. A counter's creation times are no part of it."""
    family = families.get(name)
    values = [sample.value for sample in family.samples if not sample.name.endswith("_created")] if family else []
    return sum(values) if values else None


def take_sample(
    targets: Sequence[Target], fleet: FleetNumbers, families: Families, unix_seconds: float, monotonic_seconds: float
) -> Sample:
    """What the charts need of this moment."""
    loads = list(fleet.loads.values())
    if told := families.get("ttft_seconds"):
        ttft = _histograms(told, "cache")
    else:
        by_cache = merged_over(stores(targets, "router"), "ttft_by_cache", "cache")
        ttft = {cache: merged for (cache,), merged in by_cache.items()}
    return Sample(
        unix_seconds,
        monotonic_seconds,
        hit_ratio=fleet.hit_ratio,
        loads=(max(loads), sum(loads) / len(loads), min(loads)) if loads else None,
        ttft=ttft,
        goodput_requests=total(families, "goodput_requests"),
        requests=total(families, "requests"),
    )


def _histograms(family: Metric, label: str) -> dict[str, Histogram]:
    """A histogram family by the value of one label, summed over all others. Its series have the same bounds."""
    found: dict[str, dict[float, float]] = {}
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            counts = found.setdefault(sample.labels[label], {})
            bound = float(sample.labels["le"])
            counts[bound] = counts.get(bound, 0.0) + sample.value
    return {value: Histogram(tuple(sorted(by)), tuple(by[le] for le in sorted(by))) for value, by in found.items()}


def _point(newest: Sample, oldest: Sample) -> Point:
    most, mean, least = newest.loads or (None, None, None)
    requests, good = _grown(newest.requests, oldest.requests), _grown(newest.goodput_requests, oldest.goodput_requests)
    return Point(
        newest.unix_seconds,
        newest.hit_ratio,
        load_max=most,
        load_mean=mean,
        load_min=least,
        ttft_hit_p50_seconds=_median(newest.ttft.get(HIT), oldest.ttft.get(HIT)),
        ttft_partial_p50_seconds=_median(newest.ttft.get(PARTIAL), oldest.ttft.get(PARTIAL)),
        ttft_miss_p50_seconds=_median(newest.ttft.get(MISS), oldest.ttft.get(MISS)),
        good_requests=good,
        requests=requests,
        seconds=newest.monotonic_seconds - oldest.monotonic_seconds,
    )


def _grown(newest: float | None, oldest: float | None) -> float | None:
    """None when it isn't known, or began again. What wasn't known before has begun in between, at 0."""
    return None if newest is None or newest < (oldest or 0.0) else newest - (oldest or 0.0)


def _median(newest: Histogram | None, oldest: Histogram | None) -> float | None:
    """Of what came in between; None when that was little, or the histogram began again."""
    if newest is None or (oldest is not None and oldest.bounds != newest.bounds):
        return None
    before = oldest.counts if oldest is not None else (0.0,) * len(newest.counts)
    counts = tuple(new - old for new, old in zip(newest.counts, before, strict=True))
    enough = min(counts, default=0.0) >= 0 and counts and counts[-1] >= MIN_OBSERVATIONS
    return Histogram(newest.bounds, counts).quantile(0.5) if enough else None
