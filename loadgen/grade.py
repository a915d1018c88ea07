"""From a request log to one policy's grade: latencies, reuse, balance, goodput and objectives.

Pure. Only the measured phase counts, and every request of it: one that was refused, failed, timed out or was
cut off is in the counts and is bad for goodput, so latency never shows without what it left out.
A figure that nothing supports is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import nan

import numpy as np

from kvcache.blocks import DEFAULT_BLOCK_SIZE
from kvcache.prediction import PredictionCause
from loadgen.columns import HIT, MISS, PARTIAL, Bools, Columns, Ints
from loadgen.figures import (
    block_hit_ratio,
    chunk_gaps,
    hit_ratio,
    not_completed,
    output_rate,
    scheduled_rate,
    token_gaps,
)
from loadgen.graded import (
    ClassGrade,
    HotspotGrade,
    Interval,
    ObjectiveGrade,
    Percentiles,
    PolicyGrade,
    PredictionCount,
    PredictionGrade,
    PrefixGrade,
    RequestCounts,
    Samples,
)
from loadgen.records import Outcome, RequestRecord
from loadgen.resampling import Sample
from loadgen.statistics import mean_interval, percentile, quantile_intervals, share_interval, wilson
from slo.objective import Floats, Objective
from slo.selection import ALL_REQUESTS

OVERLOADED_OVER_MEAN = 1.5
HOTSPOT_WINDOW_SECONDS = 30.0
HOTSPOT_MIN_REQUESTS_PER_WORKER = 4
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
    before the run, so that reuse the plan can't explain is no violation.
    """
    by_policy: dict[str, list[RequestRecord]] = {}
    for record in records:
        by_policy.setdefault(record.policy, []).append(record)
    return {
        policy: grade_policy(Columns.of(rows), objectives, workers=workers, block_size=block_size, warm=warm)
        for policy, rows in by_policy.items()
    }


def grade_policy(
    columns: Columns,
    objectives: Sequence[Objective],
    *,
    workers: int | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    warm: bool = False,
) -> PolicyGrade:
    """One policy's grade, over all its repeats."""
    classes = columns.cache_class(block_size)
    by_class = {name: columns.wait[classes == name] * 1e3 for name in (HIT, PARTIAL, MISS)}
    is_good = goodput(columns, objectives)
    good = int(is_good.sum())
    rate, lost, output = scheduled_rate(columns), not_completed(columns), output_rate(columns)
    good_share = share_interval(is_good.astype(np.float64), columns.repeat)
    return PolicyGrade(
        requests=_counts(columns),
        ttft_ms=_percentiles(columns.wait * 1e3),
        ttft_hit_ms=_percentiles(by_class[HIT]),
        ttft_partial_ms=_percentiles(by_class[PARTIAL]),
        ttft_miss_ms=_percentiles(by_class[MISS]),
        tpot_ms=_percentiles(columns.tpot * 1e3),
        ttft_ms_ci95=_intervals(columns, columns.wait * 1e3),
        ttft_hit_ms_ci95=_intervals(columns, np.where(classes == HIT, columns.wait * 1e3, nan)),
        ttft_partial_ms_ci95=_intervals(columns, np.where(classes == PARTIAL, columns.wait * 1e3, nan)),
        ttft_miss_ms_ci95=_intervals(columns, np.where(classes == MISS, columns.wait * 1e3, nan)),
        tpot_ms_ci95=_intervals(columns, columns.tpot * 1e3),
        ttft_from_send_ms_ci95=_intervals(columns, (columns.ttft - columns.lag) * 1e3),
        e2e_ms_ci95=_intervals(columns, np.where(columns.completed, columns.e2e * 1e3, nan)),
        itl_ms_ci95=_intervals(columns, token_gaps(columns)),
        chunk_gap_ms_ci95=_intervals(columns, chunk_gaps(columns)),
        router_decision_us_ci95=_intervals(columns, columns.decision_us),
        ttft_from_send_ms=_percentiles((columns.ttft - columns.lag) * 1e3),
        client_lag_ms=_percentiles(columns.lag * 1e3),
        e2e_ms=_percentiles(columns.e2e[columns.completed] * 1e3),
        itl_ms=_percentiles(columns.gaps_ms[columns.gap_is_token]),
        chunk_gap_ms=_percentiles(columns.gaps_ms),
        samples=Samples(
            ttft=_known(columns.wait),
            ttft_hit=_known(by_class[HIT]),
            ttft_partial=_known(by_class[PARTIAL]),
            ttft_miss=_known(by_class[MISS]),
            tpot=_known(columns.tpot),
        ),
        prefix=_grade_prefix(columns, block_size),
        goodput_rps=None if rate is None else rate * good / len(columns),
        goodput_ratio=good / len(columns) if len(columns) else None,
        goodput_ci95=wilson(good, len(columns)),
        goodput_rps_ci95=None if rate is None or good_share is None else (rate * good_share[0], rate * good_share[1]),
        not_completed_ratio=float(lost.mean()) if len(columns) else None,
        not_completed_ratio_ci95=share_interval(lost, columns.repeat),
        output_tokens_per_second=None if np.isnan(output).all() else float(np.nanmean(output)),
        output_tokens_per_second_ci95=mean_interval(output, columns.repeat),
        hotspot=grade_hotspot(columns, workers),
        router_decision_us=_percentiles(columns.decision_us),
        reasons=_reasons(columns),
        prediction=_grade_prediction(columns),
        isolation_violations=_isolation_violations(columns, block_size, warm),
        objectives=[grade_objective(columns, objective) for objective in objectives],
        classes=_grade_classes(columns, objectives),
    )


