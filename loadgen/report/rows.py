"""Rows of the tables that people read, in the report, in Markdown and on the console: figures as text.

A table of figures names them; `grading.figures` says what each is called and in which unit it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from prefixwatch.loadgen.grading import wording
from prefixwatch.loadgen.grading.comparison import Comparison
from prefixwatch.loadgen.grading.figures import DEFINITIONS, MEASURES, Measure
from prefixwatch.loadgen.grading.model import ClassGrade, ObjectiveGrade, PolicyGrade, PredictionCount, PredictionGrade
from prefixwatch.loadgen.grading.run_figures import RunFigures
from prefixwatch.loadgen.grading.summary import Summary, decided

_LEADERBOARD = {
    "TTFT p50 ms": "ttft_p50",
    "TTFT p95 ms": "ttft_p95",
    "TTFT p99 ms": "ttft_p99",
    "TPOT p95 ms": "tpot_p95",
    "hit tokens": "hit_ratio",
    "goodput req/s": "goodput_rps",
    "not completed": "not_completed_ratio",
    "busiest / mean": "hotspot_max_over_mean",
    "decision p99 µs": "router_decision_p99",
}
LEADERBOARD = ("policy", *_LEADERBOARD)
_CLASSES = {
    "TTFT p50 ms": "ttft_p50",
    "TTFT p95 ms": "ttft_p95",
    "TTFT p99 ms": "ttft_p99",
    "goodput": "goodput_ratio",
}
CLASSES = ("policy", "class", "requests", "not completed", *_CLASSES, "objectives")
_OTHERS = (
    "hit_ratio",
    "block_hit_ratio",
    "hit_tokens_mean",
    "hit_tokens_p50",
    "hit_tokens_p95",
    "goodput_rps",
    "not_completed_ratio",
    "offered_rps",
    "achieved_rps",
    "output_tokens_per_second",
    "without_output_tokens_ratio",
    "without_cached_tokens_ratio",
    "router_decision_p99",
)
"""Figures with an interval that aren't latencies."""
FIGURES = ("policy", "figure", "value", "95 % CI")
_INTERVALS = {
    "TTFT p95 95 % CI": "ttft_p95",
    "TPOT p95 95 % CI": "tpot_p95",
    "hit tokens 95 % CI": "hit_ratio",
    "goodput 95 % CI": "goodput_rps",
    "not completed 95 % CI": "not_completed_ratio",
}
_MORE = {
    "offered req/s": "offered_rps",
    "achieved req/s": "achieved_rps",
    "hit tokens per request": "hit_tokens_mean",
    "output tokens/s": "output_tokens_per_second",
    "end to end p95 ms": "e2e_p95",
    "ITL p95 ms": "itl_p95",
    "chunk gap p95 ms": "chunk_gap_p95",
    "client lag p95 ms": "client_lag_p95",
}
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
_RESULTS = {"pass": "met", "fail": "missed", "inconclusive": "undecided"}


class LatencyRow(NamedTuple):
    """`cells`: (value, its 95 % interval or nothing) at p50, p95 and p99."""

    figure: str
    cells: list[tuple[str, str]]


def leaderboard_row(policy: str, own: PolicyGrade) -> list[str]:
    """A policy's figures in the order of `LEADERBOARD`; latency beside the share of requests that got none."""
    return [policy, *(wording.figure_text(own, name) for name in _LEADERBOARD.values())]


def latency_rows(own: PolicyGrade) -> list[LatencyRow]:
    """Every latency that the policy has a value of."""
    return [
        LatencyRow(
            measure.title,
            [(wording.figure_text(own, name), wording.limits_text(own, name)) for name, *_ in measure.statistics()],
        )
        for measure in MEASURES
        if measure.unit == "ms" and own.value(f"{measure.name}_p50") is not None and not _repeats_ttft(own, measure)
    ]


def _repeats_ttft(own: PolicyGrade, measure: Measure) -> bool:
    """Without reasoning, the first answer token is the first token."""
    names = [name.removeprefix("first_answer") for name, *_ in measure.statistics()]
    return measure.name == "first_answer" and all(
        own.value(f"first_answer{point}") == own.value(f"ttft{point}") for point in names
    )


def latencies_by_policy(summary: Summary) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title, cells) of each latency that a policy has: p50, p95 and p99 of one policy after another."""
    rows = {name: {row.figure: row.cells for row in latency_rows(own)} for name, own in summary.policies.items()}
    titles = [measure.title for measure in MEASURES if any(measure.title in own for own in rows.values())]
    unknown = [(wording.UNKNOWN, "")] * 3
    return [(title, [cell for own in rows.values() for cell in own.get(title, unknown)]) for title in titles]


def figures_by_policy(summary: Summary) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title, cells) of the other figures, one cell per policy: value and interval."""
    policies = summary.policies.values()
    return [
        (
            DEFINITIONS[name].heading,
            [(wording.figure_text(own, name), wording.limits_text(own, name)) for own in policies],
        )
        for name in _OTHERS
        if any(own.value(name) is not None for own in policies)
    ]


