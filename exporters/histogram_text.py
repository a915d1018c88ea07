"""Our histograms as the metrics page writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from prometheus_client.core import HistogramMetricFamily

from exporters.scraping.histogram import Histogram


def add_histogram(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    """Add a histogram's buckets, and its sum and count where the sum is known."""
    buckets = list(zip(_bucket_names(histogram.bounds), histogram.counts, strict=True))
    family.add_metric(labels, buckets, histogram.total)


@lru_cache
def _bucket_names(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return tuple("+Inf" if math.isinf(bound) else repr(bound) for bound in bounds)
