"""`prefixwatch slo …`: one SLO document checked, turned into rules, and graded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stack.cli_shared import JsonFlag, finish

slo_app = typer.Typer(
    no_args_is_help=True, help="SLO documents (OpenSLO): check them, write rules and alerts, grade a request log."
)


@slo_app.command("check")
def slo_check(
    documents: Annotated[
        list[str] | None, typer.Argument(help="OpenSLO files, or names of shipped ones; default: all shipped.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check SLO documents and say how each objective is understood.

    Example: `prefixwatch slo check my-slos.yaml`
    """
    from stack.slo_command import check, check_table

    found = check(documents or [])
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        Console().print(check_table(found))
        for note in (note for row in found for note in row["notes"]):
            Console().print(f"note: {note}", highlight=False)


@slo_app.command("build")
def slo_build(
    documents: Annotated[
        list[str] | None, typer.Argument(help="OpenSLO files, or names of shipped ones; default: all shipped.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the rule files.")] = Path("alerts/rules"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; 1 if the folder is out of date.")] = False,
    form: Annotated[
        str, typer.Option("--format", help="`prometheus` rules, `kubernetes` PrometheusRule objects, `sloth` specs.")
    ] = "prometheus",
    thresholds: Annotated[
        Path | None, typer.Option(help="Thresholds that replace those of alerts/thresholds.yaml.")
    ] = None,
    scrape_interval: Annotated[float, typer.Option(help="Seconds between Prometheus' scrapes of the exporter.")] = 15.0,
    job: Annotated[str, typer.Option(help="The exporter's job label in Prometheus.")] = "prefixwatch",
    alertmanager: Annotated[
        Path | None, typer.Option(help="Write an Alertmanager configuration for these alerts to this file, too.")
    ] = None,
    runbooks: Annotated[str, typer.Option(help="Where the runbooks are served: HERE/AlertName.md.")] = "runbooks",
    dashboards: Annotated[str, typer.Option(help="Grafana's dashboards: HERE/UID.")] = "/d",
    absent_alerts: Annotated[
        bool, typer.Option("--absent-alerts/--no-absent-alerts", help="Alert on SLOs that nothing measures.")
    ] = True,
    hasten: Annotated[
        float, typer.Option(min=1, help="For drills: divide every length of time by this, e.g. 60.")
    ] = 1.0,
) -> None:
    """Write recording rules and alerts: the shipped ones, and those of the SLO documents.

    Example: `prefixwatch slo build my-slos.yaml --out rules`
    """
    from alerts.settings import RuleSettings
    from stack.slo_command import BuildOptions, run_build

    settings = RuleSettings(
        scrape_interval_seconds=scrape_interval,
        job=job,
        runbook_base=runbooks.rstrip("/"),
        dashboard_base=dashboards.rstrip("/"),
        absent_alerts=absent_alerts,
        thresholds=thresholds,
        hasten=hasten,
    )
    raise typer.Exit(run_build(BuildOptions(documents or [], out, check, form, settings, alertmanager), Console()))


@slo_app.command("grade")
def slo_grade(
    requests: Annotated[Path, typer.Argument(help="A run's requests.parquet.")],
    slo: Annotated[list[str], typer.Option(help="OpenSLO file, or the name of a shipped one; may be repeated.")],
    as_json: JsonFlag = False,
) -> None:
    """Grade a load test's request log by SLO documents; 1 if an objective was missed, 3 if one can't be judged.

    Example: `prefixwatch slo grade results/latest/requests.parquet --slo ttft --slo goodput`
    """
    from stack.slo_command import grade, grade_table

    found, exit_code = grade(requests, slo)
    if not as_json:
        Console().print(grade_table(found))
    finish(found, exit_code, as_json=as_json)
