"""`summary.json`: the figures of a run, whether it is valid, and the verdict.

The JSON schema is committed beside this file (`summary.schema.json`) and is a contract. Keys may be added
under the same `schema` number; no key is renamed, removed or given another meaning.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field

from prefixwatch.documents.section import Section
from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.loadgen.grading.comparison import Comparison, compare_policies
from prefixwatch.loadgen.grading.grade import grade_policy
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.grading.model import ObjectiveGrade, PolicyGrade
from prefixwatch.loadgen.grading.run_figures import RunFigures, refusal_notes, run_notes
from prefixwatch.loadgen.grading.steady_state import notes
from prefixwatch.loadgen.grading.summary_v1 import from_schema_1
from prefixwatch.loadgen.grading.validity import invalid_reasons
from prefixwatch.loadgen.grading.wording import change, figure_text, number, percent
from prefixwatch.loadgen.request_log.cache_moves import CacheFigures
from prefixwatch.loadgen.request_log.columns import Columns, RequestLog
from prefixwatch.loadgen.request_log.event_effects import EventEffect, event_effects
from prefixwatch.loadgen.request_log.records import table_of
from prefixwatch.loadgen.request_log.session_moves import MoveEffect, move_effects
from prefixwatch.loadgen.scenario.fleet_section import EventPlan
from prefixwatch.loadgen.scenario.reuse_section import ReuseObjective
from prefixwatch.slo.objective import Objective

SCHEMA_FILE = Path(__file__).parents[1] / "summary.schema.json"
EXIT_CODES = {"pass": 0, "fail": 1, "inconclusive": 3, "not_graded": 0}
MIN_ACHIEVED_SHARE = 0.9
"""Of the offered rate: a fleet that completes less fell behind."""
HEADLINE_METRICS = ("ttft_p95", "ttft_p50", "hit_tokens_mean", "goodput_rps")

Decision = Literal["pass", "fail", "inconclusive"]
Verdict = Literal["pass", "fail", "inconclusive", "not_graded"]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts of a run that its request log doesn't hold. The first of `policies` is the baseline."""

    scenario: str
    engine: str
    workers: int | None
    policies: Sequence[str] = ()
    """As they appear in the log, if empty."""
    block_size: int = DEFAULT_BLOCK_SIZE
    warm: bool = False
    requested_in_flight: int | None = None
    seeds: Sequence[int] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    started_at: str | None = None
    """ISO 8601, UTC."""
    host: str | None = None
    profile: str | None = None
    """The step-time profile of simulated engines; None for others."""
    client_reasons: Sequence[str] = ()
    """Why the load generator's own checks call the run invalid."""
    notes: Sequence[str] = ()
    """What to know first, such as that another tool sent the requests."""
    runs: Sequence[RunFigures] = ()
    events: EventPlan | None = None
    reuse_objective: ReuseObjective | None = None
    caches: Sequence[CacheFigures] = ()

    @property
    def approximate(self) -> bool:
        """The prompts were made without the model's tokenizer."""
        return any(run.prompts == "approximate" for run in self.runs)


class Validity(Section):
    valid: bool
    reasons: list[str]


