"""From a request log to one policy's grade: figures, objectives, predictions, isolation.

Pure. Only the measured phase counts, and every request of it: one that was refused, failed, timed out or was
cut off is in the counts and is bad for goodput, so latency never shows without what it left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.kvcache.cache_class import BASES
from prefixwatch.kvcache.prediction import PredictionCause
from prefixwatch.loadgen.grading.figures import CLASS_MEASURES, figures_of, hotspot_figures
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.grading.model import (
    ClassGrade,
    ObjectiveGrade,
    PolicyGrade,
    PredictionCount,
    PredictionGrade,
    RequestCounts,
)
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.loadgen.reuse.grade import grade_reuse
from prefixwatch.loadgen.reuse.limits import unexplained_reuse
from prefixwatch.loadgen.scenario.reuse_section import ReuseObjective
from prefixwatch.slo.objective import Objective
from prefixwatch.slo.wilson import wilson

EXACT, WITHIN_BLOCK = PredictionCause.EXACT.value, PredictionCause.WITHIN_BLOCK.value


def grade(
    records: Iterable[RequestRecord],
    objectives: Sequence[Objective],
    *,
    workers: int | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    warm: bool = False,
) -> dict[str, PolicyGrade]:
    """Each policy's grade, in the order in which the policies first appear.

    `workers` is the fleet's size (workers that got nothing count); `warm` says that caches held these prompts
    before the run, so that reuse the plan can't explain isn't a violation.
    """
    by_policy: dict[str, list[RequestRecord]] = {}
    for record in records:
        by_policy.setdefault(record.policy, []).append(record)
    return {
        policy: grade_policy(Measured(Columns.of(rows, block_size), objectives, workers=workers), warm=warm)
        for policy, rows in by_policy.items()
    }


def grade_policy(
    measured: Measured, *, warm: bool = False, reuse_objective: ReuseObjective | None = None
) -> PolicyGrade:
    """One policy's grade, over all its repeats."""
    columns = measured.columns
    return PolicyGrade(
        requests=_counts(columns),
        cache_class_basis={name: int((columns.cache_basis() == name).sum()) for name in BASES},
        figures=[*figures_of(measured), *hotspot_figures(measured)],
        objectives=[grade_objective(measured, objective) for objective in measured.objectives],
        reasons=_reasons(columns),
        prediction=_grade_prediction(columns),
        isolation_violations=_isolation_violations(columns, warm),
        reuse=grade_reuse(measured, reuse_objective),
        classes=_grade_classes(measured),
    )


def _grade_classes(measured: Measured) -> dict[str, ClassGrade]:
    """The most frequent class first; requests of other classes that an objective covers don't count here."""
    columns = measured.columns
    names, counts = np.unique(columns.request_class.astype(str), return_counts=True)
    if len(names) < 2:
        return {}
    return {str(names[k]): _grade_class(measured, str(names[k])) for k in np.argsort(-counts, kind="stable")}


def _grade_class(measured: Measured, name: str) -> ClassGrade:
    columns = measured.columns.where(measured.columns.request_class == name)
    own = Measured(columns, measured.objectives, workers=measured.workers)
    return ClassGrade(
        requests=_counts(columns),
        figures=figures_of(own, CLASS_MEASURES),
        objectives=[grade_objective(own, each) for each in measured.objectives if each.covers(name)],
    )


def grade_objective(measured: Measured, objective: Objective) -> ObjectiveGrade:
    """The share of the objective's requests that were good; all that did not complete are bad."""
    verdicts = objective.judge(measured.columns.request_fields())[measured.covered(objective)]
    total = int((~np.isnan(verdicts)).sum())
    good = int(np.nansum(verdicts))
    return ObjectiveGrade(
        name=objective.name,
        rule=objective.rule,
        objective=objective.target,
        measured=good / total if total else None,
        ok=good / total >= objective.target if total else None,
        ci95=wilson(good, total),
        good=good,
        total=total,
        excluded=len(verdicts) - total,
    )


def _counts(columns: Columns) -> RequestCounts:
    outcomes = {outcome.value: int((columns.outcome == outcome.value).sum()) for outcome in Outcome}
    trimmed = {phase: len(keys) for phase, keys in columns.trimmed.items()}
    sent = int((~np.isnan(columns.lag)).sum())
    return RequestCounts(scheduled=len(columns), sent=sent, **outcomes, **trimmed)


def _reasons(columns: Columns) -> dict[str, int]:
    names, counts = np.unique(columns.reason[columns.reason != ""].astype(str), return_counts=True)
    return {str(names[k]): int(counts[k]) for k in np.argsort(-counts, kind="stable")}


def _grade_prediction(columns: Columns) -> PredictionGrade | None:
    known = ~np.isnan(columns.predicted) & ~np.isnan(columns.cached) & (columns.prediction_cause != "")
    if not known.any():
        return None
    cause, predicted, cached = (a[known] for a in (columns.prediction_cause, columns.predicted, columns.cached))
    counts = {}
    for name in sorted(set(cause)):
        own = cause == name
        counts[name] = PredictionCount(
            requests=int(own.sum()),
            predicted_tokens=int(predicted[own].sum()),
            delivered_tokens=int(cached[own].sum()),
        )
    close = sum(counts[name].requests for name in (EXACT, WITHIN_BLOCK) if name in counts)
    return PredictionGrade(
        requests=len(cause),
        predicted_tokens=int(predicted.sum()),
        delivered_tokens=int(cached.sum()),
        within_block_ratio=close / len(cause),
        by_cause=dict(sorted(counts.items(), key=lambda item: -_tokens_apart(item[1]))),
    )


def _tokens_apart(count: PredictionCount) -> int:
    return abs(count.predicted_tokens - count.delivered_tokens)


def _isolation_violations(columns: Columns, warm: bool) -> int | None:
    """Certain ones only: more than a block was reused beyond what the tenant had sent, and another tenant had sent it.

    Prompts carry a nonce of their run, so only another tenant of the run can have left them there. None when the
    engines report no reuse, the caches were warm, or cached tokens cover text that was never sent.
    """
    if warm or np.isnan(columns.cached).all():
        return None
    found = unexplained_reuse(columns)
    return None if found.whole_prompt else int(found.leaked.sum())