def figure_rows(policy: str, own: PolicyGrade) -> list[list[str]]:
    """In the order of `FIGURES`: figures that have an interval and aren't latencies, where known."""
    return [
        [
            policy,
            DEFINITIONS[name].heading,
            wording.figure_text(own, name),
            wording.limits_text(own, name) or wording.UNKNOWN,
        ]
        for name in _OTHERS
        if own.value(name) is not None
    ]


def secondary_rows(summary: Summary) -> list[list[str]]:
    """Figures beside the leaderboard, one row per figure and one column per policy; none that no policy has."""
    policies = summary.policies.values()
    rows = [
        *([title, *(_interval(own, name) for own in policies)] for title, name in _INTERVALS.items()),
        *([title, *(_with_interval(own, name) for own in policies)] for title, name in _MORE.items()),
        ["client floor p50 ms", *(_floor(summary, name) for name in summary.policies)],
        ["of expected hits", *(_of_expected(own) for own in policies)],
        ["retokenized tokens", *(_retokenized(summary, name) for name in summary.policies)],
    ]
    return [row for row in rows if set(row[1:]) != {wording.UNKNOWN}]


def _interval(own: PolicyGrade, name: str) -> str:
    return wording.limits_text(own, name) or wording.UNKNOWN


def _with_interval(own: PolicyGrade, name: str) -> str:
    text, limits = wording.figure_text(own, name), _interval(own, name)
    return text if limits == wording.UNKNOWN else f"{text} ({limits})"


def _floor(summary: Summary, policy: str) -> str:
    """Of the run in which it was highest."""
    floors = [run.client_floor_p50_ms for run in summary.runs if run.policy == policy]
    return wording.number(max((floor for floor in floors if floor is not None), default=None))


def _of_expected(own: PolicyGrade) -> str:
    return wording.percent(_ratio(own.value("hit_tokens"), own.value("expected_hit_tokens")))


def _retokenized(summary: Summary, policy: str) -> str:
    lost = [run.retokenization_loss_tokens for run in summary.runs if run.policy == policy]
    known = [tokens for tokens in lost if tokens is not None]
    return _tokens(sum(known) if known else None)


def class_rows(policy: str, own: PolicyGrade) -> list[list[str]]:
    """In the order of `CLASSES`; none where all requests are of one."""
    return [_class_row(policy, name, found) for name, found in own.classes.items()]


def _class_row(policy: str, name: str, own: ClassGrade) -> list[str]:
    objectives = [f"{o.name} {wording.percent(o.measured)} {_RESULTS[decided(o)]}" for o in own.objectives]
    requests = own.requests
    return [
        policy,
        name,
        f"{requests.scheduled:,}",
        wording.percent(_ratio(requests.scheduled - requests.completed, requests.scheduled)),
        *(wording.figure_text(own, figure) for figure in _CLASSES.values()),
        ", ".join(objectives) or wording.UNKNOWN,
    ]


def reuse_rows(summary: Summary) -> list[list[str]]:
    """In the order of `REUSE`, of the policies whose engines report reuse."""
    return [
        [
            name,
            *(wording.figure_text(own, figure) for figure in ("prompt_tokens", "expected_hit_tokens", "hit_tokens")),
            _of_expected(own),
            wording.percent(_counted_ratio([run for run in summary.runs if run.policy == name])),
        ]
        for name, own in summary.policies.items()
        if own.value("hit_tokens") is not None
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
    """`RUNS` and one row per run, without the columns that nothing is known of; empty where nothing is known of any,
    as of simulated runs."""
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
    """Which kind of loop the runs were, in words; empty where it is unknown."""
    users = [run.concurrency for run in runs if run.loop == "closed"]
    if users:
        return f"closed loop of {users[0]} users"
    if any(run.loop == "serial" for run in runs):
        return "serial replay"
    return "open loop" if runs else ""


def comparison_rows(summary: Summary) -> dict[str, list[dict[str, Any]]]:
    """The comparisons with the baseline, by policy."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for found in summary.comparison:
        rows.setdefault(found.a, []).append(_comparison_row(found))
    return rows


def _comparison_row(found: Comparison) -> dict[str, Any]:
    return {
        "metric": DEFINITIONS[found.metric].heading,
        "pairs": found.pairs,
        "b": wording.value_text(found.b_value, found.unit),
        "a": wording.value_text(found.a_value, found.unit),
        "difference": wording.difference_text(found.difference, found.unit),
        "relative": wording.signed_percent(found.relative),
        "ci95": wording.difference_limits(found.ci95, found.unit),
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
    """The outcome of the predicted hit tokens, all together and by cause."""
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


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _tokens(value: float | None) -> str:
    return wording.UNKNOWN if value is None else f"{value:,.0f}"


def _from_to(start: float | None, end: float | None) -> str:
    return f"{_tokens(start)} → {_tokens(end)}"
