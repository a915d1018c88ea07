"""`python -m stack.dashboard_pictures`: the shipped dashboards drawn over a real run, and what each panel showed.

A small fleet runs (simulated engines, the router, the exporter, Prometheus with the shipped rules) under chat traffic,
or a Prometheus that is given. Exit code 0: every panel showed something or has a listed reason; 1: one didn't, or a
page had an error; 2: the input or the machine was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from alerts.alertmanager import configuration
from alerts.build import build, rendered
from alerts.catalogue import load_catalogue
from alerts.settings import RuleSettings
from dashboards.prometheus import Prometheus, new_session
from dashboards.render.page_input import Answered, Theme, answered, page_input
from dashboards.render.pictures import Shown, browser, draw
from dashboards.render.queries import Window
from dashboards.render.verdict import PageVerdict, judge, table
from slo.window import seconds
from stack.drill_stack import DrillSettings, drill_stack
from stack.drill_traffic import Sender, Traffic
from stack.errors import INPUT_ERRORS

DASHBOARDS = Path(__file__).parent.parent / "dashboards" / "json"
_SCRAPE_SECONDS = 1.0
_TRAFFIC = Traffic(rate_per_second=8.0)


@dataclass(frozen=True, slots=True)
class _Page:
    """A dashboard and its answers."""

    name: str
    dashboard: Mapping[str, Any]
    panels: Sequence[Answered]
    window: Window


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    console = Console(width=160, highlight=False, soft_wrap=True)
    try:
        pages = asyncio.run(_pages(options, console))
        verdicts = list(_drawn(pages, options))
    except INPUT_ERRORS as error:
        console.print(f"dashboards-render: {error}", style="red", markup=False)
        return 2
    console.print(table(verdicts))
    failures = [failure for verdict in verdicts for failure in verdict.failures]
    for failure in failures:
        console.print(failure, style="red", markup=False)
    console.print(f"{len(verdicts)} pictures in {options.out}, {len(failures)} failures")
    return 1 if failures else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stack.dashboard_pictures", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/dashboards"), help="where the pictures go")
    parser.add_argument("--prometheus", help="a running Prometheus, instead of a fleet of our own")
    parser.add_argument("--scrape", default="15s", help="how often that Prometheus scrapes the exporter")
    parser.add_argument("--range", default="5m", dest="window", help="what the dashboards show; a run lasts as long")
    parser.add_argument("--theme", action="append", choices=get_args(Theme), help="default: both")
    parser.add_argument("--only", action="append", help="a dashboard's name, e.g. overview; default: all")
    return parser.parse_args(arguments)


async def _pages(options: argparse.Namespace, console: Console) -> list[_Page]:
    length = seconds(options.window)
    if options.prometheus:
        scrape = seconds(options.scrape)
        return await _ask_all(options, options.prometheus, Window(time.time() - length, time.time(), scrape))
    with tempfile.TemporaryDirectory(prefix="prefixwatch-render-") as folder:
        rules, alertmanager = _write_rules(Path(folder))
        async with drill_stack(DrillSettings(), rules, alertmanager, Path(folder)) as stack:
            sending = asyncio.create_task(Sender(stack.router_url, _TRAFFIC).run())
            start = time.time()
            with console.status(
                f"a fleet of {len(stack.engines)} simulated engines serves chats for {options.window} …"
            ):
                await asyncio.wait({sending}, timeout=length)
            pages = await _ask_all(options, stack.prometheus_url, Window(start, time.time(), _SCRAPE_SECONDS))
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
            return pages


def _write_rules(folder: Path) -> tuple[Path, Path]:
    """The shipped rules for this scrape interval, and the shipped Alertmanager configuration."""
    rules = folder / "rules"
    rules.mkdir()
    for name, text in rendered(build(settings=RuleSettings(scrape_interval_seconds=_SCRAPE_SECONDS))).items():
        (rules / name).write_text(text, encoding="utf-8")
    alertmanager = folder / "alertmanager-shipped.yml"
    alertmanager.write_text(configuration(load_catalogue()), encoding="utf-8")
    return rules, alertmanager


async def _ask_all(options: argparse.Namespace, url: str, window: Window) -> list[_Page]:
    chosen = {"scrape": f"{window.scrape_seconds:g}s"}
    pages = []
    async with new_session() as session:
        for file in sorted(DASHBOARDS.glob("*.json")):
            if not options.only or file.stem in options.only:
                dashboard = json.loads(file.read_text(encoding="utf-8"))
                panels = await answered(dashboard, Prometheus(url, session), window, chosen)
                pages.append(_Page(file.stem, dashboard, panels, window))
    return pages


def _drawn(pages: Sequence[_Page], options: argparse.Namespace) -> Iterator[PageVerdict]:
    options.out.mkdir(parents=True, exist_ok=True)
    with browser() as chromium:
        for page in pages:
            for theme in options.theme or get_args(Theme):
                given = page_input(page.dashboard["title"], page.panels, page.window, theme)
                shown: Shown = draw(chromium, given, options.out / f"{page.name}-{theme}.png")
                yield judge(page.name, theme, page.panels, shown)


if __name__ == "__main__":
    sys.exit(main())
