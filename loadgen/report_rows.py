"""Rows of the tables that people read, in the report, in Markdown and on the console: figures as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from loadgen import wording
from loadgen.comparison import METRIC_BY_NAME, Comparison
from loadgen.graded import (
    ClassGrade,
    Interval,
    Limits,
    ObjectiveGrade,
    Percentiles,
    PolicyGrade,
    PredictionCount,
    PredictionGrade,
)
from loadgen.run_figures import RunFigures
from loadgen.summary import Summary, decided

LEADERBOARD = (
    "policy",
    "TTFT p50 ms",
    "TTFT p95 ms",
    "TTFT p99 ms",
    "TPOT p95 ms",
    "hit tokens",
    "goodput req/s",
    "not completed",
    "busiest / mean",
    "decision p99 µs",
)
CLASSES = (
    "policy",
    "class",
    "requests",
    "not completed",
    "TTFT p50 ms",
    "TTFT p95 ms",
    "TTFT p99 ms",
    "goodput",
    "objectives",
)
REUSE = ("policy", "prompt tokens", "expected", "reported", "reported / expected", "by the engines' counters")
RUNS = (
    "policy",
    "repeat",
    "loop",
    "floor p50 ms",
    "floor p99 ms",
    "loop lag p99 ms",
    "client CPU",
    "most in flight",
    "hit counters",
    "query counters",
    "hit ratio",
    "retokenized, tokens",
)
FIGURES = ("policy", "figure", "value", "95 % CI")
_RESULTS = {"pass": "met", "fail": "missed", "inconclusive": "undecided"}


class LatencyRow(NamedTuple):
    """`cells`: (value, its 95 % interval or nothing) at p50, p95 and p99."""

    figure: str
    cells: list[tuple[str, str]]


def leaderboard_row(policy: str, own: PolicyGrade) -> list[str]:
    """A policy's figures in the order of `LEADERBOARD`; latency beside the share of requests that got none."""
    return [
        policy,
        *(wording.number(value) for value in (own.ttft_ms.p50, own.ttft_ms.p95, own.ttft_ms.p99, own.tpot_ms.p95)),
        wording.percent(own.prefix.hit_ratio),
        wording.number(own.goodput_rps),
        _lost(own),
        wording.number(own.hotspot.max_over_mean),
        wording.number(own.router_decision_us.p99),
    ]


def latency_rows(own: PolicyGrade) -> list[LatencyRow]:
    """Every latency that the policy has a figure of."""
    figures: tuple[tuple[str, Percentiles | None, Interval | None], ...] = (
        ("TTFT from schedule", own.ttft_ms, own.ttft_ms_ci95),
        ("TTFT of hits", own.ttft_hit_ms, own.ttft_hit_ms_ci95),
        ("TTFT of partial hits", own.ttft_partial_ms, own.ttft_partial_ms_ci95),
        ("TTFT of misses", own.ttft_miss_ms, own.ttft_miss_ms_ci95),
        ("TTFT from sending", own.ttft_from_send_ms, own.ttft_from_send_ms_ci95),
        ("TPOT", own.tpot_ms, own.tpot_ms_ci95),
        ("ITL", own.itl_ms, own.itl_ms_ci95),
        ("chunk gap", own.chunk_gap_ms, own.chunk_gap_ms_ci95),
        ("end to end", own.e2e_ms, own.e2e_ms_ci95),
        ("client lag", own.client_lag_ms, None),
    )
    return [
        LatencyRow(name, [_cell(found, limits, point) for point in ("p50", "p95", "p99")])
        for name, found, limits in figures
        if found is not None and found.p50 is not None
    ]


def _cell(found: Percentiles, limits: Interval | None, point: str) -> tuple[str, str]:
    return wording.number(getattr(found, point)), wording.limits(None if limits is None else getattr(limits, point))


def figure_rows(policy: str, own: PolicyGrade) -> list[list[str]]:
    """In the order of `FIGURES`: what isn't a latency and has an interval; none that the policy has no figure of."""
    prefix = own.prefix
    rows = [
        ("hit tokens", wording.percent(prefix.hit_ratio), wording.percent_interval(prefix.hit_ratio_ci95)),
        ("hit blocks", wording.percent(prefix.block_hit_ratio), wording.percent_interval(prefix.block_hit_ratio_ci95)),
        _figure("hit tokens a request, mean", prefix.hit_tokens_mean, prefix.hit_tokens_mean_ci95),
        _figure("hit tokens a request, p50", prefix.hit_tokens_p50, prefix.hit_tokens_p50_ci95),
        _figure("hit tokens a request, p95", prefix.hit_tokens_p95, prefix.hit_tokens_p95_ci95),
        _figure("goodput req/s", own.goodput_rps, own.goodput_rps_ci95),
        (
            "not completed",
            wording.percent(own.not_completed_ratio),
            wording.percent_interval(own.not_completed_ratio_ci95),
        ),
        _figure("output tokens/s", own.output_tokens_per_second, own.output_tokens_per_second_ci95),
        _figure("decision p99 µs", own.router_decision_us.p99, _at(own.router_decision_us_ci95, "p99")),
    ]
    return [[policy, *row] for row in rows if row[1] != wording.UNKNOWN]


