"""Accumulators of the request families: counters, histograms, and quantiles of the latest times."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prometheus_client.core import Exemplar

from prefixwatch.exporters.metrics_page.families import FAMILIES, SERVED
from prefixwatch.exporters.metrics_page.rows import Histograms, Rows, rows
from prefixwatch.kvcache.request_record import RequestRecord
from prefixwatch.slo.buckets import BOUNDS

_LONGEST_TRACE_ID = 128 - len("trace_id")
"""OpenMetrics allows an exemplar's labels 128 characters, names included; a longer one spoils the whole page."""

_KEPT = 512
_STALE_AFTER = 16
_SPANS = 20


Series = list[tuple[list[str], float]]
"""Of a counter: the labels' values, and the count."""
HistogramSeries = list[tuple[list[str], list[int], float]]
"""Of a histogram: the labels' values, the counts of its buckets, and their sum."""


class Tally:
    """One counter family. Raises KeyError for a name that isn't in the table of families."""

    def __init__(self, name: str) -> None:
        self.name = FAMILIES[name].name
        self._sums: dict[tuple[str, ...], float] = {}

    def add(self, amount: float, *labels: str) -> None:
        """0 makes the series appear: a rate only sees what is added to a series that is there."""
        self._sums[labels] = self._sums.get(labels, 0.0) + amount

    def total(self, *labels: str) -> float | None:
        """The sum over all identities of the series with these other labels; None when there is none."""
        found = [amount for key, amount in self._sums.items() if key[len(SERVED) :] == labels]
        return sum(found) if found else None

    def state(self) -> Series:
        return [(list(labels), amount) for labels, amount in self._sums.items()]

    def restore(self, state: Series) -> None:
        """Continue from the state of an earlier process; series with other labels than these are left out."""
        width = len(FAMILIES[self.name].given)
        self._sums = {tuple(labels): amount for labels, amount in state if len(labels) == width}

    def items(self) -> Iterable[tuple[tuple[str, ...], float]]:
        """Every series, by its labels' values."""
        return self._sums.items()

    def metric(self) -> Rows:
        return rows(self.name, self._sums.items())


class Distribution:
    """One histogram: counts by bucket, their sum, and the last traced observation of each bucket."""

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] = (), total: float = 0.0) -> None:
        """`counts` and `total` are those to continue from."""
        self._bounds = (*bounds, math.inf)
        self._counts = list(counts) or [0] * len(self._bounds)
        self._exemplars: list[Exemplar | None] = [None] * len(self._bounds)
        self._total = total

    def state(self) -> tuple[list[int], float]:
        return list(self._counts), self._total

    def observe(self, value: float, of: RequestRecord | None = None) -> None:
        slot = bisect_left(self._bounds, value)
        self._counts[slot] += 1
        self._total += value
        if of is not None and 0 < len(of.trace_id) <= _LONGEST_TRACE_ID:
            self._exemplars[slot] = Exemplar({"trace_id": of.trace_id}, value, of.ended_unix_seconds)

    def add_to(self, family: Histograms, labels: Sequence[str]) -> None:
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        below = 0
        for bound, count, exemplar in zip(self._bounds, self._counts, self._exemplars, strict=True):
            below += count
            name = "+Inf" if math.isinf(bound) else repr(float(bound))
            buckets.append((name, below) if exemplar is None else (name, below, exemplar))
        family.add_metric(labels, buckets, self._total)


class Distributions:
    """One histogram family, with the bounds that objectives' thresholds are held to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._bounds = BOUNDS[FAMILIES[name].full_name]
        self._by_labels: dict[tuple[str, ...], Distribution] = {}

    def observe(self, value: float, *labels: str, of: RequestRecord | None = None) -> None:
        """`of` is the request that the value can be traced to."""
        distribution = self._by_labels.get(labels)
        if distribution is None:
            distribution = self._by_labels[labels] = Distribution(self._bounds)
        distribution.observe(value, of)

    def state(self) -> HistogramSeries:
        return [(list(labels), *one.state()) for labels, one in self._by_labels.items()]

    def restore(self, state: HistogramSeries) -> None:
        """As `Tally.restore`; of other buckets than these nothing is used, either."""
        width = len(FAMILIES[self.name].given)
        for labels, counts, total in state:
            if len(labels) == width and len(counts) == len(self._bounds) + 1:
                self._by_labels[tuple(labels)] = Distribution(self._bounds, counts, total)

    def metric(self) -> Histograms:
        family = Histograms(self.name)
        for labels, distribution in self._by_labels.items():
            distribution.add_to(family, labels)
        return family


class RecentTimes:
    """The last 512 observations; their order is taken again after every 16."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_KEPT)
        self._sorted: list[float] = []
        self._since_sorted = 0

    def __len__(self) -> int:
        return len(self._times)

    def add(self, seconds: float) -> None:
        self._times.append(seconds)
        self._since_sorted += 1

    def quantile(self, q: float) -> float:
        """The order statistic at or below this quantile. Raises IndexError without any observation."""
        if not self._sorted or self._since_sorted >= _STALE_AFTER:
            self._sorted, self._since_sorted = sorted(self._times), 0
        return self._sorted[int(q * (len(self._sorted) - 1))]


class Share(NamedTuple):
    """A share of requests, and how many they were."""

    value: float
    requests: int

    @classmethod
    def over(cls, shares: Sequence[Share]) -> Share | None:
        """Of all these requests together; None without any."""
        requests = sum(share.requests for share in shares)
        return cls(sum(share.value * share.requests for share in shares) / requests, requests) if requests else None


class RecentShare:
    """How many of the window's requests count, with a resolution of a twentieth of the window."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._spans: deque[list[float]] = deque()

    def add(self, at_seconds: float, *, counts: bool) -> None:
        if not self._spans or at_seconds >= self._spans[-1][0] + self._window_seconds / _SPANS:
            self._spans.append([at_seconds, 0, 0])
        self._spans[-1][1] += counts
        self._spans[-1][2] += 1

    def share(self, now_seconds: float) -> Share | None:
        """None without a request in the window."""
        while self._spans and self._spans[0][0] < now_seconds - self._window_seconds:
            self._spans.popleft()
        requests = sum(span[2] for span in self._spans)
        return Share(sum(span[1] for span in self._spans) / requests, int(requests)) if requests else None
