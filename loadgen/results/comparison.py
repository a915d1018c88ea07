"""Two finished runs compared: which figures differ, by how much, and with what confidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from prefixwatch.documents.errors import InputError
from prefixwatch.documents.section import Section
from prefixwatch.loadgen.grading import wording
from prefixwatch.loadgen.grading.comparison import Comparison, compare_runs, same_plan
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.grading.summary import columns_by_policy
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.results.run_folder import FinishedRun, read_run

EXIT_CODES = {"same": 0, "better": 0, "worse": 1, "inconclusive": 3}


class RunDifference(Section):
    """One figure of run A, the baseline, and of run B."""

    a: str = Field(description="policy of run A")
    b: str = Field(description="policy of run B")
    metric: str = Field(description="name of the figure")
    unit: str
    a_value: float | None
    b_value: float | None
    difference: float | None = Field(description="b - a")
    relative: float | None = Field(description="(b - a) / a")
    ci95: tuple[float, float] | None = Field(description="of the difference; null with too few requests")
    p_value: float | None = Field(description="permutation of blocks, for this figure alone")
    p_adjusted: float | None = Field(description="Holm-corrected over all main figures, or all secondary ones")
    significant: bool = Field(description="p_adjusted < 0.05, and the interval excludes 0")
    effect: Literal["better", "worse", "not significant"] = Field(description="of B against A")
    pairs: int
    blocks: int

    @classmethod
    def of(cls, found: Comparison) -> RunDifference:
        """From a comparison of B, its `a`, with the baseline A, its `b`."""
        swapped = {"a": found.b, "b": found.a, "a_value": found.b_value, "b_value": found.a_value}
        return cls(**{**found.model_dump(), **swapped, "effect": wording.effect(found)})


class RunsCompared(Section):
    """The result of `prefixwatch compare`, and its JSON. `a` is run A, the baseline, everywhere."""

    schema_version: Literal[2] = Field(default=2, serialization_alias="schema")
    a: str = Field(description="folder of the baseline run")
    b: str = Field(description="folder of the run that is compared with it")
    paired: bool = Field(description="both served one plan, so that requests were compared one by one")
    comparison: list[RunDifference]
    reasons: list[str] = Field(description="why there is no verdict; empty when there is one")
    notes: list[str] = Field(default=[], description="the notes of both runs' summaries, such as closed loops")
    verdict: Literal["same", "better", "worse", "inconclusive"]


def run_compare(
    a: Path, b: Path, policies: Sequence[str], slo: Sequence[str], tolerance_percent: float
) -> tuple[RunsCompared, int]:
    """Compare the runs in two folders; the exit code is 1 when B is significantly worse in any figure.

    `policies` names those to compare, none for all that both have; if each run has a single one, those are compared
    whatever they are called. A loss of less than `tolerance_percent` of A's figure is ignored. Raises InputError.
    """
    first, second = read_run(a, slo), read_run(b, slo)
    objectives = first.objectives
    if not slo and [o.rule for o in first.objectives] != [o.rule for o in second.objectives]:
        raise InputError(f"{a} and {b} were graded on different objectives: name those to grade both on with --slo")
    pairs = _pairs(first, second, policies)
    found = [
        RunDifference.of(each)
        for each in compare_runs(
            (
                name_b,
                Measured(of_b, objectives),
                name_a,
                Measured(of_a, objectives),
            )
            for name_a, of_a, name_b, of_b in pairs
        )
    ]
    reasons = [f"{run.path}: {reason}" for run in (first, second) for reason in run.summary.validity.reasons]
    if all(comparison.ci95 is None for comparison in found):
        reasons.append("too few requests for an interval: run longer, or more repeats")
    notes = [f"{run.path}: {note}" for run in (first, second) for note in run.summary.notes]
    result = RunsCompared(
        a=str(a),
        b=str(b),
        paired=all(same_plan(of_a, of_b) for _, of_a, _, of_b in pairs),
        comparison=found,
        reasons=reasons,
        notes=[*(_plan_note(*each) for each in pairs if not same_plan(each[1], each[3])), *dict.fromkeys(notes)],
        verdict="inconclusive" if reasons else _verdict(found, tolerance_percent / 100),
    )
    return result, EXIT_CODES[result.verdict]


def _pairs(first: FinishedRun, second: FinishedRun, policies: Sequence[str]) -> list[tuple[str, Columns, str, Columns]]:
    """(policy of A, its requests, policy of B, its requests) for each comparison."""
    a, b = (columns_by_policy(run.log, block_size=run.block_size) for run in (first, second))
    for name in policies:
        for run, own in ((first, a), (second, b)):
            if name not in own:
                raise InputError(f"{run.path}: has no policy '{name}', only {', '.join(own)}")
    if policies:
        shared = list(policies)
    elif len(a) == len(b) == 1:
        return [(*next(iter(a.items())), *next(iter(b.items())))]
    else:
        shared = [name for name in a if name in b]
    if not shared:
        raise InputError(f"no policy is in both runs: {first.path} has {', '.join(a)}; {second.path} {', '.join(b)}")
    return [(name, a[name], name, b[name]) for name in shared]


def _plan_note(name_a: str, a: Columns, name_b: str, b: Columns) -> str:
    """How two plans differ, and what share of its own bound each run reached."""
    return f"the plans differ: A {name_a} sent {_plan(a)}; B {name_b} sent {_plan(b)}"


def _plan(columns: Columns) -> str:
    reported = ~np.isnan(columns.cached)
    prompt, cached = columns.prompt[reported].sum(), columns.cached[reported].sum()
    bound = columns.reusable()[reported].sum()
    rate = Measured(columns).scheduled_rate
    text = f"{len(columns):,} requests at {wording.number(rate)} req/s, {columns.prompt.mean():,.0f} prompt tokens each"
    if not prompt:
        return text
    efficiency = wording.percent(cached / bound) if bound else wording.UNKNOWN
    return f"{text}, of which {wording.percent(bound / prompt)} were reusable and {efficiency} of those were hits"


def _verdict(found: Sequence[RunDifference], tolerance: float) -> Literal["same", "better", "worse"]:
    effects = {c.effect for c in found if abs(c.relative if c.relative is not None else 1.0) > tolerance}
    return "worse" if "worse" in effects else "better" if "better" in effects else "same"
