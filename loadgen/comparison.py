"""Which figures two policies are compared on, and the comparison of every policy with the baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from loadgen.columns import Columns
from loadgen.figures import hit_ratio, output_rate, scheduled_rate, token_gaps
from loadgen.grade import goodput
from loadgen.resampling import MEAN, Sample, Statistic
from loadgen.statistics import (
    CONFIDENCE,
    RESAMPLES,
    Difference,
    compare_paired,
    compare_unpaired,
    holm,
)
from slo.objective import Floats, Objective

SIGNIFICANCE = 1 - CONFIDENCE


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a policy that is a statistic of its requests' values."""

    name: str
    title: str
    unit: str
    better: Literal["lower", "higher"]
    statistic: Statistic
    values: Callable[[Columns, Sequence[Objective]], Floats | Sample]
    further: bool = False
    """Corrected among themselves, so that many figures don't hide a difference in the main ones."""

    def sample(self, columns: Columns, objectives: Sequence[Objective]) -> Sample:
        """The figure of each request."""
        values = self.values(columns, objectives)
        return values if isinstance(values, Sample) else Sample(values)


def _goodput_rps(columns: Columns, objectives: Sequence[Objective]) -> Floats:
    rate = scheduled_rate(columns)
    return goodput(columns, objectives).astype(np.float64) * (np.nan if rate is None else rate)


def _e2e_ms(columns: Columns, _: Sequence[Objective]) -> Floats:
    return np.where(columns.completed, columns.e2e * 1e3, np.nan)


METRICS = (
    Metric("ttft_p95_ms", "TTFT p95", "ms", "lower", Statistic(0.95), lambda c, _: c.wait * 1e3),
    Metric("ttft_p50_ms", "TTFT p50", "ms", "lower", Statistic(0.5), lambda c, _: c.wait * 1e3),
    Metric("hit_tokens_mean", "hit tokens", "tokens/request", "higher", MEAN, lambda c, _: c.cached),
    Metric("hit_ratio", "hit ratio", "", "higher", MEAN, lambda c, _: hit_ratio(c), further=True),
    Metric("goodput_rps", "goodput", "req/s", "higher", MEAN, _goodput_rps),
    Metric("completed_ratio", "completed", "", "higher", MEAN, lambda c, _: c.completed.astype(np.float64)),
    Metric("tpot_p95_ms", "TPOT p95", "ms", "lower", Statistic(0.95), lambda c, _: c.tpot * 1e3),
    Metric("itl_p95_ms", "ITL p95", "ms", "lower", Statistic(0.95), lambda c, _: token_gaps(c), further=True),
    Metric("e2e_p50_ms", "end to end p50", "ms", "lower", Statistic(0.5), _e2e_ms, further=True),
    Metric("e2e_p95_ms", "end to end p95", "ms", "lower", Statistic(0.95), _e2e_ms, further=True),
    Metric("output_tokens_per_second", "output", "tokens/s", "higher", MEAN, lambda c, _: output_rate(c), further=True),
)
METRIC_BY_NAME = {metric.name: metric for metric in METRICS}


