"""CPU and memory of the exporter over a growing fleet, beside Prometheus and VictoriaMetrics scraping the same targets.

One process serves 10, 100, 1,000 distinct 64 KB vLLM pages that change between scrapes; each scraper in turn scrapes
all of them, about 200 a second in all (1,000 targets every 5 s), until the exporter's window is full; then its CPU time
and memory are taken. The exporter's own page is read every 15 s meanwhile, as Prometheus would. Prometheus stores
what it scrapes, vmagent sends it on to a sink, VictoriaMetrics stores it; the exporter derives. Linux only.

    python -m benchmarks.exporter_scale [--targets 10 100 1000] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.engine_pages import address, serve
from benchmarks.plot import Curve, Panel, svg
from benchmarks.remote_write_sink import sink
from prefixwatch.engines.process import free_port

AIM_RATIO = 0.5
AIM_KB = 100.0
_SCRAPES_PER_SECOND = 200
_SHORTEST_SECONDS = 0.25
_PAGE_EVERY_SECONDS = 15.0
_PAGE_TIMEOUT_SECONDS = 120.0
_READY_SECONDS = 120.0
_KEPT_PACE = 0.9
"""Of the scrapes that the interval asks for: who made fewer left work out, and its figure says less."""

Command = Callable[[Path, str, float, int], tuple[list[str], str]]


@dataclass(frozen=True)
class Figure:
    """What one scraper took for a number of targets."""

    scraper: str
    targets: int
    interval_seconds: float
    scrapes: int
    cpu_ms_per_scrape: float
    core_share: float
    rss_mb: float
    pace: float
    """Scrapes made over those that the interval asked for."""


def exporter(folder: Path, targets: str, interval_seconds: float, _: int) -> tuple[list[str], str]:
    """Command, and the page that is read from it now and then."""
    job = {"job_name": "vllm", "file_sd_configs": [{"files": [targets]}]}
    port = free_port()
    section = {"listen": f"127.0.0.1:{port}", "interval_seconds": interval_seconds, "scrape_configs": [job]}
    section["timeout_seconds"] = max(1.0, interval_seconds)
    (folder / "prefixwatch.yaml").write_text(yaml.safe_dump({"exporter": section}))
    command = [
        sys.executable,
        "-P",
        "-m",
        "prefixwatch.stack.cli.main",
        "exporter",
        "--config",
        str(folder / "prefixwatch.yaml"),
    ]
    return [*command, "--log-level", "error"], f"http://127.0.0.1:{port}/metrics"


def prometheus(folder: Path, targets: str, interval_seconds: float, _: int) -> tuple[list[str], str]:
    _scrape_config(folder, targets, interval_seconds)
    return [
        "prometheus",
        f"--config.file={folder}/scrape.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{free_port()}",
    ], ""


def vmagent(folder: Path, targets: str, interval_seconds: float, sink_port: int) -> tuple[list[str], str]:
    _scrape_config(folder, targets, interval_seconds)
    return [
        "vmagent",
        f"-promscrape.config={folder}/scrape.yml",
        f"-remoteWrite.url=http://127.0.0.1:{sink_port}/api/v1/write",
        f"-remoteWrite.tmpDataPath={folder}/queue",
        f"-httpListenAddr=127.0.0.1:{free_port()}",
    ], ""


def victoria_metrics(folder: Path, targets: str, interval_seconds: float, _: int) -> tuple[list[str], str]:
    _scrape_config(folder, targets, interval_seconds)
    return [
        "victoria-metrics",
        f"-promscrape.config={folder}/scrape.yml",
        f"-storageDataPath={folder}/data",
        f"-httpListenAddr=127.0.0.1:{free_port()}",
    ], ""


SCRAPERS: dict[str, Command] = {
    "exporter": exporter,
    "prometheus": prometheus,
    "vmagent": vmagent,
    "victoria-metrics": victoria_metrics,
}


def _scrape_config(folder: Path, targets: str, interval_seconds: float) -> None:
    interval = f"{int(interval_seconds * 1000)}ms"
    job = {"job_name": "vllm", "file_sd_configs": [{"files": [targets]}]}
    document = {"global": {"scrape_interval": interval, "scrape_timeout": interval}, "scrape_configs": [job]}
    (folder / "scrape.yml").write_text(yaml.safe_dump(document))


@dataclass(frozen=True)
class Pages:
    """The servers of all targets, and of what is forwarded."""

    port: int
    served: Synchronized[int]
    sink_port: int


def measure(name: str, count: int, pages: Pages, *, warm_seconds: float, seconds: float) -> Figure:
    """Let one scraper scrape a number of targets. Raise SystemExit if it doesn't."""
    port, served = pages.port, pages.served
    interval_seconds = max(_SHORTEST_SECONDS, count / _SCRAPES_PER_SECOND)
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        targets = folder / "targets.json"
        targets.write_text(json.dumps([{"targets": [f"{address(engine)}:{port}" for engine in range(count)]}]))
        command, page = SCRAPERS[name](folder, str(targets), interval_seconds, pages.sink_port)
        with _running(command) as process:
            _wait(lambda: served.value, process)
            _pass(warm_seconds, page)
            before, scrapes, started = process.cpu_times(), served.value, time.monotonic()
            _pass(seconds, page)
            after, scrapes, lasted = process.cpu_times(), served.value - scrapes, time.monotonic() - started
            rss = process.memory_info().rss
    cpu = after.user + after.system - before.user - before.system
    if not scrapes:
        raise SystemExit(f"{name} scraped nothing in {seconds:g} s")
    pace = scrapes * interval_seconds / count / lasted
    return Figure(name, count, interval_seconds, scrapes, cpu / scrapes * 1e3, cpu / lasted, rss / 1e6, pace)