def _grade_classes(columns: Columns, objectives: Sequence[Objective]) -> dict[str, ClassGrade]:
    """The most frequent class first; requests of other classes that an objective covers don't count here."""
    names, counts = np.unique(columns.request_class.astype(str), return_counts=True)
    if len(names) < 2:
        return {}
    return {
        str(names[k]): _grade_class(columns.where(columns.request_class == names[k]), str(names[k]), objectives)
        for k in np.argsort(-counts, kind="stable")
    }


def _grade_class(columns: Columns, name: str, objectives: Sequence[Objective]) -> ClassGrade:
    good = int(goodput(columns, objectives).sum())
    return ClassGrade(
        requests=_counts(columns),
        ttft_ms=_percentiles(columns.wait * 1e3),
        ttft_ms_ci95=_intervals(columns, columns.wait * 1e3),
        goodput_ratio=good / len(columns),
        goodput_ci95=wilson(good, len(columns)),
        objectives=[grade_objective(columns, objective) for objective in objectives if objective.covers(name)],
    )


def goodput(columns: Columns, objectives: Sequence[Objective]) -> Bools:
    """Which requests completed and met every objective of their class."""
    good = columns.completed
    fields = columns.request_fields()
    for objective in objectives:
        good = good & ~(_covered(columns, objective) & (objective.judge(fields) == 0.0))
    return good


def grade_objective(columns: Columns, objective: Objective) -> ObjectiveGrade:
    """The share of the objective's requests that were good; refused, failed, timed-out and cut-off ones are bad."""
    verdicts = objective.judge(columns.request_fields())[_covered(columns, objective)]
    total = _known(verdicts)
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


def grade_hotspot(columns: Columns, workers: int | None = None) -> HotspotGrade:
    """How unevenly the prompt tokens sent in a stretch of time were spread over the workers.

    Time is cut into windows of `HOTSPOT_WINDOW_SECONDS` by scheduled time; a worker's load in a window is the
    prompt tokens it was sent. Running requests would miss a fleet whose paced sessions leave nothing in flight
    while all of them go to one worker (AMD-AGI/Infera#103, RT04). Windows of fewer than
    `HOTSPOT_MIN_REQUESTS_PER_WORKER` × workers requests are uneven by chance and left out; a run with no other
    is taken as one window a repeat.

    - max_over_mean: busiest worker's load / mean load, mean over windows weighted by their tokens;
    - overloaded_share: share of workers whose load exceeds 1.5 × mean, mean over windows;
    - top_share: share of all prompt tokens that the busiest worker of the whole run was sent.

    Null when no request names a worker.
    """
    placed = columns.worker != ""
    names, position = np.unique(columns.worker[placed].astype(str), return_inverse=True)
    if not len(names):
        return HotspotGrade(max_over_mean=None, overloaded_share=None, top_share=None)
    position = position.astype(np.int64)
    fleet = max(workers or 0, len(names))
    tokens = columns.prompt[placed]
    loads = _window_loads(columns, placed, position, tokens, fleet)
    mean = loads.mean(axis=1)
    return HotspotGrade(
        max_over_mean=float(np.average(loads.max(axis=1) / mean, weights=mean)),
        overloaded_share=float((loads > OVERLOADED_OVER_MEAN * mean[:, None]).mean()),
        top_share=float(np.bincount(position, weights=tokens).max() / tokens.sum()),
    )