class Summary(BaseModel):
    """The content of summary.json. An unknown value is null."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True)

    schema_version: Literal[2] = Field(default=2, alias="schema")
    started_at: str | None = Field(default=None, description="ISO 8601, UTC")
    host: str | None = Field(default=None, description="machine that the load generator ran on")
    versions: dict[str, str]
    scenario: str
    engine: str
    profile: str | None = Field(default=None, description="step-time profile of simulated engines; null for others")
    workers: int | None = Field(description="number of engines; null if unknown (--target without --workers)")
    block_size: int = Field(
        default=DEFAULT_BLOCK_SIZE, description="tokens per KV block of the engines; cache classes depend on it"
    )
    repeats: int
    seeds: list[int]
    baseline: str | None = Field(description="the policy that the others are compared with; the verdict ignores it")
    policies: dict[str, PolicyGrade]
    comparison: list[Comparison]
    validity: Validity
    notes: list[str] = Field(
        default=[], description="needed to read the percentiles: warm-up, a queue that kept growing, closed loops"
    )
    runs: list[RunFigures] = Field(
        default=[], description="each run's loop, what the client added, and the engines' own counters"
    )
    events: list[EventEffect] = Field(default=[], description="the effect of each event of the fleet, by policy")
    moves: list[MoveEffect] = Field(default=[], description="the sessions of each worker that left, by policy")
    caches: list[CacheFigures] = Field(
        default=[], description="reuse by tier and what was moved for it, by policy; of `simulate --cache` only"
    )
    verdict: Verdict

    @property
    def fleet(self) -> str:
        """The form used in titles, `4 × simulated`."""
        return self.engine if self.workers is None else f"{self.workers} × {self.engine}"

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, indent=2) + "\n"


def build_summary(log: RequestLog, objectives: Sequence[Objective], facts: RunFacts, *, seed: int = 0) -> Summary:
    """Grade every policy, compare the later ones with the first, check the run, and decide the verdict.

    `seed` makes the resampling repeatable.
    """
    table = log if isinstance(log, pa.Table) else table_of(log)
    columns = graded_columns(table, facts)
    measured = {name: Measured(own, objectives, workers=facts.workers) for name, own in columns.items()}
    policies = {
        name: grade_policy(own, warm=facts.warm or facts.approximate, reuse_objective=facts.reuse_objective)
        for name, own in measured.items()
    }
    found = invalid_reasons(
        columns,
        objectives,
        warm=facts.warm or facts.approximate,
        requested_in_flight=facts.requested_in_flight,
    )
    reasons = list(dict.fromkeys([*facts.client_reasons, *found, *_ungraded_reuse(policies, facts.reuse_objective)]))
    if not columns:
        reasons.append("the request log is empty: nothing was planned or sent")
    return Summary(
        started_at=facts.started_at,
        host=facts.host,
        versions=dict(facts.versions),
        scenario=facts.scenario,
        engine=facts.engine,
        profile=facts.profile,
        workers=facts.workers,
        block_size=facts.block_size,
        repeats=len({repeat for own in columns.values() for repeat in own.repeat.tolist()}),
        seeds=list(facts.seeds),
        baseline=next(iter(columns)) if len(columns) > 1 else None,
        policies=policies,
        comparison=compare_policies(measured, seed=seed),
        validity=Validity(valid=not reasons, reasons=reasons),
        notes=[
            *facts.notes,
            *_trimmed(policies),
            *(note for name, own in policies.items() for note in _unreported(name, own)),
            *run_notes(facts.runs, table),
            *(note for name in columns for note in refusal_notes(name, table)),
            *(note for name, own in columns.items() for note in notes(name, own)),
        ],
        runs=list(facts.runs),
        events=event_effects(table, list(columns), facts.events),
        moves=move_effects(table, list(columns), facts.events),
        caches=list(facts.caches),
        verdict=_verdict(policies, valid=not reasons),
    )


def graded_columns(log: RequestLog, facts: RunFacts) -> dict[str, Columns]:
    """The measured requests of each policy as they are graded: with what is known of their prompts."""
    columns = columns_by_policy(log, facts.policies, facts.block_size)
    return {name: own.without_plan() for name, own in columns.items()} if facts.approximate else columns


def columns_by_policy(log: RequestLog, order: Sequence[str] = (), block_size: int | None = None) -> dict[str, Columns]:
    """The measured requests of each policy, in this order; policies it leaves out come after.

    `block_size` is that of the engines; by default the one that the log was written with.
    """
    table = log if isinstance(log, pa.Table) else table_of(log)
    present = table["policy"].unique().to_pylist()
    names = [*(name for name in order if name in present), *(name for name in present if name not in order)]
    return {name: Columns.of(table.filter(pc.equal(table["policy"], name)), block_size) for name in names}


def write_summary(path: Path, summary: Summary) -> None:
    path.write_text(summary.to_json(), encoding="utf-8")


def read_summary(path: Path) -> Summary:
    """Read a summary of schema 2 or 1. Raises ValueError when the file isn't one."""
    content = json.loads(path.read_text(encoding="utf-8"))
    old = isinstance(content, dict) and content.get("schema") == 1
    return Summary.model_validate(from_schema_1(content) if old else content)