@contextmanager
def _served() -> Iterator[Pages]:
    context: Any = multiprocessing.get_context("spawn")
    port, served, sink_port = context.Value("i", 0), context.Value("i", 0), context.Value("i", 0)
    ready = [context.Event(), context.Event()]
    servers = [
        context.Process(target=serve, args=(port, served, ready[0]), daemon=True),
        context.Process(target=sink, args=(sink_port, ready[1]), daemon=True),
    ]
    for server in servers:
        server.start()
    try:
        if not all(listening.wait(30) for listening in ready):
            raise SystemExit("the page server did not start within 30 s")
        yield Pages(port.value, served, sink_port.value)
    finally:
        for server in servers:
            server.kill()


@contextmanager
def _running(command: Sequence[str]) -> Iterator[psutil.Process]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def _wait(count: Callable[[], int], process: psutil.Process) -> None:
    at_first, deadline = count(), time.monotonic() + _READY_SECONDS
    while count() == at_first:
        if time.monotonic() > deadline or process.status() == psutil.STATUS_ZOMBIE:
            raise SystemExit(f"{process} scraped nothing within {_READY_SECONDS:g} s")
        time.sleep(0.1)


def _pass(seconds: float, page: str) -> None:
    """Let so much time go by, reading the exporter's page now and then."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(_PAGE_EVERY_SECONDS, left))
        if page:
            with urllib.request.urlopen(page, timeout=_PAGE_TIMEOUT_SECONDS) as response:
                response.read()


def table(figures: Sequence[Figure]) -> str:
    """Markdown; memory a target is the slope from the smallest fleet to each larger one."""
    rows = [
        "| scraper | targets | every s | CPU ms a scrape | to Prometheus | of a core | RSS MB | KB a target | pace |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for figure in figures:
        same = [one for one in figures if one.targets == figure.targets and one.scraper == "prometheus"]
        ratio = f"{figure.cpu_ms_per_scrape / same[0].cpu_ms_per_scrape:.2f}×" if same else "—"
        slope = kb_per_target(figures, figure)
        rows.append(
            f"| {figure.scraper} | {figure.targets:,} | {figure.interval_seconds:g} | {figure.cpu_ms_per_scrape:.2f} "
            f"| {ratio} | {figure.core_share:.0%} | {figure.rss_mb:.0f} | {'—' if slope is None else f'{slope:.0f}'} "
            f"| {figure.pace:.0%}{'' if figure.pace >= _KEPT_PACE else ' (behind)'} |"
        )
    return "\n".join(rows)


def kb_per_target(figures: Sequence[Figure], figure: Figure) -> float | None:
    """What each target beyond the smallest fleet's takes; None for that one."""
    least = min((one for one in figures if one.scraper == figure.scraper), key=lambda one: one.targets)
    if least.targets == figure.targets:
        return None
    return (figure.rss_mb - least.rss_mb) * 1e3 / (figure.targets - least.targets)


def plot(figures: Sequence[Figure], file: Path) -> None:
    """CPU a scrape and memory by fleet size, as an SVG."""

    def panel(title: str, value: Callable[[Figure], float]) -> Panel:
        names = dict.fromkeys(figure.scraper for figure in figures)
        curves = [
            Curve(name, [(float(one.targets), value(one)) for one in figures if one.scraper == name]) for name in names
        ]
        return Panel(title, "targets", curves, log_x=True, log_y=True, dots=True)

    cpu, memory = (
        panel("CPU ms a scrape", lambda figure: figure.cpu_ms_per_scrape),
        panel("RSS MB", lambda figure: figure.rss_mb),
    )
    file.write_text(svg([cpu, memory]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--scrapers", nargs="+", default=list(SCRAPERS), choices=list(SCRAPERS))
    parser.add_argument("--warm", type=float, default=70.0, help="seconds before; the exporter's window is 60 s")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds that are measured")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--plot", type=Path, help="draw the growth curves there (SVG)")
    options = parser.parse_args(argv)
    figures = []
    with _served() as pages:
        for count in options.targets:
            for name in options.scrapers:
                if name != "exporter" and shutil.which(name) is None:
                    print(f"{name} is not installed and left out", file=sys.stderr)
                    continue
                figures.append(measure(name, count, pages, warm_seconds=options.warm, seconds=options.seconds))
                print(figures[-1], file=sys.stderr)
    print(table(figures))
    if options.json:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")
    if options.plot:
        plot(figures, options.plot)


if __name__ == "__main__":
    main()
