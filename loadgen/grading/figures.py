"""Every figure of a policy, defined once: name, unit, the values it is taken from, and how its interval is found.

Grades, comparisons, reports and data frames read this table; a new figure is a new row of it. Names and units are a
contract (`summary.json`, schema 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from prefixwatch.kvcache.cache_class import HIT, MISS, PARTIAL
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.grading.model import Figure, Limits
from prefixwatch.loadgen.grading.resampling import MEAN, SUM, Sample, Statistic
from prefixwatch.loadgen.grading.statistics import mean_interval, quantile_intervals, share_interval
from prefixwatch.loadgen.request_log.columns import Bools, Ints
from prefixwatch.slo.objective import Floats
from prefixwatch.slo.wilson import wilson

Better = Literal["lower", "higher"]
OVERLOADED_OVER_MEAN = 1.5
HOTSPOT_WINDOW_SECONDS = 30.0
HOTSPOT_MIN_REQUESTS_PER_WORKER = 4


@dataclass(frozen=True, slots=True)
class Measure:
    """A value per request, and the statistics of it that are figures.

    With `quantiles` the figures are `{name}_p50` and so on; without, the one figure is the mean, or the sum if `total`.
    """

    name: str
    title: str
    unit: str
    values: Callable[[Measured], Floats | Sample]
    """NaN for a request that has no such value."""
    quantiles: tuple[float, ...] = ()
    total: bool = False
    better: Better = "lower"
    interval: Literal["blocks", "share", "wilson", "none"] = "blocks"
    """`blocks`: resampled blocks of the run; `share`: no narrower than Wilson's either; `wilson`: Wilson's alone."""
    scale: Callable[[Measured], float | None] = lambda measured: 1.0
    """Factor from the statistic to the figure; None: the figure is unknown."""

    def sample(self, measured: Measured) -> Sample:
        """The values of all requests, in plan order."""
        values = self.values(measured)
        return values if isinstance(values, Sample) else Sample(values)

    def statistics(self) -> list[tuple[str, str, Statistic]]:
        """(figure name, title, statistic) of each figure."""
        if self.quantiles:
            points = [(f"p{100 * quantile:.0f}", Statistic(quantile)) for quantile in self.quantiles]
            return [(f"{self.name}_{point}", f"{self.title} {point}", statistic) for point, statistic in points]
        return [(self.name, self.title, SUM if self.total else MEAN)]

    def figures(self, measured: Measured, *, intervals: bool = True) -> list[Figure]:
        """One row per figure; its value is None when no request has a value."""
        sample, scale = self.sample(measured), self.scale(measured)
        n = sample.known
        statistics = self.statistics()
        observed = sample.observe_all([statistic for *_, statistic in statistics])
        if scale is None or not n:
            return [Figure(name=name, unit=self.unit, value=None, ci95=None, n=n) for name, *_ in statistics]
        found = self._limits(sample, measured) if intervals else [None] * len(statistics)
        return [
            Figure(
                name=name,
                unit=self.unit,
                value=None if value is None else int(value) if self.total else value * scale,
                ci95=None if limits is None else (limits[0] * scale, limits[1] * scale),
                n=n,
            )
            for (name, *_), value, limits in zip(statistics, observed, found, strict=True)
        ]

    def _limits(self, sample: Sample, measured: Measured) -> Sequence[Limits]:
        repeats = measured.columns.repeat
        if self.quantiles and self.interval == "blocks":
            return quantile_intervals(sample, repeats, self.quantiles)
        match self.interval:
            case "blocks":
                return [mean_interval(sample, repeats)]
            case "share":
                return [share_interval(sample.values, repeats)]
            case "wilson":
                return [wilson(int(sample.values.sum()), len(sample))]
            case "none":
                return [None] * max(1, len(self.quantiles))


@dataclass(frozen=True, slots=True)
class Definition:
    """A figure that is a statistic of the requests' values, and so can be compared between two runs."""

    name: str
    title: str
    unit: str
    better: Better
    statistic: Statistic
    measure: Measure

    def sample(self, measured: Measured) -> Sample:
        """The values of all requests in the figure's unit; all NaN where the figure is unknown."""
        sample, scale = self.measure.sample(measured), self.measure.scale(measured)
        factor = np.nan if scale is None else scale
        return sample if factor == 1.0 else Sample(sample.values * factor, sample.counts, sample.weights)

    @property
    def heading(self) -> str:
        """Title and unit, as a table's row is named."""
        named = self.unit == "ratio" or self.unit in self.title
        return self.title if named else f"{self.title}, {unit_text(self.unit)}"