def summary_schema() -> dict[str, Any]:
    """The JSON schema of summary.json."""
    return Summary.model_json_schema(by_alias=True, mode="serialization")


def write_schema() -> None:
    SCHEMA_FILE.write_text(json.dumps(summary_schema(), indent=2) + "\n", encoding="utf-8")


def exit_code(summary: Summary) -> int:
    """0 pass or nothing to grade, 1 fail, 3 inconclusive."""
    return EXIT_CODES[summary.verdict]


def judged_policies(summary: Summary) -> dict[str, PolicyGrade]:
    """The policies that the verdict is about: all except the baseline, or the only one."""
    return {name: own for name, own in summary.policies.items() if name != summary.baseline}


def verdict_sentence(summary: Summary) -> str:
    """The result in words: one line per policy, the notes, then the verdict and its reasons."""
    lines = [_policy_line(summary, name, own) for name, own in judged_policies(summary).items()]
    lines += [f"Note: {note}" for note in summary.notes]
    return "\n".join([*lines, f"Verdict: {summary.verdict.upper().replace('_', ' ')}{_why(summary)}"])


def decided(objective: ObjectiveGrade) -> Decision:
    """Pass or fail only where the whole Wilson interval lies on one side of the objective."""
    if objective.ci95 is None:
        return "inconclusive"
    low, high = objective.ci95
    if low >= objective.objective:
        return "pass"
    return "fail" if high < objective.objective else "inconclusive"


def _ungraded_reuse(policies: Mapping[str, PolicyGrade], objective: ReuseObjective | None) -> Iterator[str]:
    """Policies whose limit of the weighted figure nothing can be compared with."""
    for name, own in policies.items():
        if objective is not None and objective.at_least is not None and (own.reuse is None or not own.reuse.weighted):
            yield (
                f"{name}: reuse_objective.at_least has nothing to be compared with, for no engine reports reuse, or no "
                "prompt is known to have tokens of the weighted classes: weigh others, or take it out"
            )


def decided_reuse(own: PolicyGrade) -> Verdict:
    """Of the weighted figure, by its whole interval; not_graded without a limit."""
    weighted = None if own.reuse is None else own.reuse.weighted
    if weighted is None or weighted.at_least is None:
        return "not_graded"
    if weighted.ci95 is None:
        return "inconclusive"
    low, high = weighted.ci95
    if low >= weighted.at_least:
        return "pass"
    return "fail" if high < weighted.at_least else "inconclusive"


def _verdict(policies: Mapping[str, PolicyGrade], *, valid: bool) -> Verdict:
    """Of the judged policies: fail if one clearly misses an objective or leaks between tenants; not_graded without
    any objective."""
    if not valid:
        return "inconclusive"
    judged = list(policies.values())[1:] or list(policies.values())
    return worst(policy_verdict(own) for own in judged)


def policy_verdict(own: PolicyGrade) -> Verdict:
    """Fail if one objective is clearly missed or a tenant's cache leaks; no pass for a fleet that fell behind."""
    if own.isolation_violations:
        return "fail"
    verdict = worst([decided_reuse(own), *(decided(objective) for objective in own.objectives)])
    return "inconclusive" if verdict == "pass" and fell_behind(own) else verdict


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """A failure outweighs an open question, which outweighs a pass; not_graded without any."""
    found = set(verdicts)
    order: tuple[Verdict, ...] = ("fail", "inconclusive", "pass")
    return next((verdict for verdict in order if verdict in found), "not_graded")


def fell_behind(own: PolicyGrade) -> bool:
    """The fleet completed requests at a clearly lower rate than they came due."""
    offered, achieved = own.value("offered_rps"), own.value("achieved_rps")
    return offered is not None and achieved is not None and achieved < MIN_ACHIEVED_SHARE * offered


