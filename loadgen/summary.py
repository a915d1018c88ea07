"""`summary.json`: what a run found, whether it can be believed, and the verdict.

The JSON schema is committed beside this file (`summary.schema.json`) and is a contract. Keys may be added
under the same `schema` number; none is renamed, removed or given another meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field

from kvcache.blocks import DEFAULT_BLOCK_SIZE
from loadgen.columns import Columns, RequestLog
from loadgen.comparison import Comparison, compare_policies
from loadgen.grade import grade_policy
from loadgen.graded import ObjectiveGrade, PolicyGrade
from loadgen.records import table_of
from loadgen.run_figures import RunFigures, run_notes
from loadgen.steady_state import notes
from loadgen.validity import invalid_reasons
from loadgen.wording import change, number, percent
from slo.objective import Objective

SCHEMA_FILE = Path(__file__).with_name("summary.schema.json")
EXIT_CODES = {"pass": 0, "fail": 1, "inconclusive": 3}
HEADLINE_METRICS = ("ttft_p95_ms", "ttft_p50_ms", "hit_tokens_mean", "goodput_rps")

Verdict = Literal["pass", "fail", "inconclusive"]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the request log doesn't hold of a run. `policies` in the order to show; the first is the baseline."""

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
    client_reasons: Sequence[str] = ()
    """Why the load generator's own checks call the run invalid."""
    runs: Sequence[RunFigures] = ()


