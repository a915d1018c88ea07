"""Figures of requests beside their times, as grades and comparisons take them."""

from __future__ import annotations

from math import nan

import numpy as np

from loadgen.columns import Bools, Columns
from loadgen.resampling import Sample
from slo.objective import Floats


def scheduled_seconds(columns: Columns) -> dict[int, float] | None:
    """How long the plan of each repeat is; None where one has no length in time.

    n requests span n − 1 gaps, so the span is scaled by n / (n − 1).
    """
    seconds: dict[int, float] = {}
    for repeat in np.unique(columns.repeat).tolist():
        times = columns.scheduled[columns.repeat == repeat]
        if len(times) < 2 or times.max() == times.min():
            return None
        seconds[repeat] = float(times.max() - times.min()) * len(times) / (len(times) - 1)
    return seconds


def scheduled_rate(columns: Columns) -> float | None:
    """Requests a second that the plan asked for, over all repeats; None where the plan has no length in time.

    Goodput is this rate times the good share: policies that serve one plan are compared over the same seconds.
    """
    seconds = scheduled_seconds(columns)
    return len(columns) / sum(seconds.values()) if seconds else None


def output_rate(columns: Columns) -> Floats:
    """Each request's share of the output tokens a second: their mean is the rate.

    Counted are the tokens of completed requests that came while the plan ran: of an answer that went on beyond it, the
    part before, its tokens taken as evenly spaced. A fleet that falls behind so shows what it delivers, not what it is
    asked for. NaN where the engine reports no output tokens, or the plan has no length in time.
    """
    seconds, rate = scheduled_seconds(columns), scheduled_rate(columns)
    known = columns.completed & ~np.isnan(columns.output)
    if seconds is None or rate is None or not known.any():
        return np.full(len(columns), nan)
    ends = {k: columns.scheduled[columns.repeat == k].min() + length for k, length in seconds.items()}
    until = np.array([ends[k] for k in columns.repeat.tolist()])
    first = columns.scheduled + columns.ttft
    with np.errstate(invalid="ignore", divide="ignore"):
        within = np.clip((until - first) / (columns.end - first), 0.0, 1.0)
    tokens = columns.output * np.where(columns.end <= until, 1.0, np.nan_to_num(within))
    return np.where(columns.completed, tokens, 0.0) * rate


def not_completed(columns: Columns) -> Floats:
    """1 for each request that was refused, failed, timed out or was cut off."""
    return (~columns.completed).astype(np.float64)


def hit_ratio(columns: Columns) -> Sample:
    """Hit tokens of the prompt tokens, where the engine reports any figure."""
    return Sample(columns.cached, weights=columns.prompt)


def block_hit_ratio(columns: Columns, block_size: int) -> Sample:
    """The same in full blocks."""
    return Sample(columns.cached // block_size, weights=columns.prompt // block_size)


def chunk_gaps(columns: Columns) -> Sample:
    """Gaps between reads that brought content, ms."""
    return Sample(columns.gaps_ms, columns.gap_counts)


def token_gaps(columns: Columns) -> Sample:
    """Those of answers that came token by token: inter-token latencies, ms."""
    return _chosen(chunk_gaps(columns), columns.gap_is_token)


def _chosen(sample: Sample, values: Bools) -> Sample:
    assert sample.counts is not None
    if values.all():
        return sample
    before = np.concatenate([[0], np.cumsum(values)])
    ends = np.cumsum(sample.counts)
    return Sample(sample.values[values], before[ends] - before[ends - sample.counts])
