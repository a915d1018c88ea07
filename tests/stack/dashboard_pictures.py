"""`python -m tests.stack.dashboard_pictures`: the shipped dashboards drawn over a real run, panel by panel.

A small fleet runs (see dashboard_stack.py), or a Prometheus is given. Exit code 0: every panel showed something or has
a listed reason; 1: one didn't, a page had an error, or a dashboard isn't what Grafana's types say; 2: the input or the
machine was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from prefixwatch.alerts.prometheus import Prometheus, new_session
from prefixwatch.dashboards.build import rendered
from prefixwatch.dashboards.queries.check import check
from prefixwatch.dashboards.queries.inventory import Shown
from prefixwatch.documents.durations import seconds
from prefixwatch.documents.errors import InputError
from prefixwatch.engines.tiny_model import MODEL_NAME, default_model_dir
from prefixwatch.stack.errors import UsageError
from tests.dashboards.render.page_input import Answered, Theme, answered, page_input
from tests.dashboards.render.pictures import browser, draw
from tests.dashboards.render.queries import Window
from tests.dashboards.render.type_check import type_errors
from tests.dashboards.render.verdict import PageVerdict, counted, judge, table
from tests.stack.dashboard_stack import SCRAPE_SECONDS, observed, simulated_engines, traffic
from tests.stack.field_stack import field_prometheus

_PATIENCE_SECONDS = 150.0
"""How much longer than the pictures' range a run may last until every query has an answer."""


@dataclass(frozen=True, slots=True)
class _Page:
    """A dashboard and its answers."""

    name: str
    title: str
    panels: Sequence[Answered]
    window: Window


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    console = Console(width=170, highlight=False, soft_wrap=True)
    try:
        models = _shipped("json", options.only)
        errors = type_errors(models, _shipped("v2", options.only))
        console.print(f"{len(models)} dashboards and their manifests against @grafana/schema: {len(errors)} errors")
        verdicts = list(_drawn(asyncio.run(_pages(models, options, console)), options))
    except InputError as error:
        console.print(f"dashboards-render: {error}", markup=False)
        return 2
    console.print(table(verdicts))
    failures = [*errors, *(failure for verdict in verdicts for failure in verdict.failures)]
    for failure in failures:
        console.print(failure, markup=False)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in counted(verdicts).items())
    console.print(f"{len(verdicts)} pictures in {options.out}: panels {counts}; {len(failures)} failures")
    return 1 if failures else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.stack.dashboard_pictures")
    parser.add_argument("--out", type=Path, default=Path("results/dashboards"), help="where the pictures go")
    parser.add_argument("--workers", type=int, help="series of so many workers, instead of a fleet of our own")
    parser.add_argument("--prometheus", help="a running Prometheus, instead of a fleet of our own")
    parser.add_argument("--scrape", default="15s", help="how often that Prometheus scrapes the exporter")
    parser.add_argument("--range", default="3m", dest="window", help="what the dashboards show")
    parser.add_argument("--theme", action="append", choices=get_args(Theme), help="default: both")
    parser.add_argument("--only", action="append", help="a dashboard's name, e.g. overview; default: all")
    return parser.parse_args(arguments)


def _shipped(form: str, only: Sequence[str] | None) -> dict[str, Mapping[str, Any]]:
    texts = {Path(name).stem: text for name, text in rendered().items() if name.startswith(f"{form}/")}
    names = only or list(texts)
    unknown = [name for name in names if name not in texts]
    if unknown:
        raise UsageError(f"no dashboard {', '.join(unknown)}: there are {', '.join(texts)}")
    return {name: json.loads(texts[name]) for name in names}


async def _pages(models: Mapping[str, Mapping[str, Any]], options: argparse.Namespace, console: Console) -> list[_Page]:
    length = seconds(options.window)
    if options.prometheus:
        end = time.time()
        return await ask_all(models, options.prometheus, Window(end - length, end, seconds(options.scrape)))
    if options.workers:
        with tempfile.TemporaryDirectory(prefix="pw-") as name:
            async with field_prometheus(Path(name), options.workers) as prometheus:
                console.print(f"series of {options.workers} workers for {options.window} …")
                await asyncio.sleep(length)
                end = time.time()
                return await ask_all(models, prometheus, Window(end - length, end, SCRAPE_SECONDS))
    # A name short enough for sockets.
    with tempfile.TemporaryDirectory(prefix="pw-") as name:
        folder = Path(name)
        async with (
            simulated_engines(folder) as engines,
            observed(engines, folder, default_model_dir(), MODEL_NAME) as running,
            traffic(running.router, MODEL_NAME),
        ):
            console.print(f"{len(engines)} simulated engines serve chats for {options.window} or longer …")
            await asyncio.sleep(length)
            await _filled(running.prometheus)
            end = time.time()
            return await ask_all(models, running.prometheus, Window(end - length, end, SCRAPE_SECONDS))


async def _filled(prometheus: str) -> None:
    """Until every query of `prefixwatch dashboards check` has an answer or a reason, or patience ends."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    async with new_session() as session:
        while time.monotonic() < deadline:
            outcomes = await check(Prometheus(prometheus, session), Shown(60.0, SCRAPE_SECONDS))
            if all(one.ok for one in outcomes):
                return
            await asyncio.sleep(5.0)


async def ask_all(models: Mapping[str, Mapping[str, Any]], prometheus: str, window: Window) -> list[_Page]:
    """Every dashboard with its answers at the same time."""
    chosen = {"scrape": f"{window.scrape_seconds:g}s"}
    async with new_session() as session:
        server = Prometheus(prometheus, session)
        return [
            _Page(name, model["title"], await answered(model, server, window, chosen), window)
            for name, model in models.items()
        ]


def _drawn(pages: Sequence[_Page], options: argparse.Namespace) -> Iterator[PageVerdict]:
    options.out.mkdir(parents=True, exist_ok=True)
    with browser() as chromium:
        for page in pages:
            for theme in options.theme or get_args(Theme):
                given = page_input(page.title, page.panels, page.window, theme)
                picture = options.out / f"{page.name}-{theme}.png"
                yield judge(page.name, theme, page.panels, draw(chromium, given, picture))


if __name__ == "__main__":
    sys.exit(main())