def _ttft_of(cache: str) -> Callable[[Measured], Floats]:
    return lambda m: np.where(m.cache_class == cache, m.columns.wait * 1e3, np.nan)


def _hit_ratio(m: Measured) -> Sample:
    return Sample(m.columns.cached, weights=m.columns.prompt)


def _block_hit_ratio(m: Measured) -> Sample:
    return Sample(m.columns.cached // m.columns.block_size, weights=m.columns.prompt // m.columns.block_size)


def _where_reported(m: Measured, values: Floats) -> Floats:
    return np.where(np.isnan(m.columns.cached), np.nan, values)


def _of_answers(m: Measured, chosen: Bools) -> Floats:
    """1 or 0 for each completed request."""
    return np.where(m.columns.completed, chosen.astype(np.float64), np.nan)


_TAILS = (0.5, 0.95, 0.99)
_TTFT = Measure("ttft", "TTFT", "ms", lambda m: m.columns.wait * 1e3, _TAILS)
_GOOD_RATIO = Measure(
    "goodput_ratio", "good requests", "ratio", lambda m: m.good.astype(np.float64), better="higher", interval="wilson"
)

MEASURES: tuple[Measure, ...] = (
    _TTFT,
    Measure("ttft_hit", "TTFT of hits", "ms", _ttft_of(HIT), _TAILS),
    Measure("ttft_partial", "TTFT of partial hits", "ms", _ttft_of(PARTIAL), _TAILS),
    Measure("ttft_miss", "TTFT of misses", "ms", _ttft_of(MISS), _TAILS),
    Measure("ttft_from_send", "TTFT from sending", "ms", lambda m: (m.columns.ttft - m.columns.lag) * 1e3, _TAILS),
    Measure("first_answer", "first answer token", "ms", lambda m: m.columns.first_answer * 1e3, _TAILS),
    Measure("tpot", "TPOT", "ms", lambda m: m.columns.tpot * 1e3, _TAILS),
    Measure("itl", "ITL", "ms", lambda m: m.token_gaps, _TAILS),
    Measure("chunk_gap", "chunk gap", "ms", lambda m: m.chunk_gaps, _TAILS),
    Measure("e2e", "end to end", "ms", lambda m: np.where(m.columns.completed, m.columns.e2e * 1e3, np.nan), _TAILS),
    Measure("client_lag", "client lag", "ms", lambda m: m.columns.lag * 1e3, _TAILS, interval="none"),
    Measure("router_decision", "router decision", "us", lambda m: m.columns.decision_us, _TAILS),
    Measure(
        "prompt_tokens",
        "prompt tokens",
        "tokens",
        lambda m: _where_reported(m, m.columns.prompt),
        total=True,
        interval="none",
    ),
    Measure(
        "hit_tokens", "hit tokens", "tokens", lambda m: m.columns.cached, total=True, better="higher", interval="none"
    ),
    Measure(
        "expected_hit_tokens",
        "expected hit tokens",
        "tokens",
        lambda m: _where_reported(m, m.columns.reusable()),
        total=True,
        better="higher",
        interval="none",
    ),
    Measure("hit_ratio", "hit tokens / prompt tokens", "ratio", _hit_ratio, better="higher"),
    Measure("block_hit_ratio", "hit blocks / prompt blocks", "ratio", _block_hit_ratio, better="higher"),
    Measure("hit_tokens_mean", "hit tokens per request, mean", "tokens", lambda m: m.columns.cached, better="higher"),
    Measure(
        "hit_tokens", "hit tokens per request,", "tokens", lambda m: m.columns.cached, (0.5, 0.95), better="higher"
    ),
    Measure(
        "goodput_rps",
        "goodput",
        "req/s",
        lambda m: m.good.astype(np.float64),
        better="higher",
        interval="share",
        scale=lambda m: m.scheduled_rate,
    ),
    _GOOD_RATIO,
    Measure(
        "not_completed_ratio",
        "not completed",
        "ratio",
        lambda m: (~m.columns.completed).astype(np.float64),
        interval="share",
    ),
    Measure(
        "offered_rps",
        "offered",
        "req/s",
        lambda m: np.ones(len(m)),
        better="higher",
        interval="none",
        scale=lambda m: m.scheduled_rate,
    ),
    Measure(
        "achieved_rps",
        "achieved",
        "req/s",
        lambda m: m.columns.completed.astype(np.float64),
        better="higher",
        interval="none",
        scale=lambda m: m.kept_pace_rate,
    ),
    Measure(
        "without_output_tokens_ratio",
        "answers without output tokens",
        "ratio",
        lambda m: _of_answers(m, np.isnan(m.columns.output)),
        interval="none",
    ),
    Measure(
        "without_cached_tokens_ratio",
        "answers without cached tokens",
        "ratio",
        lambda m: _of_answers(m, np.isnan(m.columns.cached)),
        interval="none",
    ),
    Measure("output_tokens_per_second", "output", "tokens/s", lambda m: m.output_rate, better="higher"),
)
"""In the order of summary.json. Reuse is over the requests whose engine reports it, zero included; its denominator is
every prompt token of those same requests (inference-perf#715, EM44)."""

CLASS_MEASURES = (_TTFT, _GOOD_RATIO)
"""What is graded of each request class apart."""

HOTSPOT_TITLES = {
    "hotspot_max_over_mean": ("busiest / mean", "x"),
    "hotspot_overloaded_share": ("overloaded workers", "ratio"),
    "hotspot_top_share": ("tokens of the busiest worker", "ratio"),
}

DEFINITIONS = {
    name: Definition(name, title, measure.unit, measure.better, statistic, measure)
    for measure in MEASURES
    for name, title, statistic in measure.statistics()
}

COMPARED = (
    "ttft_p95",
    "ttft_p50",
    "hit_tokens_mean",
    "hit_ratio",
    "goodput_rps",
    "not_completed_ratio",
    "tpot_p95",
    "itl_p95",
    "e2e_p50",
    "e2e_p95",
    "output_tokens_per_second",
)
"""The figures that two policies or runs are compared on, in the order to show them."""

SECONDARY = frozenset({"hit_ratio", "itl_p95", "e2e_p50", "e2e_p95", "output_tokens_per_second"})
"""Corrected for their number among themselves, so that many figures don't hide a difference in the main ones."""


def unit_text(unit: str) -> str:
    """A unit as people write it."""
    return {"us": "µs", "x": "×"}.get(unit, unit)


def figures_of(measured: Measured, measures: Iterable[Measure] = MEASURES, *, intervals: bool = True) -> list[Figure]:
    """The figures of these measures, one row each."""
    return [figure for measure in measures for figure in measure.figures(measured, intervals=intervals)]


def hotspot_figures(measured: Measured) -> list[Figure]:
    """How unevenly the prompt tokens sent in a stretch of time were spread over the workers.

    Time is cut into windows of `HOTSPOT_WINDOW_SECONDS` by scheduled time; a worker's load in a window is the
    prompt tokens it was sent. Running requests would miss a fleet whose paced sessions leave nothing in flight
    while all of them go to one worker (AMD-AGI/Infera#103, RT04). Windows of fewer than
    `HOTSPOT_MIN_REQUESTS_PER_WORKER` × workers requests are uneven by chance and left out; a run with no other
    is taken as one window per repeat.

    - max_over_mean: busiest worker's load / mean load, mean over windows weighted by their tokens;
    - overloaded_share: share of workers whose load exceeds 1.5 × mean, mean over windows;
    - top_share: share of all prompt tokens that the busiest worker of the whole run was sent.

    Null when no request names a worker.
    """
    columns = measured.columns
    placed = columns.worker != ""
    names, position = np.unique(columns.worker[placed].astype(str), return_inverse=True)
    values: tuple[float | None, ...] = (None, None, None)
    if len(names):
        fleet = max(measured.workers or 0, len(names))
        tokens = columns.prompt[placed]
        loads = _window_loads(
            columns.repeat[placed], columns.scheduled[placed], position.astype(np.int64), tokens, fleet
        )
        mean = loads.mean(axis=1)
        values = (
            float(np.average(loads.max(axis=1) / mean, weights=mean)),
            float((loads > OVERLOADED_OVER_MEAN * mean[:, None]).mean()),
            float(np.bincount(position, weights=tokens).max() / tokens.sum()),
        )
    return [
        Figure(name=name, unit=unit, value=value, ci95=None, n=int(placed.sum()))
        for (name, (_, unit)), value in zip(HOTSPOT_TITLES.items(), values, strict=True)
    ]


def _window_loads(repeat: Ints, scheduled: Floats, worker: Ints, tokens: Floats, fleet: int) -> Floats:
    """Prompt tokens by window and worker, of the windows with enough traffic."""
    window = np.floor(scheduled / HOTSPOT_WINDOW_SECONDS)
    for keys in (np.column_stack([repeat, window]), repeat[:, None]):
        distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
        cells, cell = len(distinct), inverse.ravel()
        loads: Floats = np.zeros((cells, fleet))
        np.add.at(loads, (cell, worker), tokens)
        enough = np.bincount(cell, minlength=cells) >= HOTSPOT_MIN_REQUESTS_PER_WORKER * fleet
        if enough.any():
            return loads[enough]
    return loads