class Validity(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    valid: bool
    reasons: list[str]


class Summary(BaseModel):
    """The content of summary.json. What isn't known is null."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    scenario: str
    engine: str
    workers: int | None = Field(description="engines in the fleet; null for a target's, which nobody told")
    repeats: int
    seeds: list[int]
    versions: dict[str, str]
    baseline: str | None = Field(
        description="the policy that the others are compared with; it has no say in the verdict"
    )
    policies: dict[str, PolicyGrade]
    comparison: list[Comparison]
    validity: Validity
    notes: list[str] = Field(
        default=[], description="what to know before comparing percentiles: warm-up, a queue that kept growing"
    )
    runs: list[RunFigures] = Field(
        default=[], description="each run's loop, what the client added, and the engines' own counters"
    )
    verdict: Verdict

    @property
    def fleet(self) -> str:
        """As titles say it, `4 × simulated`."""
        return self.engine if self.workers is None else f"{self.workers} × {self.engine}"

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, indent=2) + "\n"


def build_summary(log: RequestLog, objectives: Sequence[Objective], facts: RunFacts, *, seed: int = 0) -> Summary:
    """Grade every policy, compare the later ones with the first, check the run, and reach a verdict.

    `seed` makes the resampling repeatable.
    """
    table = log if isinstance(log, pa.Table) else table_of(log)
    columns = columns_by_policy(table, facts.policies)
    policies = {
        name: grade_policy(own, objectives, workers=facts.workers, block_size=facts.block_size, warm=facts.warm)
        for name, own in columns.items()
    }
    reasons = invalid_reasons(
        columns,
        objectives,
        block_size=facts.block_size,
        warm=facts.warm,
        requested_in_flight=facts.requested_in_flight,
    )
    reasons += [reason for reason in dict.fromkeys(facts.client_reasons) if reason not in reasons]
    if not columns:
        reasons.append("the request log is empty: nothing was planned or sent")
    return Summary(
        scenario=facts.scenario,
        engine=facts.engine,
        workers=facts.workers,
        repeats=len({repeat for own in columns.values() for repeat in own.repeat.tolist()}),
        seeds=list(facts.seeds),
        versions=dict(facts.versions),
        baseline=next(iter(columns)) if len(columns) > 1 else None,
        policies=policies,
        comparison=compare_policies(columns, objectives, seed=seed),
        validity=Validity(valid=not reasons, reasons=reasons),
        notes=[
            *_trimmed(policies),
            *run_notes(facts.runs, table),
            *(note for name, own in columns.items() for note in notes(name, own)),
        ],
        runs=list(facts.runs),
        verdict=_verdict(policies, valid=not reasons),
    )


def columns_by_policy(log: RequestLog, order: Sequence[str] = ()) -> dict[str, Columns]:
    """The measured requests of each policy, in this order; policies it leaves out come after."""
    table = log if isinstance(log, pa.Table) else table_of(log)
    present = table["policy"].unique().to_pylist()
    names = [*(name for name in order if name in present), *(name for name in present if name not in order)]
    return {name: Columns.of(table.filter(pc.equal(table["policy"], name))) for name in names}


def write_summary(path: Path, summary: Summary) -> None:
    path.write_text(summary.to_json(), encoding="utf-8")


def read_summary(path: Path) -> Summary:
    """Raises pydantic.ValidationError when the file isn't a summary of this schema."""
    return Summary.model_validate_json(path.read_text(encoding="utf-8"))


def summary_schema() -> dict[str, Any]:
    """The JSON schema of summary.json."""
    return Summary.model_json_schema(by_alias=True, mode="serialization")


def write_schema(path: Path = SCHEMA_FILE) -> None:
    path.write_text(json.dumps(summary_schema(), indent=2) + "\n", encoding="utf-8")


def exit_code(summary: Summary) -> int:
    """0 pass, 1 fail, 3 inconclusive."""
    return EXIT_CODES[summary.verdict]


def judged_policies(summary: Summary) -> dict[str, PolicyGrade]:
    """The policies that the verdict is about: all but the baseline, or the only one."""
    return {name: own for name, own in summary.policies.items() if name != summary.baseline}


def verdict_sentence(summary: Summary) -> str:
    """What the run found, for people: a line a policy, then the verdict and why."""
    lines = [_policy_line(summary, name, own) for name, own in judged_policies(summary).items()]
    lines += [f"Note: {note}" for note in summary.notes]
    return "\n".join([*lines, f"Verdict: {summary.verdict.upper()}{_why(summary)}"])


def decided(objective: ObjectiveGrade) -> Verdict:
    """Pass or fail only where the whole Wilson interval lies on one side of the objective."""
    if objective.ci95 is None:
        return "inconclusive"
    low, high = objective.ci95
    if low >= objective.objective:
        return "pass"
    return "fail" if high < objective.objective else "inconclusive"


def _verdict(policies: Mapping[str, PolicyGrade], *, valid: bool) -> Verdict:
    """Of the judged policies: fail if one clearly misses an objective or leaks between tenants."""
    if not valid:
        return "inconclusive"
    judged = list(policies.values())[1:] or list(policies.values())
    if any(own.isolation_violations for own in judged):
        return "fail"
    verdicts = {decided(objective) for own in judged for objective in own.objectives}
    return "fail" if "fail" in verdicts else "inconclusive" if "inconclusive" in verdicts else "pass"


def _trimmed(policies: Mapping[str, PolicyGrade]) -> list[str]:
    """What the grades left out, in words."""
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


def _policy_line(summary: Summary, name: str, own: PolicyGrade) -> str:
    if summary.baseline is None:
        return (
            f"{name}: TTFT p95 {number(own.ttft_ms.p95)} ms, hit tokens {percent(own.prefix.hit_ratio)} of the "
            f"prompts, goodput {number(own.goodput_rps)} req/s ({percent(own.goodput_ratio)}){_lost(own)}"
        )
    found = {c.metric: c for c in summary.comparison if c.a == name}
    headline = [found[metric] for metric in HEADLINE_METRICS if metric in found]
    changed = any(c.significant for c in headline)
    clauses = ", ".join(change(comparison, verdict=changed) for comparison in headline)
    gain = "" if changed else "no significant difference: "
    return f"{name} vs {summary.baseline}: {gain}{clauses}{_lost(summary.policies[summary.baseline], own)}"


def _lost(*policies: PolicyGrade) -> str:
    """Latency never stands without the share of requests that it left out; empty when that is none."""
    shares = [1 - own.requests.completed / own.requests.scheduled for own in policies if own.requests.scheduled]
    return f"; not completed {' → '.join(percent(share) for share in shares)}" if any(shares) else ""


def _why(summary: Summary) -> str:
    if not summary.validity.valid:
        return " – the run can't be believed: " + "; ".join(summary.validity.reasons)
    parts = []
    for name, own in judged_policies(summary).items():
        met = [o for o in own.objectives if decided(o) == "pass"]
        open_ = [o for o in own.objectives if decided(o) != "pass"]
        met_of = (
            f"meets {len(met)} of {len(own.objectives)} objectives" if own.objectives else "had no objectives to meet"
        )
        text = f"{name} {met_of}"
        if open_:
            text += " (" + "; ".join(_open_objective(o) for o in open_) + ")"
        if own.isolation_violations:
            text += f", {own.isolation_violations} requests reused another tenant's cache entries"
        parts.append(text)
    return " – " + "; ".join(parts)


def _open_objective(objective: ObjectiveGrade) -> str:
    state = "missed" if decided(objective) == "fail" else "undecided"
    return f"{objective.name} {state}: {percent(objective.measured)} of {percent(objective.objective)}"
