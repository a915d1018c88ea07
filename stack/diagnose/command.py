"""`prefixwatch diagnose`: run the runbooks' steps, name the cause, say what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from prefixwatch.alerts.prometheus import new_session
from prefixwatch.documents import durations
from prefixwatch.documents.hints import did_you_mean
from prefixwatch.runbooks.diagnosis import Diagnosis, Verdict, diagnose, observe
from prefixwatch.runbooks.evidence import TIMEOUT_SECONDS, Evidence, PrometheusEvidence, ask_all, watch_exporter
from prefixwatch.runbooks.page import GROUPS, Runbooks, shipped_runbooks
from prefixwatch.stack.cli.command import JsonFlag, command, finish, new_app, output_option, target_option
from prefixwatch.stack.diagnose.report import as_document, as_markdown, print_report
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.access import Access, access, check_address

EXIT_CODES: Mapping[Verdict, int] = {"nothing wrong": 0, "cause found": 1, "inconclusive": 3}


app = new_app()


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseOptions:
    """The options of `prefixwatch diagnose`."""

    alert: Annotated[
        str | None, typer.Argument(help="The alert that fired; its page's steps come first.", show_default=False)
    ] = None
    prometheus: Annotated[str | None, target_option(help="URL of the Prometheus that scrapes the exporter.")] = None
    exporter: Annotated[str | None, target_option(help="URL of the exporter itself, if there is no Prometheus.")] = None
    header: Annotated[
        list[str] | None,
        target_option(help="Sent with every query, as 'Name: value'; ${VARIABLE} is filled in. May be repeated."),
    ] = None
    ca_file: Annotated[Path | None, target_option(help="CA certificates to check Prometheus or the exporter with.")] = (
        None
    )
    window: Annotated[str, target_option(help="Time range to look at, e.g. 5m; with --prometheus.")] = "5m"
    at: Annotated[
        datetime | None,
        target_option(
            help="Diagnose this moment, e.g. 2026-11-30T03:10:00 (local time); with --prometheus. Default: now."
        ),
    ] = None
    seconds: Annotated[float, target_option(min=1, help="How long to watch; with --exporter.")] = 10.0
    preflight: Annotated[
        bool, typer.Option("--preflight", help="Run the checklist before a launch instead; 1 if an item failed.")
    ] = False
    target: Annotated[
        str | None, typer.Option(help="With --preflight: endpoint that gets about a dozen small chats.")
    ] = None
    config: Annotated[Path | None, typer.Option(help="With --preflight: prefixwatch.yaml of the fleet.")] = None
    markdown: Annotated[bool, output_option("--markdown", help="Print Markdown for an incident ticket.")] = False
    as_json: JsonFlag = False

    def check(self) -> None:
        """Raises UsageError for what both diagnosis and checklist refuse."""
        if self.markdown and self.as_json:
            raise UsageError("give one of --markdown and --json")
        check_address("--prometheus", self.prometheus)
        check_address("--exporter", self.exporter)
        check_window(self.window)

    @property
    def access(self) -> Access:
        return access(self.header or [], self.ca_file)


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnosis and where it comes from."""

    diagnosis: Diagnosis
    source: str
    firing: Sequence[str]
    """Alerts that fire now; empty without a Prometheus."""
    warning: str = ""
    """Why the answers may be thin."""
    asked_at: str = ""
    """In UTC, to the second: a ticket is read hours later."""


def run_diagnose(options: DiagnoseOptions, console: Console) -> tuple[Any, int]:
    """Print the report unless JSON is wanted; returns the document and the exit code. Raises InputError."""
    runbooks = shipped_runbooks()
    check_alert(options.alert, runbooks)
    if (options.prometheus is None) == (options.exporter is None):
        raise UsageError("give one of --prometheus URL and --exporter URL to ask")
    options.check()
    with console.status("asking …"):
        finding = asyncio.run(find(options, runbooks))
    document = as_document(finding.diagnosis, finding.source, options.alert, finding.firing)
    document["asked_at"] = finding.asked_at
    if finding.warning:
        document["warning"] = finding.warning
    if options.markdown:
        source = f"{finding.source}, asked at {finding.asked_at}"
        print(as_markdown(finding.diagnosis, source, options.alert, finding.firing))
    elif not options.as_json:
        print_report(finding.diagnosis, finding.source, options.alert, finding.firing, console)
    if finding.warning:
        console.print(f"[yellow]note:[/yellow] {finding.warning}", highlight=False)
    return document, EXIT_CODES[finding.diagnosis.verdict]


