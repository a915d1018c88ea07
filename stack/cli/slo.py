"""`prefixwatch slo`: check SLO documents, write rules from them, grade a request log by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from prefixwatch.alerts.alertmanager import TEMPLATE, configuration
from prefixwatch.alerts.build import build, known_metrics, notes, rendered, slo_notes
from prefixwatch.alerts.burn_rate import burn_rates
from prefixwatch.alerts.rule import RuleFile, dump, prometheus_rule
from prefixwatch.alerts.settings import EXPORTER_URL, GRAFANA_URL, RuleSettings
from prefixwatch.documents.durations import promql, seconds
from prefixwatch.slo.build import load_slos
from prefixwatch.slo.read import shipped_names
from prefixwatch.slo.rule_model import SloDefinition
from prefixwatch.slo.sloth import losses, specifications
from prefixwatch.stack.cli.command import (
    JsonFlag,
    command,
    finish,
    load_option,
    new_app,
    output_option,
    plain_console,
    print_json,
)
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.out_folder import report_outdated, write_files

FORMATS = ("prometheus", "sloth", "kubernetes")
Documents = Annotated[
    list[str] | None, typer.Argument(help="OpenSLO files, or names of shipped ones; default: all shipped.")
]

app = new_app(
    no_args_is_help=True, help="SLO documents (OpenSLO): check them, write rules and alerts, grade a request log."
)


def check(names_or_paths: Sequence[str]) -> list[dict[str, Any]]:
    """Each objective of the documents, as it is understood. Raises InputError."""
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
    """The options of `prefixwatch slo build`."""

    documents: Documents = None
    out: Annotated[Path, output_option(help="Folder for the rule files.")] = Path("alerts/rules")
    check: Annotated[bool, output_option("--check", help="Write nothing; 1 if the folder is out of date.")] = False
    format: Annotated[
        str, output_option(help="`prometheus` rules, `kubernetes` PrometheusRule objects, or `sloth` specs.")
    ] = "prometheus"
    alertmanager: Annotated[
        Path | None,
        output_option(
            help="Also write an Alertmanager configuration to this file, and its texts, prefixwatch.tmpl, beside it."
        ),
    ] = None
    thresholds: Annotated[Path | None, typer.Option(help="Thresholds instead of alerts/thresholds.yaml.")] = None
    scrape_interval: Annotated[float, typer.Option(help="Seconds between Prometheus' scrapes of the exporter.")] = 15.0
    job: Annotated[str, typer.Option(help="The exporter's job label in Prometheus.")] = "prefixwatch"
    source: Annotated[
        str, typer.Option("--from", help="Who measures: `exporter`, or `engines` that Prometheus scrapes itself.")
    ] = "exporter"
    by: Annotated[
        str, typer.Option(help="Labels that split each SLO's budget and alerts, comma-separated: model,cluster.")
    ] = "cluster"
    label: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, a label for every alert, such as team=inference; repeatable.")
    ] = None
    severity_map: Annotated[str, typer.Option(help="Other names of severities: page=critical,ticket=warning.")] = ""
    exporter_url: Annotated[
        str, typer.Option(help="The exporter's address, which serves the runbooks that alerts link to.")
    ] = EXPORTER_URL
    runbooks: Annotated[
        str | None, typer.Option(help="Base URL of runbooks elsewhere: <BASE>/AlertName. Default: the exporter's.")
    ] = None
    dashboards: Annotated[str, typer.Option(help="Base URL of Grafana's dashboards: <BASE>/UID.")] = f"{GRAFANA_URL}/d"
    replica_label: Annotated[
        list[str] | None,
        typer.Option(help="Label in which the exporters of an HA pair differ: replica, and instance; repeatable."),
    ] = None
    dialect: Annotated[str, typer.Option(help="`prometheus`, or `victoriametrics` (no native histograms).")] = (
        "prometheus"
    )
    retention: Annotated[
        str | None, typer.Option(help="How long Prometheus keeps samples, e.g. 15d: a longer SLO window is refused.")
    ] = None
    speedup: Annotated[float, typer.Option(min=1, hidden=True, help="For drills: divide every duration by this.")] = 1.0

    @property
    def settings(self) -> RuleSettings:
        return RuleSettings(
            scrape_interval_seconds=self.scrape_interval,
            job=self.job,
            runbook_base=(self.runbooks or f"{self.exporter_url.rstrip('/')}/runbooks").rstrip("/"),
            dashboard_base=self.dashboards.rstrip("/"),
            by=tuple(dict.fromkeys(("cluster", *(name.strip() for name in self.by.split(",") if name.strip())))),
            labels=_pairs("--label", self.label or []),
            severities=_pairs("--severity-map", self.severity_map.split(",") if self.severity_map else []),
            replica_labels=tuple(self.replica_label or ()),
            dialect=self.dialect,
            source=self.source,
            retention_seconds=None if self.retention is None else _retention(self.retention),
            thresholds=self.thresholds,
            speedup=self.speedup,
        )


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """`a=b` each. Raises UsageError."""
    found = {}
    for item in given:
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise UsageError(f"{option} {item}: write NAME=VALUE")
        found[name] = value
    return found


def _retention(given: str) -> float:
    try:
        return seconds(given)
    except ValueError as error:
        raise UsageError(f"--retention {given}: {error}") from error


def run_build(options: BuildOptions, console: Console) -> int:
    """Writes the files, or with `check` says which differ: 1 if any. Raises InputError."""
    files = build(options.documents or (), options.settings)
    wanted = {options.out / name: content for name, content in _formatted(files, options).items()}
    if options.alertmanager is not None:
        wanted[options.alertmanager] = configuration(options.settings.catalogue(), options.settings)
        wanted[options.alertmanager.parent / TEMPLATE.name] = TEMPLATE.read_text(encoding="utf-8")
    for note in _sloth_losses(options) if options.format == "sloth" else notes(files):
        console.print(f"note: {note}", highlight=False)
    if options.check:
        remedy = "run prefixwatch slo build with these options"
        return report_outdated(wanted, options.out.glob("*.yaml"), remedy, console)
    write_files(wanted, options.out, console)
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


@command(app, "check")
def slo_check(documents: Documents = None, as_json: JsonFlag = False) -> None:
    """Check SLO documents and show how each objective is understood.

    Example: `prefixwatch slo check my-slos.yaml`
    """
    found = check(documents or [])
    if as_json:
        print_json(found)
        return
    console = plain_console()
    console.print(check_table(found))
    for note in (note for row in found for note in row["notes"]):
        console.print(f"note: {note}", highlight=False)


@command(app, "build")
def slo_build(options: BuildOptions) -> None:
    """Write recording rules and alerts: the shipped ones, and those of the SLO documents.

    Example: `prefixwatch slo build my-slos.yaml --out rules --exporter-url https://prefixwatch.example.com --dashboards
    https://grafana.example.com/d --by model,cluster --label team=inference`
    """
    raise typer.Exit(run_build(options, plain_console()))


@command(app, "grade")
def slo_grade(
    requests: Annotated[Path, typer.Argument(help="A run's folder, or its requests.parquet.")],
    slo: Annotated[list[str], load_option(help="OpenSLO file, or the name of a shipped one; may be repeated.")],
    as_json: JsonFlag = False,
) -> None:
    """Grade a load test by SLO documents, as `bench` and `report` do; 1 if an objective was missed, 3 if inconclusive.

    Example: `prefixwatch slo grade results/latest/requests.parquet --slo ttft --slo goodput`
    """
    from prefixwatch.stack.cli.slo_grade import grade, grade_table

    found, exit_code = grade(requests, slo)
    if not as_json:
        plain_console().print(grade_table(found))
        plain_console().print(found["sentence"], soft_wrap=True, highlight=False)
    finish(found, exit_code, as_json=as_json)
