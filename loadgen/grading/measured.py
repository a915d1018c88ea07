"""One policy's requests, and the facts about them that several figures need: which were good, rates, token gaps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import nan

import numpy as np

from prefixwatch.loadgen.grading.resampling import Sample
from prefixwatch.loadgen.request_log.columns import Bools, Columns, Texts
from prefixwatch.slo.objective import Floats, Objective
from prefixwatch.slo.selection import ALL_REQUESTS

MIN_PACE_REQUESTS = 10
"""Completed requests of a repeat, below which its pace isn't looked at."""


class Measured:
    """The measured requests of one policy with the objectives they are graded on.

    Everything derived is computed once, when it is first used.
    """

    def __init__(
        self,
        columns: Columns,
        objectives: Sequence[Objective] = (),
        *,
        workers: int | None = None,
    ) -> None:
        """`workers` is the size of the fleet, so that workers without a request count; None: those in the log."""
        self.columns = columns
        self.objectives = objectives
        self.workers = workers
        self._covered: dict[Objective, Bools] = {}

    def __len__(self) -> int:
        return len(self.columns)

    @cached_property
    def cache_class(self) -> Texts:
        """Hit, partial, miss or unknown, per request."""
        return self.columns.cache_class()

    def covered(self, objective: Objective) -> Bools:
        """Which requests this objective selects."""
        if objective not in self._covered:
            columns = self.columns
            names = {name: objective.covers(name) for name in set(columns.request_class)}
            covered = np.array([names[name] for name in columns.request_class], dtype=np.bool_)
            if objective.selection != ALL_REQUESTS:
                covered &= np.array([objective.selection.covers(each) for each in columns.facts()], dtype=np.bool_)
            self._covered[objective] = covered
        return self._covered[objective]

    @cached_property
    def good(self) -> Bools:
        """Which requests completed and met every objective that covers them."""
        good = self.columns.completed
        fields = self.columns.request_fields()
        for objective in self.objectives:
            good = good & ~(self.covered(objective) & (objective.judge(fields) == 0.0))
        return good

    @cached_property
    def scheduled_seconds(self) -> dict[int, float] | None:
        """Length of each repeat's plan in seconds; None if one has no length in time.

        n requests span n − 1 gaps, so the span is scaled by n / (n − 1).
        """
        seconds: dict[int, float] = {}
        for repeat in np.unique(self.columns.repeat).tolist():
            times = self.columns.scheduled[self.columns.repeat == repeat]
            if len(times) < 2 or times.max() == times.min():
                return None
            seconds[repeat] = float(times.max() - times.min()) * len(times) / (len(times) - 1)
        return seconds

    @cached_property
    def scheduled_rate(self) -> float | None:
        """Requests per second that the plan asked for, over all repeats; None where the plan has no length in time.

        Goodput is this rate times the good share: policies that serve one plan are compared over the same seconds.
        """
        seconds = self.scheduled_seconds
        return len(self) / sum(seconds.values()) if seconds else None

    @cached_property
    def kept_pace_rate(self) -> float | None:
        """The scheduled rate, slowed by how much longer the answers took to end than the requests to come due.

        Both spans are between the 10th and the 90th percentile of the completed requests, by repeat, so that the
        length of an answer has no influence: a fleet that keeps up ends requests at the rate at which they come due.
        """
        rate, columns = self.scheduled_rate, self.columns
        if rate is None or not columns.completed.any():
            return rate
        due = ended = 0.0
        for repeat in np.unique(columns.repeat):
            mine = columns.completed & (columns.repeat == repeat) & ~np.isnan(columns.end)
            if mine.sum() >= MIN_PACE_REQUESTS:
                due += float(np.subtract(*np.quantile(columns.scheduled[mine], (0.9, 0.1))))
                ended += float(np.subtract(*np.quantile(columns.end[mine], (0.9, 0.1))))
        return rate * min(1.0, due / ended) if ended else rate

    @cached_property
    def output_rate(self) -> Floats:
        """Each request's share of the output tokens per second: their mean is the rate.

        Counted are the tokens of completed requests that came while the plan ran: of an answer that went on beyond
        it, the part before, its tokens taken as evenly spaced. A fleet that falls behind thus shows what it delivers,
        not what it is asked for. NaN where the engine reports no output tokens, or the plan has no length in time.
        """
        columns, seconds, rate = self.columns, self.scheduled_seconds, self.scheduled_rate
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

    @property
    def chunk_gaps(self) -> Sample:
        """Gaps between reads that brought content, ms."""
        return Sample(self.columns.gaps_ms, self.columns.gap_counts)

    @property
    def token_gaps(self) -> Sample:
        """The gaps of answers that came token by token, which are inter-token latencies, ms."""
        gaps, chosen = self.chunk_gaps, self.columns.gap_is_token
        if chosen.all():
            return gaps
        assert gaps.counts is not None
        before = np.concatenate([[0], np.cumsum(chosen)])
        ends = np.cumsum(gaps.counts)
        return Sample(gaps.values[chosen], before[ends] - before[ends - gaps.counts])


def goodput(columns: Columns, objectives: Sequence[Objective]) -> Bools:
    """Which requests completed and met every objective of their class."""
    return Measured(columns, objectives).good