class Comparison(BaseModel):
    """`a` against the baseline `b` in one metric; every difference is a − b, in the metric's own unit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    a: str
    b: str
    metric: str
    a_value: float | None
    b_value: float | None
    difference: float | None = Field(description="a - b")
    relative: float | None = Field(description="(a - b) / b")
    ci95: tuple[float, float] | None = Field(description="of the difference; null with too few requests")
    p_value: float | None = Field(description="paired permutation of blocks, for this metric alone")
    p_adjusted: float | None = Field(
        description="Holm-corrected over all comparisons of the run in the main figures, or in the further ones"
    )
    significant: bool = Field(description="p_adjusted < 0.05, and the interval excludes 0")
    pairs: int = Field(description="requests that both policies served, by repeat and position in the plan")
    blocks: int = Field(description="blocks of consecutive requests that were resampled")


def compare_policies(
    columns: Mapping[str, Columns], objectives: Sequence[Objective], *, seed: int = 0, resamples: int = RESAMPLES
) -> list[Comparison]:
    """Every policy but the first against the first, in every metric that both have."""
    names = list(columns)
    compared: list[tuple[str, str, Metric, Difference]] = []
    for name in names[1:]:
        here, there = pair(columns[name], columns[names[0]])
        for metric in METRICS:
            a = metric.sample(columns[name], objectives).take(here)
            b = metric.sample(columns[names[0]], objectives).take(there)
            difference = compare_paired(
                a, b, columns[name].repeat[here], metric.statistic, seed=seed, resamples=resamples
            )
            compared.append((name, names[0], metric, difference))
    return _corrected(compared)


def compare_runs(
    runs: Sequence[tuple[str, Columns, str, Columns]],
    objectives: Sequence[Objective],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> list[Comparison]:
    """Requests of two runs, each as (name of a, a, name of b, b): paired if both served one plan, else unpaired.

    Holm's correction is over all of them, main figures and further ones apart.
    """
    compared: list[tuple[str, str, Metric, Difference]] = []
    for a_name, a, b_name, b in runs:
        if same_plan(a, b):
            compared += [
                (
                    a_name,
                    b_name,
                    metric,
                    compare_paired(x, y, a.repeat, metric.statistic, seed=seed, resamples=resamples),
                )
                for metric, x, y in _values(a, b, objectives)
            ]
        else:
            compared += [
                (
                    a_name,
                    b_name,
                    metric,
                    compare_unpaired(x, y, a.repeat, b.repeat, metric.statistic, seed=seed, resamples=resamples),
                )
                for metric, x, y in _values(a, b, objectives)
            ]
    return _corrected(compared)


def same_plan(a: Columns, b: Columns) -> bool:
    """Both sent the same requests at the same times; only the words of the prompts may differ."""
    return all(
        np.array_equal(x, y)
        for x, y in (
            (a.repeat, b.repeat),
            (a.index, b.index),
            (a.scheduled, b.scheduled),
            (a.planned_prompt, b.planned_prompt),
            (a.shared, b.shared),
        )
    )


def _values(a: Columns, b: Columns, objectives: Sequence[Objective]) -> Iterator[tuple[Metric, Sample, Sample]]:
    for metric in METRICS:
        yield metric, metric.sample(a, objectives), metric.sample(b, objectives)


def _corrected(compared: Sequence[tuple[str, str, Metric, Difference]]) -> list[Comparison]:
    """Holm's correction over all main figures that could be compared, and over all further ones; what neither or only
    one side has is left out."""
    known = [row for row in compared if row[3].difference is not None]
    main = holm([None if metric.further else found.p_value for *_, metric, found in known])
    further = holm([found.p_value if metric.further else None for *_, metric, found in known])
    return [
        _comparison(*row, of_further if row[2].further else of_main)
        for row, of_main, of_further in zip(known, main, further, strict=True)
    ]


def pair(a: Columns, b: Columns) -> tuple[list[int], list[int]]:
    """Rows of the requests that both have, by (repeat, index), in plan order."""
    place = {key: row for row, key in enumerate(zip(b.repeat.tolist(), b.index.tolist(), strict=True))}
    keys = zip(a.repeat.tolist(), a.index.tolist(), strict=True)
    rows = [(row, place[key]) for row, key in enumerate(keys) if key in place]
    return [here for here, _ in rows], [there for _, there in rows]


def _comparison(a: str, b: str, metric: Metric, found: Difference, p_adjusted: float | None) -> Comparison:
    certain = found.ci95 is not None and not found.ci95[0] <= 0 <= found.ci95[1]
    relative = found.difference / found.b if found.difference is not None and found.b else None
    return Comparison(
        a=a,
        b=b,
        metric=metric.name,
        a_value=found.a,
        b_value=found.b,
        difference=found.difference,
        relative=relative,
        ci95=found.ci95,
        p_value=found.p_value,
        p_adjusted=p_adjusted,
        significant=certain and p_adjusted is not None and p_adjusted < SIGNIFICANCE,
        pairs=found.pairs,
        blocks=found.blocks,
    )
