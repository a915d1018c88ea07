"""`prefixwatch dashboards`: write the shipped files, ask a Prometheus every query, show panels without a Grafana."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dashboards.asked import Shown
from dashboards.build import RUNBOOKS, rendered
from dashboards.check import Outcome, check, counted
from dashboards.preview import preview
from dashboards.prometheus import Prometheus, new_session
from exporters.durations import seconds_of
from stack.errors import UsageError
from stack.generated_files import report_outdated


def run_build(out: Path, console: Console, *, check_only: bool, runbooks: str = RUNBOOKS) -> int:
    """Writes the files, or says which differ: 1 if any. Raises DocumentError, UsageError."""
    wanted = {out / name: text for name, text in rendered(runbooks).items()}
    if check_only:
        return _compare(wanted, out, console)
    for path, text in wanted.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path}: can't be written: {error.strerror or error}") from error
    console.print(f"{len(wanted)} files written to {out}", highlight=False, soft_wrap=True)
    return 0


def _compare(wanted: Mapping[Path, str], out: Path, console: Console) -> int:
    present = [path for pattern in ("json/*.json", "v2/*.json", "provisioning/*.yaml") for path in out.glob(pattern)]
    return report_outdated(wanted, present, "run prefixwatch dashboards build", console)


def run_check(prometheus: str, shown: Shown, job: str) -> tuple[dict[str, Any], int]:
    """Every query's outcome; 1 if one has no data without a reason. Raises DashboardError, DocumentError."""

    now = time.time()

    async def asked() -> tuple[list[Outcome], set[str]]:
        async with new_session() as session:
            server = Prometheus(prometheus, session)
            return await check(server, shown, now), await server.scrape_intervals(job)

    outcomes, intervals = asyncio.run(asked())
    document = {
        "prometheus": prometheus,
        "counts": dict(counted(outcomes)),
        "notes": _notes(intervals, shown),
        "queries": [
            {
                "dashboard": one.asked.dashboard,
                "panel": one.asked.panel,
                "ref": one.asked.ref,
                "status": one.status,
                "series": one.series,
                "why": one.why,
                "expr": shown.query(one.asked, now),
            }
            for one in outcomes
        ],
    }
    return document, 0 if all(one.ok for one in outcomes) else 1


def _notes(intervals: set[str], shown: Shown) -> list[str]:
    """A Grafana that takes another scrape interval for granted draws gaps when zoomed in (SL08)."""
    told = {interval for interval in intervals if float(str(seconds_of(interval))) > shown.scrape_seconds}
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
        f"{counts['empty']} empty, {counts['refused']} refused",
        highlight=False,
    )
    for note in document["notes"]:
        console.print(f"note: {note}", highlight=False)


def run_preview(prometheus: str, shown: Shown, out: Path, names: Sequence[str]) -> Path:
    """Writes a page a dashboard and an index; the index's path. Raises DashboardError, UsageError."""

    async def pages() -> dict[str, str]:
        async with new_session() as session:
            return await preview(Prometheus(prometheus, session), shown, names)

    try:
        found = asyncio.run(pages())
    except KeyError as error:
        raise UsageError(f"there is no dashboard {error}") from error
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in found.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{out}: can't be written: {error.strerror or error}") from error
    return out / "index.html"