def _figure(name: str, value: float | None, found: Limits) -> tuple[str, str, str]:
    return name, wording.number(value), _limits(found)


def _at(found: Interval | None, point: str) -> Limits:
    limits: Limits = None if found is None else getattr(found, point)
    return limits


def further_rows(summary: Summary) -> list[list[str]]:
    """Figures beside the leaderboard, a row a figure and a column a policy; none that no policy has."""
    policies = summary.policies.values()
    rows = [
        ["TTFT p95 95 % CI", *(_limits(_at(own.ttft_ms_ci95, "p95")) for own in policies)],
        ["TPOT p95 95 % CI", *(_limits(_at(own.tpot_ms_ci95, "p95")) for own in policies)],
        ["hit tokens 95 % CI", *(wording.percent_interval(own.prefix.hit_ratio_ci95) for own in policies)],
        ["goodput 95 % CI", *(_limits(own.goodput_rps_ci95) for own in policies)],
        ["not completed 95 % CI", *(wording.percent_interval(own.not_completed_ratio_ci95) for own in policies)],
        [
            "hit tokens a request",
            *(_with(own.prefix.hit_tokens_mean, own.prefix.hit_tokens_mean_ci95) for own in policies),
        ],
        [
            "output tokens/s",
            *(_with(own.output_tokens_per_second, own.output_tokens_per_second_ci95) for own in policies),
        ],
        ["end to end p95 ms", *(_p95(own.e2e_ms, own.e2e_ms_ci95) for own in policies)],
        ["ITL p95 ms", *(_p95(own.itl_ms, own.itl_ms_ci95) for own in policies)],
        ["chunk gap p95 ms", *(_p95(own.chunk_gap_ms, own.chunk_gap_ms_ci95) for own in policies)],
        ["client lag p95 ms", *(_p95(own.client_lag_ms) for own in policies)],
        ["client floor p50 ms", *(_floor(summary, name) for name in summary.policies)],
        ["of expected hits", *(_of_expected(own) for own in summary.policies.values())],
        ["retokenized tokens", *(_retokenized(summary, name) for name in summary.policies)],
    ]
    return [row for row in rows if set(row[1:]) != {wording.UNKNOWN}]


def _limits(found: Limits) -> str:
    return wording.limits(found) or wording.UNKNOWN


def _with(value: float | None, found: Limits) -> str:
    return wording.number(value) + (f" ({wording.limits(found)})" if found is not None else "")


def _p95(found: Percentiles | None, limits: Interval | None = None) -> str:
    return _with(None if found is None else found.p95, _at(limits, "p95"))


def _floor(summary: Summary, policy: str) -> str:
    """Of the run in which it was highest."""
    floors = [run.client_floor_p50_ms for run in summary.runs if run.policy == policy]
    return wording.number(max((floor for floor in floors if floor is not None), default=None))


def _of_expected(own: PolicyGrade) -> str:
    return wording.percent(_ratio(own.prefix.hit_tokens, own.prefix.expected_hit_tokens))


def _retokenized(summary: Summary, policy: str) -> str:
    lost = [run.retokenization_loss_tokens for run in summary.runs if run.policy == policy]
    known = [tokens for tokens in lost if tokens is not None]
    return _tokens(sum(known) if known else None)


def class_rows(policy: str, own: PolicyGrade) -> list[list[str]]:
    """In the order of `CLASSES`; none where all requests are of one."""
    return [_class_row(policy, name, found) for name, found in own.classes.items()]


def _class_row(policy: str, name: str, own: ClassGrade) -> list[str]:
    objectives = [f"{o.name} {wording.percent(o.measured)} {_RESULTS[decided(o)]}" for o in own.objectives]
    return [
        policy,
        name,
        f"{own.requests.scheduled:,}",
        _lost(own),
        *(wording.number(value) for value in (own.ttft_ms.p50, own.ttft_ms.p95, own.ttft_ms.p99)),
        wording.percent(own.goodput_ratio),
        ", ".join(objectives) or wording.UNKNOWN,
    ]


def reuse_rows(summary: Summary) -> list[list[str]]:
    """In the order of `REUSE`, of the policies whose engines report reuse."""
    return [
        [
            name,
            _tokens(own.prefix.prompt_tokens),
            _tokens(own.prefix.expected_hit_tokens),
            _tokens(own.prefix.hit_tokens),
            wording.percent(_ratio(own.prefix.hit_tokens, own.prefix.expected_hit_tokens)),
            wording.percent(_counted_ratio([run for run in summary.runs if run.policy == name])),
        ]
        for name, own in summary.policies.items()
        if own.prefix.hit_tokens is not None
    ]