def _window_loads(columns: Columns, placed: Bools, position: Ints, tokens: Floats, fleet: int) -> Floats:
    """Prompt tokens by window and worker, of the windows with traffic enough."""
    repeat = columns.repeat[placed]
    window = np.floor(columns.scheduled[placed] / HOTSPOT_WINDOW_SECONDS)
    for keys in (np.column_stack([repeat, window]), repeat[:, None]):
        distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
        cells, cell = len(distinct), inverse.ravel()
        loads: Floats = np.zeros((cells, fleet))
        np.add.at(loads, (cell, position), tokens)
        enough = np.bincount(cell, minlength=cells) >= HOTSPOT_MIN_REQUESTS_PER_WORKER * fleet
        if enough.any():
            return loads[enough]
    return loads


def _counts(columns: Columns) -> RequestCounts:
    outcomes: Mapping[str, int] = {outcome.value: int((columns.outcome == outcome.value).sum()) for outcome in Outcome}
    trimmed = {phase: len(keys) for phase, keys in columns.trimmed.items()}
    return RequestCounts(scheduled=len(columns), sent=_known(columns.lag), **outcomes, **trimmed)


def _grade_prefix(columns: Columns, block_size: int) -> PrefixGrade:
    """Sums before ratios; the denominator is every prompt token of the same requests (inference-perf#715, EM44)."""
    reported = ~np.isnan(columns.cached)
    cached, prompt = columns.cached[reported], columns.prompt[reported]
    if not len(cached):
        return PrefixGrade(**dict.fromkeys(PrefixGrade.model_fields, None))
    blocks = int((prompt // block_size).sum())
    p50, p95 = quantile_intervals(columns.cached, columns.repeat, (0.5, 0.95))
    return PrefixGrade(
        prompt_tokens=int(prompt.sum()),
        hit_tokens=int(cached.sum()),
        hit_ratio=float(cached.sum() / prompt.sum()) if prompt.sum() else None,
        block_hit_ratio=float((cached // block_size).sum() / blocks) if blocks else None,
        hit_ratio_ci95=mean_interval(hit_ratio(columns), columns.repeat),
        block_hit_ratio_ci95=mean_interval(block_hit_ratio(columns, block_size), columns.repeat),
        hit_tokens_mean=float(cached.mean()),
        hit_tokens_mean_ci95=mean_interval(columns.cached, columns.repeat),
        hit_tokens_p50=percentile(cached, 50),
        hit_tokens_p50_ci95=p50,
        hit_tokens_p95=percentile(cached, 95),
        hit_tokens_p95_ci95=p95,
        expected_hit_tokens=int(columns.reusable(block_size)[reported].sum()),
    )


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


def _isolation_violations(columns: Columns, block_size: int, warm: bool) -> int | None:
    """Certain ones only: more than a block was reused beyond what this namespace had ever sent as that opening.

    Prompts carry a nonce of their run, so nobody but another namespace of the run can have left them there.
    None when the engines report no reuse, or the caches were warm.
    """
    if warm or np.isnan(columns.cached).all():
        return None
    return int(columns.unexplained(block_size).sum())


def _covered(columns: Columns, objective: Objective) -> Bools:
    names = {name: objective.covers(name) for name in set(columns.request_class)}
    covered = np.array([names[name] for name in columns.request_class], dtype=np.bool_)
    if objective.selection != ALL_REQUESTS:
        covered &= np.array([objective.selection.covers(facts) for facts in columns.facts()], dtype=np.bool_)
    return covered


def _percentiles(values: Floats) -> Percentiles:
    return Percentiles(p50=percentile(values, 50), p95=percentile(values, 95), p99=percentile(values, 99))


def _intervals(columns: Columns, values: Floats | Sample) -> Interval | None:
    if np.isnan(values.values if isinstance(values, Sample) else values).all():
        return None
    p50, p95, p99 = quantile_intervals(values, columns.repeat, (0.5, 0.95, 0.99))
    return Interval(p50=p50, p95=p95, p99=p99)


def _known(values: Floats) -> int:
    return int((~np.isnan(values)).sum())
