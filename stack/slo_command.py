"""`prefixwatch slo`: check SLO documents, write rules from them, grade a request log by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from alerts.alertmanager import configuration
from alerts.build import build, known_metrics, notes, rendered, slo_notes
from alerts.burn_rate import burn_rates
from alerts.catalogue import load_catalogue
from alerts.kubernetes import prometheus_rule
from alerts.rule import RuleFile, dump
from alerts.settings import RuleSettings
from loadgen.columns import Columns
from loadgen.grade import grade_objective
from loadgen.graded import ObjectiveGrade
from loadgen.records import read_request_table
from slo.definition import SloDefinition
from slo.definitions import load_slos
from slo.document import load_objectives
from slo.library import shipped_names
from slo.sloth import losses, specifications
from slo.window import promql
from stack.errors import UsageError
from stack.generated_files import report_outdated

FORMATS = ("prometheus", "sloth", "kubernetes")


def check(names_or_paths: Sequence[str]) -> list[dict[str, Any]]:
    """Each objective of the documents, as it is understood. Raises DocumentError and RuleError."""
    return [
        {
            "slo": slo.name,
            "service": slo.service,
            "rule": slo.rule,
            "window": promql(slo.window_seconds),
            "window_kind": "calendar" if slo.calendar else "rolling",
            "method": slo.method,
            "alerts": "any bad event"
            if slo.zero_tolerance
            else ", ".join(f"{r.factor:g} × over {promql(r.long_seconds)} ({r.severity})" for r in burn_rates(slo)),
            "notes": slo_notes(slo),
        }
        for slo in load_slos(names_or_paths or shipped_names(), known_metrics())
    ]


def check_table(found: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("SLO", "rule", "window", "burn-rate alerts")
    for row in found:
        table.add_row(row["slo"], row["rule"], f"{row['window']} {row['window_kind']}", row["alerts"])
    return table


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The command line of `prefixwatch slo build`."""

    documents: Sequence[str] = ()
    out: Path = Path("alerts/rules")
    check: bool = False
    format: str = "prometheus"
    settings: RuleSettings = field(default_factory=RuleSettings)
    alertmanager: Path | None = None
    """Where an Alertmanager configuration is written; None: nowhere."""


def run_build(options: BuildOptions, console: Console) -> int:
    """Writes the files, or with `check` says which differ: 1 if any. Raises DocumentError, RuleError, SlothError."""
    files = build(options.documents, options.settings)
    wanted = {options.out / name: content for name, content in _formatted(files, options).items()}
    if options.alertmanager is not None:
        wanted[options.alertmanager] = configuration(load_catalogue(options.settings.thresholds))
    for note in _sloth_losses(options) if options.format == "sloth" else notes(files):
        console.print(f"note: {note}", highlight=False)
    if options.check:
        return _compare(wanted, options, console)
    for path, content in wanted.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path}: can't be written: {error.strerror or error}") from error
    console.print(f"{len(wanted)} files written to {options.out}", highlight=False, soft_wrap=True)
    return 0


def _formatted(files: Sequence[RuleFile], options: BuildOptions) -> dict[str, str]:
    match options.format:
        case "prometheus":
            return rendered(files)
        case "kubernetes":
            return {f"{file.name}.yaml": dump(prometheus_rule(file)) for file in files}
        case "sloth":
            return {f"{name}.yaml": dump(spec) for name, spec in specifications(_slos(options)).items()}
    raise UsageError(f"--format {options.format}: use one of {', '.join(FORMATS)}")


def _sloth_losses(options: BuildOptions) -> list[str]:
    slos = _slos(options)
    return [*(note for slo in slos for note in slo.notes), *losses(slos)]


def _slos(options: BuildOptions) -> list[SloDefinition]:
    return load_slos(options.documents or shipped_names(), known_metrics())


def _compare(wanted: Mapping[Path, str], options: BuildOptions, console: Console) -> int:
    remedy = "run prefixwatch slo build with these options"
    return report_outdated(wanted, options.out.glob("*.yaml"), remedy, console)


def grade(requests: Path, names_or_paths: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Each policy's grade by each objective; 1 if one was missed, 3 if none could be judged.

    Raises DocumentError, also for an SLO that single requests can't be judged by, and UsageError.
    """
    objectives = load_objectives(names_or_paths)
    try:
        table = read_request_table(requests)
    except ValueError as error:
        raise UsageError(str(error)) from error
    grades = {}
    for policy in sorted(pc.unique(table["policy"]).to_pylist()):
        columns = Columns.of(table.filter(pc.equal(table["policy"], policy)))
        grades[policy] = [grade_objective(columns, objective).model_dump() for objective in objectives]
    verdicts = [row["ok"] for rows in grades.values() for row in rows]
    exit_code = 1 if False in verdicts else 3 if None in verdicts or not verdicts else 0
    return {"requests": str(requests), "policies": grades}, exit_code


def grade_table(found: Mapping[str, Any]) -> Table:
    table = Table("policy", "objective", "rule", "measured", "good", "result")
    for policy, rows in found["policies"].items():
        for row in map(ObjectiveGrade.model_validate, rows):
            measured = "unknown" if row.measured is None else f"{row.measured * 100:.2f} %"
            result = {True: "met", False: "missed", None: "undecided"}[row.ok]
            table.add_row(policy, row.name, row.rule, measured, f"{row.good:,} of {row.total:,}", result)
    return table