def _trimmed(policies: Mapping[str, PolicyGrade]) -> list[str]:
    """The number of requests that the grades leave out, in words."""
    counts = {name: (own.requests.warm_up, own.requests.cool_down) for name, own in policies.items()}
    if not any(map(any, counts.values())):
        return []
    same = len(set(counts.values())) == 1
    parts = [
        f"{'' if same else name + ': '}{warm_up:,} due in the warm-up, {cool_down:,} in the cool-down"
        for name, (warm_up, cool_down) in list(counts.items())[: 1 if same else None]
    ]
    each = " of each policy" if same and len(counts) > 1 else ""
    return [f"requests{each} sent and logged but not graded: {'; '.join(parts)}"]


def _unreported(name: str, own: PolicyGrade) -> Iterator[str]:
    """Figures that rest on a part of the answers only."""
    for figure, rests in (
        ("without_cached_tokens_ratio", "cached tokens: reuse figures rest on the others"),
        ("without_output_tokens_ratio", "output tokens: TPOT and output rates rest on the others"),
    ):
        if 0 < (own.value(figure) or 0.0) < 1:
            yield f"{name}: {figure_text(own, figure)} of the answers report no {rests}"


def _policy_line(summary: Summary, name: str, own: PolicyGrade) -> str:
    if summary.baseline is None:
        return (
            f"{name}: TTFT p95 {number(own.value('ttft_p95'))} ms, hit tokens {figure_text(own, 'hit_ratio')} of the "
            f"prompts, goodput {number(own.value('goodput_rps'))} req/s ({figure_text(own, 'goodput_ratio')})"
            f"{_lost(own)}"
        )
    found = {c.metric: c for c in summary.comparison if c.a == name}
    headline = [found[metric] for metric in HEADLINE_METRICS if metric in found]
    changed = any(c.significant for c in headline)
    clauses = ", ".join(change(comparison, verdict=changed) for comparison in headline)
    gain = "" if changed else "no significant difference: "
    return f"{name} vs {summary.baseline}: {gain}{clauses}{_lost(summary.policies[summary.baseline], own)}"


def _lost(*policies: PolicyGrade) -> str:
    """The share of requests without a latency, for a sentence about latencies; empty when there are none."""
    shares = [own.value("not_completed_ratio") for own in policies]
    return f"; not completed {' → '.join(percent(share) for share in shares)}" if any(shares) else ""


def _why(summary: Summary) -> str:
    if not summary.validity.valid:
        return " – the run is not valid: " + "; ".join(summary.validity.reasons)
    parts = []
    for name, own in judged_policies(summary).items():
        met = [o for o in own.objectives if decided(o) == "pass"]
        open_ = [o for o in own.objectives if decided(o) != "pass"]
        met_of = f"meets {len(met)} of {len(own.objectives)} objectives" if own.objectives else "has no objectives"
        text = f"{name} {met_of}"
        if fell_behind(own):
            text += (
                f", but completed {figure_text(own, 'achieved_rps')} of {figure_text(own, 'offered_rps')} req/s offered"
            )
        if open_:
            text += " (" + "; ".join(_open_objective(o) for o in open_) + ")"
        if decided_reuse(own) != "not_graded":
            text += f", weighted reuse {_weighted_text(own)}"
        if own.isolation_violations:
            text += f", {own.isolation_violations} requests reused another tenant's cache entries"
        parts.append(text)
    return " – " + "; ".join(parts)


def _weighted_text(own: PolicyGrade) -> str:
    assert own.reuse is not None
    assert own.reuse.weighted is not None
    weighted = own.reuse.weighted
    state = {"pass": "met", "fail": "missed"}.get(decided_reuse(own), "undecided")
    return f"{state}: {number(weighted.value)}, at least {number(weighted.at_least)}"


def _open_objective(objective: ObjectiveGrade) -> str:
    state = "missed" if decided(objective) == "fail" else "undecided"
    return f"{objective.name} {state}: {percent(objective.measured)} of {percent(objective.objective)}"