def check_alert(alert: str | None, runbooks: Runbooks) -> None:
    """Raises UsageError for an alert without a page, naming the nearest ones."""
    if alert is None or alert in runbooks.pages:
        return
    raise UsageError(f"no runbook for an alert '{alert}': {did_you_mean(alert, sorted(runbooks.pages))}")


def check_window(window: str) -> None:
    """Raises UsageError for what isn't a range."""
    try:
        positive = durations.seconds(window) > 0
    except ValueError as error:
        raise UsageError(f"--window: {error}") from error
    if not positive:
        raise UsageError(f"--window: '{window}' is an empty range: give one such as 5m")


async def find(options: DiagnoseOptions, runbooks: Runbooks, given: Access | None = None) -> Finding:
    """Ask every step of every page, in the order of a diagnosis. Raises PrometheusError."""
    given = given or options.access
    async with new_session(given.headers, given.tls, TIMEOUT_SECONDS) as session:
        firing: list[str] = []
        warning = ""
        if options.prometheus is not None:
            prometheus = PrometheusEvidence(options.prometheus, session, options.at.timestamp() if options.at else None)
            firing = sorted({labels["alertname"] for labels in await prometheus.firing_alerts()})
            warning = _thin(options.window, await prometheus.scrape_interval_seconds())
            evidence: Evidence = prometheus
        else:
            evidence = await watch_exporter(options.exporter or "", session, seconds=options.seconds)
        steps = list(runbooks.steps.values())
        answers = await ask_all(steps, evidence, options.window)
    observations = [
        observe(step, runbooks.group_of(step.id), answer) for step, answer in zip(steps, answers, strict=True)
    ]
    observations.sort(key=lambda o: GROUPS.index(o.group))
    asked_at = f"{(options.at.astimezone(UTC) if options.at else datetime.now(UTC)):%Y-%m-%d %H:%M:%S} UTC"
    return Finding(diagnose(observations, runbooks, options.alert), evidence.describe, firing, warning, asked_at)


def _thin(window: str, interval_seconds: float | None) -> str:
    """A range needs four scrapes, for some get lost (SL07, SL08)."""
    if interval_seconds is None or durations.seconds(window) >= 4 * interval_seconds:
        return ""
    return (
        f"--window {window} holds fewer than 4 scrapes of {interval_seconds:g} s: give --window "
        f"{4 * interval_seconds:.0f}s or more, and set Grafana's timeInterval to {interval_seconds:g}s"
    )


@command(app, "diagnose")
def diagnose_command(options: DiagnoseOptions) -> None:
    """Run the runbooks' steps in order, and name the most likely cause: 0 nothing wrong, 1 found, 3 inconclusive.

    Example: `prefixwatch diagnose PrefixHitRateLow --prometheus http://127.0.0.1:9090`

    Example: `prefixwatch diagnose --exporter http://127.0.0.1:9477 --markdown`

    Example: `prefixwatch diagnose --prometheus https://mimir.example/prometheus --header 'X-Scope-OrgID: llm'`

    Example: `prefixwatch diagnose --preflight --target http://127.0.0.1:8000 --config prefixwatch.yaml`
    """
    console = Console(stderr=options.as_json or options.markdown)
    if options.preflight:
        from prefixwatch.stack.diagnose.preflight_run import run_preflight

        finish(*run_preflight(options, console), as_json=options.as_json)
    finish(*run_diagnose(options, console), as_json=options.as_json)
