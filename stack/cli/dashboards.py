"""`prefixwatch dashboards`: write the shipped files, ask a Prometheus every query, show panels without a Grafana."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from prefixwatch.alerts.build import engine_series
from prefixwatch.alerts.prometheus import Prometheus, new_session
from prefixwatch.alerts.settings import SOURCES
from prefixwatch.dashboards.build import RUNBOOKS, rendered
from prefixwatch.dashboards.queries.check import Outcome, check, counted
from prefixwatch.dashboards.queries.inventory import Shown
from prefixwatch.dashboards.queries.quiet import judged
from prefixwatch.documents import durations
from prefixwatch.stack.cli.command import (
    JsonFlag,
    command,
    finish,
    new_app,
    output_option,
    plain_console,
    target_option,
)
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.out_folder import report_outdated, write_files


def run_build(out: Path, console: Console, *, check_only: bool, runbooks: str = RUNBOOKS) -> int:
    """Writes the files, or says which differ: 1 if any. Raises DocumentError, UsageError."""
    wanted = {out / name: text for name, text in rendered(runbooks).items()}
    if check_only:
        patterns = ("json/*.json", "v2/*.json", "provisioning/*.yaml")
        if not (out / "v2").is_dir():  # the checkout has no v2 manifests; a build writes them
            wanted = {path: text for path, text in wanted.items() if path.parent.name != "v2"}
        present = [path for pattern in patterns for path in out.glob(pattern)]
        return report_outdated(wanted, present, "run prefixwatch dashboards build", console)
    write_files(wanted, out, console)
    return 0


def run_check(prometheus: str, shown: Shown, job: str, measured: Set[str] | None = None) -> tuple[dict[str, Any], int]:
    """Every query's outcome; 1 if one has no data without a reason, 3 if too little was measured yet to say.

    Raises PrometheusError, DocumentError.
    """
    now = time.time()

    async def asked() -> tuple[Sequence[Outcome], list[str]]:
        async with new_session() as session:
            server = Prometheus(prometheus, session)
            outcomes, why = await judged(server, shown, await check(server, shown, now, measured), now)
            return outcomes, [*_notes(await _scrape_intervals(server, job), shown), *why]

    outcomes, notes = asyncio.run(asked())
    document = {
        "prometheus": prometheus,
        "counts": dict(counted(outcomes)),
        "notes": notes,
        "queries": [
            {
                "dashboard": one.asked.dashboard,
                "panel": one.asked.panel,
                "ref": one.asked.ref,
                "status": one.status,
                "series": one.series,
                "why": one.why,
                "expr": shown.expanded(one.asked.expr),
            }
            for one in outcomes
        ],
    }
    if all(one.ok for one in outcomes):
        return document, 0
    return document, 3 if all(one.ok or one.status == "early" for one in outcomes) else 1


async def _scrape_intervals(server: Prometheus, job: str) -> set[str]:
    """How often the targets of a job are scraped; empty where Prometheus doesn't say."""
    return {
        each["scrapeInterval"]
        for each in await server.active_targets()
        if each["labels"].get("job") == job and "scrapeInterval" in each
    }


def _notes(intervals: set[str], shown: Shown) -> list[str]:
    """A Grafana that takes another scrape interval for granted draws gaps when zoomed in (SL08)."""
    told = {interval for interval in intervals if durations.seconds(interval) > shown.scrape_seconds}
    return [
        f"Prometheus scrapes the exporter every {interval}, but {shown.scrape_seconds:g} s are taken for granted: set "
        "the datasource's scrape interval (timeInterval) and the dashboards' variable to it"
        for interval in sorted(told)
    ]


def check_table(document: Mapping[str, Any]) -> Table:
    """What failed, and what is empty for a reason."""
    table = Table("dashboard", "panel", "query", "outcome", "why")
    for row in document["queries"]:
        if row["status"] != "data":
            table.add_row(row["dashboard"], row["panel"], row["ref"], row["status"], row["why"])
    return table


