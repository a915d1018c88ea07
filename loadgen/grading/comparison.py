"""The comparison of every policy with the baseline, or of two runs, in the figures of `figures.COMPARED`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from pydantic import Field

from prefixwatch.documents.section import Section
from prefixwatch.loadgen.grading.figures import COMPARED, DEFINITIONS, SECONDARY, Definition
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.grading.statistics import Difference, compare_paired, compare_unpaired, holm
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.slo.wilson import CONFIDENCE

SIGNIFICANCE = 1 - CONFIDENCE


class Comparison(Section):
    """`a` against the baseline `b` in one figure; every difference is a − b, in the figure's own unit."""

    a: str
    b: str
    metric: str = Field(description="name of the figure")
    unit: str = ""
    a_value: float | None
    b_value: float | None
    difference: float | None = Field(description="a - b")
    relative: float | None = Field(description="(a - b) / b")
    ci95: tuple[float, float] | None = Field(description="of the difference; null with too few requests")
    p_value: float | None = Field(description="permutation of blocks, for this figure alone")
    p_adjusted: float | None = Field(
        description="Holm-corrected over all comparisons of the run in the main figures, or in the secondary ones"
    )
    significant: bool = Field(description="p_adjusted < 0.05, and the interval excludes 0")
    pairs: int = Field(description="requests that both served, by repeat and position in the plan")
    blocks: int = Field(description="blocks of consecutive requests that were resampled")


class _Compared(NamedTuple):
    a: str
    b: str
    figure: Definition
    found: Difference


def compare_policies(policies: Mapping[str, Measured], *, seed: int = 0) -> list[Comparison]:
    """Every policy except the first against the first, in every figure that both have."""
    compared: list[_Compared] = []
    if not policies:
        return []
    (baseline, base), *others = policies.items()
    for name, own in others:
        here, there = pair(own.columns, base.columns)
        repeats = own.columns.repeat[here]
        for figure in map(DEFINITIONS.__getitem__, COMPARED):
            a, b = figure.sample(own).take(here), figure.sample(base).take(there)
            found = compare_paired(a, b, repeats, figure.statistic, seed=seed)
            compared.append(_Compared(name, baseline, figure, found))
    return _corrected(compared)


def compare_runs(runs: Iterable[tuple[str, Measured, str, Measured]]) -> list[Comparison]:
    """Requests of two runs, each as (name of a, a, name of b, b): paired if both served one plan, else unpaired.

    Holm's correction is over all of them, main and secondary figures apart.
    """
    compared = []
    for a_name, a, b_name, b in runs:
        paired = same_plan(a.columns, b.columns)
        for figure in map(DEFINITIONS.__getitem__, COMPARED):
            x, y, repeats = figure.sample(a), figure.sample(b), (a.columns.repeat, b.columns.repeat)
            if paired:
                found = compare_paired(x, y, repeats[0], figure.statistic)
            else:
                found = compare_unpaired(x, y, *repeats, figure.statistic)
            compared.append(_Compared(a_name, b_name, figure, found))
    return _corrected(compared)


def same_plan(a: Columns, b: Columns) -> bool:
    """Both sent the same requests at the same times; only the words of the prompts may differ."""
    names = ("repeat", "index", "scheduled", "planned_prompt", "shared")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


def pair(a: Columns, b: Columns) -> tuple[list[int], list[int]]:
    """Rows of the requests that both have, by (repeat, index), in plan order."""
    place = {key: row for row, key in enumerate(zip(b.repeat.tolist(), b.index.tolist(), strict=True))}
    keys = zip(a.repeat.tolist(), a.index.tolist(), strict=True)
    rows = [(row, place[key]) for row, key in enumerate(keys) if key in place]
    return [here for here, _ in rows], [there for _, there in rows]


def _corrected(compared: Sequence[_Compared]) -> list[Comparison]:
    """Holm's correction over the main figures that could be compared, and over the secondary ones; a figure that
    neither or only one side has is left out."""
    known = [row for row in compared if row.found.difference is not None]
    main = holm([None if row.figure.name in SECONDARY else row.found.p_value for row in known])
    secondary = holm([row.found.p_value if row.figure.name in SECONDARY else None for row in known])
    return [
        _comparison(row, of_secondary if row.figure.name in SECONDARY else of_main)
        for row, of_main, of_secondary in zip(known, main, secondary, strict=True)
    ]


def _comparison(row: _Compared, p_adjusted: float | None) -> Comparison:
    found = row.found
    certain = found.ci95 is not None and not found.ci95[0] <= 0 <= found.ci95[1]
    return Comparison(
        a=row.a,
        b=row.b,
        metric=row.figure.name,
        unit=row.figure.unit,
        a_value=found.a,
        b_value=found.b,
        difference=found.difference,
        relative=found.difference / found.b if found.difference is not None and found.b else None,
        ci95=found.ci95,
        p_value=found.p_value,
        p_adjusted=p_adjusted,
        significant=certain and p_adjusted is not None and p_adjusted < SIGNIFICANCE,
        pairs=found.pairs,
        blocks=found.blocks,
    )