def _counted_ratio(runs: Sequence[RunFigures]) -> float | None:
    """The engines' counters over all runs of a policy; None as soon as one has none."""
    counters = [run.engine for run in runs]
    hits = [None if found is None else found.hit_tokens for found in counters]
    queries = [None if found is None else found.query_tokens for found in counters]
    if not counters or None in hits or None in queries:
        return None
    return _ratio(sum(h for h in hits if h is not None), sum(q for q in queries if q is not None))


def run_table(runs: Sequence[RunFigures]) -> list[list[str]]:
    """`RUNS` and a row a run, without the columns that nothing is known of; empty where nothing is known of any, as of
    simulated runs."""
    rows = [_run_row(run) for run in runs if run.cpu_share is not None or run.engine is not None]
    if not rows:
        return []
    known = [place for place in range(len(RUNS)) if any(row[place] != wording.UNKNOWN for row in rows)]
    return [[line[place] for place in known] for line in (list(RUNS), *rows)]


def _run_row(run: RunFigures) -> list[str]:
    engine = run.engine
    return [
        run.policy,
        str(run.repeat + 1),
        "open" if run.loop == "open" else f"closed, {run.concurrency} users",
        wording.number(run.client_floor_p50_ms),
        wording.number(run.client_floor_p99_ms),
        wording.number(run.loop_lag_p99_ms),
        wording.percent(run.cpu_share),
        _tokens(run.in_flight_max),
        wording.UNKNOWN if engine is None else _from_to(engine.start_hit_tokens, engine.end_hit_tokens),
        wording.UNKNOWN if engine is None else _from_to(engine.start_query_tokens, engine.end_query_tokens),
        wording.UNKNOWN if engine is None else wording.percent(engine.hit_ratio),
        _tokens(run.retokenization_loss_tokens),
    ]


def loop_label(runs: Sequence[RunFigures]) -> str:
    """Which kind of loop the runs were, in words; empty where nobody says."""
    users = [run.concurrency for run in runs if run.loop == "closed"]
    if users:
        return f"closed loop of {users[0]} users"
    return "open loop" if runs else ""


def comparison_rows(summary: Summary) -> dict[str, list[dict[str, Any]]]:
    """The comparisons with the baseline, by policy."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for found in summary.comparison:
        rows.setdefault(found.a, []).append(_comparison_row(found))
    return rows


def _comparison_row(found: Comparison) -> dict[str, Any]:
    metric = METRIC_BY_NAME[found.metric]
    return {
        "metric": f"{metric.title}{', ' + metric.unit if metric.unit else ''}",
        "pairs": found.pairs,
        "b": wording.number(found.b_value),
        "a": wording.number(found.a_value),
        "difference": wording.signed(found.difference),
        "relative": wording.signed_percent(found.relative),
        "ci95": wording.interval(found.ci95),
        "p": wording.number(found.p_adjusted, 2),
        "effect": wording.effect(found),
    }


def objective_row(policy: str, objective: ObjectiveGrade) -> dict[str, str]:
    """An objective, what was measured, and what that decides."""
    return {
        "policy": policy,
        "name": objective.name,
        "rule": objective.rule,
        "measured": wording.percent(objective.measured),
        "ci95": wording.percent_interval(objective.ci95),
        "good": f"{objective.good:,} of {objective.total:,}",
        "excluded": f"{objective.excluded:,}",
        "result": _RESULTS[decided(objective)],
    }


def reason_rows(policy: str, own: PolicyGrade) -> list[list[str]]:
    """The router's branches by their share."""
    placed = sum(own.reasons.values())
    return [[policy, reason, wording.percent(count / placed), f"{count:,}"] for reason, count in own.reasons.items()]


def prediction_rows(policy: str, own: PolicyGrade) -> list[list[str]]:
    """What became of the predicted hit tokens, all together and by cause."""
    prediction = own.prediction
    if prediction is None:
        return []
    causes = [(cause.replace("_", " "), *_counts(count)) for cause, count in prediction.by_cause.items()]
    rows = [("all", *_counts(prediction)), *causes] if len(causes) > 1 else causes
    return [
        [policy, cause, wording.percent(requests / prediction.requests), f"{requests:,}", *(f"{n:,}" for n in tokens)]
        for cause, requests, *tokens in rows
    ]


def _counts(count: PredictionCount | PredictionGrade) -> tuple[int, int, int]:
    return count.requests, count.predicted_tokens or 0, count.delivered_tokens or 0


def _lost(own: PolicyGrade | ClassGrade) -> str:
    """Share of the requests that didn't complete."""
    scheduled = own.requests.scheduled
    return wording.percent((scheduled - own.requests.completed) / scheduled if scheduled else None)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _tokens(value: float | None) -> str:
    return wording.UNKNOWN if value is None else f"{value:,.0f}"


def _from_to(start: float | None, end: float | None) -> str:
    return f"{_tokens(start)} → {_tokens(end)}"
