"""`prefixwatch diagnose`: run the runbooks' steps, rank the causes, say what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from runbooks.diagnosis import Diagnosis, Verdict, diagnose, observe
from runbooks.evidence import Evidence, PrometheusEvidence, ask, new_session, watch_exporter
from runbooks.page import GROUPS, Runbooks, seconds_of, shipped_runbooks
from stack.diagnosis_report import as_document, as_markdown, print_report
from stack.errors import UsageError

EXIT_CODES: Mapping[Verdict, int] = {"nothing wrong": 0, "cause found": 1, "inconclusive": 3}


@dataclass(frozen=True, slots=True)
class DiagnoseOptions:
    """The command line of `prefixwatch diagnose`."""

    alert: str | None = None
    prometheus: str | None = None
    exporter: str | None = None
    window: str = "5m"
    seconds: float = 10.0
    """How long the exporter is watched, where there is no Prometheus."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnosis and where it comes from."""

    diagnosis: Diagnosis
    source: str
    firing: Sequence[str]
    """Alerts that fire now; empty without a Prometheus."""
    warning: str = ""
    """Why the answers may be thin."""


def run_diagnose(options: DiagnoseOptions, console: Console, *, markdown: bool, as_json: bool) -> tuple[Any, int]:
    """Prints the report unless JSON is wanted; answers the document and the exit code. Raises one of INPUT_ERRORS."""
    runbooks = shipped_runbooks()
    check_alert(options.alert, runbooks)
    if (options.prometheus is None) == (options.exporter is None):
        raise UsageError("give one of --prometheus URL and --exporter URL to ask")
    check_window(options.window)
    with console.status("asking …"):
        finding = asyncio.run(find(options, runbooks))
    document = as_document(finding.diagnosis, finding.source, options.alert, finding.firing)
    if finding.warning:
        document["warning"] = finding.warning
    if markdown:
        print(as_markdown(finding.diagnosis, finding.source, options.alert, finding.firing))
    elif not as_json:
        print_report(finding.diagnosis, finding.source, options.alert, finding.firing, console)
    if finding.warning:
        console.print(f"[yellow]note:[/yellow] {finding.warning}", highlight=False)
    return document, EXIT_CODES[finding.diagnosis.verdict]


def check_alert(alert: str | None, runbooks: Runbooks) -> None:
    """Raises UsageError for an alert without a page, naming the nearest ones."""
    if alert is not None and alert not in runbooks.pages:
        raise UsageError(f"no runbook for an alert '{alert}': there are {', '.join(sorted(runbooks.pages))}")


def check_window(window: str) -> None:
    """Raises UsageError for what isn't a range."""
    try:
        seconds_of(window)
    except ValueError as error:
        raise UsageError(f"--window: {error}") from error


async def find(options: DiagnoseOptions, runbooks: Runbooks) -> Finding:
    """Ask every step of every page, in the order of a diagnosis. Raises EvidenceError."""
    async with new_session() as session:
        firing: list[str] = []
        warning = ""
        if options.prometheus is not None:
            prometheus = PrometheusEvidence(options.prometheus, session)
            firing = sorted({labels["alertname"] for labels in await prometheus.firing_alerts()})
            warning = _thin(options.window, await prometheus.scrape_interval_seconds())
            evidence: Evidence = prometheus
        else:
            evidence = await watch_exporter(options.exporter or "", session, seconds=options.seconds)
        steps = runbooks.steps.values()
        answers = await asyncio.gather(*(ask(step, evidence, options.window) for step in steps))
    observations = [
        observe(step, runbooks.group_of(step.id), answer) for step, answer in zip(steps, answers, strict=True)
    ]
    observations.sort(key=lambda o: GROUPS.index(o.group))
    return Finding(diagnose(observations, runbooks, options.alert), evidence.describe, firing, warning)


def _thin(window: str, interval_seconds: float | None) -> str:
    """A range needs four scrapes, for some get lost (SL07, SL08)."""
    if interval_seconds is None or seconds_of(window) >= 4 * interval_seconds:
        return ""
    return (
        f"--window {window} holds fewer than 4 scrapes of {interval_seconds:g} s: give --window "
        f"{4 * interval_seconds:.0f}s or more, and set Grafana's timeInterval to {interval_seconds:g}s"
    )