def print_check(document: Mapping[str, Any], console: Console) -> None:
    console.print(check_table(document))
    counts = document["counts"]
    console.print(
        f"{sum(counts.values())} queries: {counts['data']} with data, {counts['listed']} empty for a listed reason, "
        f"{counts['early']} without data yet, {counts['empty']} empty, {counts['refused']} refused",
        highlight=False,
    )
    for note in document["notes"]:
        console.print(f"note: {note}", highlight=False)


def run_preview(prometheus: str, shown: Shown, out: Path, names: Sequence[str], console: Console) -> Path:
    """Write one page per dashboard and an index; returns the index's path. Raises PrometheusError, UsageError."""

    from prefixwatch.dashboards.preview import preview

    async def pages() -> dict[str, str]:
        async with new_session() as session:
            return await preview(Prometheus(prometheus, session), shown, names)

    try:
        found = asyncio.run(pages())
    except KeyError as error:
        raise UsageError(f"there is no dashboard {error}") from error
    write_files({out / name: text for name, text in found.items()}, out, console)
    return out / "index.html"


app = new_app(no_args_is_help=True, help="Grafana dashboards: write them, check every query, preview them.")
PrometheusUrl = Annotated[str, target_option(help="A Prometheus that scrapes the exporter and has the rules.")]
Job = Annotated[str, target_option(help="The exporter's job label in Prometheus.")]
Minutes = Annotated[float, typer.Option(min=0.1, help="Length of the time range shown, up to now.")]
ScrapeInterval = Annotated[float, typer.Option(min=0.1, help="The dashboards' scrape-interval variable, in seconds.")]


@command(app, "build")
def dashboards_build(
    out: Annotated[Path, output_option(help="Folder for json/, v2/ and provisioning/.")] = Path("dashboards"),
    check: Annotated[bool, output_option("--check", help="Write nothing; 1 if the folder is out of date.")] = False,
    runbooks: Annotated[str, typer.Option(help="Base URL of the runbooks: <BASE>/AlertName.md.")] = RUNBOOKS,
) -> None:
    """Write the dashboards: classic JSON, v2 manifests, provisioning files and a ConfigMap.

    Example: `prefixwatch dashboards build --out grafana --runbooks https://wiki.example.com/runbooks`
    """
    raise typer.Exit(run_build(out, plain_console(), check_only=check, runbooks=runbooks.rstrip("/")))


@command(app, "check")
def dashboards_check(
    prometheus: PrometheusUrl,
    minutes: Minutes = 15.0,
    scrape_interval: ScrapeInterval = 15.0,
    job: Job = "prefixwatch",
    source: Annotated[
        str,
        typer.Option("--from", help="Who measures: `exporter`, or `engines` (rules of `slo build --from engines`)."),
    ] = "exporter",
    as_json: JsonFlag = False,
) -> None:
    """Run every query of every panel, variable and annotation; 1 if one has no data and no listed reason.

    3 if one may have no data yet; the last line says what to wait for.

    Example: `prefixwatch dashboards check --prometheus http://localhost:9090`
    """
    if source not in SOURCES:
        raise UsageError(f"--from {source}: use one of {', '.join(SOURCES)}")
    measured = engine_series() if source == "engines" else None
    found, exit_code = run_check(prometheus, Shown(minutes * 60, scrape_interval), job, measured)
    if not as_json:
        print_check(found, plain_console())
    finish(found, exit_code, as_json=as_json)


@command(app, "preview")
def dashboards_preview(
    prometheus: PrometheusUrl,
    out: Annotated[Path, output_option(help="Folder for the pages.")] = Path("results/dashboards"),
    dashboard: Annotated[list[str] | None, typer.Option(help="Only this one, e.g. overview; may be repeated.")] = None,
    minutes: Minutes = 15.0,
    scrape_interval: ScrapeInterval = 15.0,
) -> None:
    """Draw the dashboards as plain HTML pages from a Prometheus, without a Grafana.

    Example: `prefixwatch dashboards preview --prometheus http://localhost:9090 --dashboard overview`
    """
    shown = Shown(minutes * 60, scrape_interval)
    print(run_preview(prometheus, shown, out, dashboard or [], plain_console(stderr=True)))
