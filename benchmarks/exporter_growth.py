"""How the exporter's cost grows with the series of a target and with the tenants of a fleet. No sockets, one process.

Series: a real vLLM page with 1 to 32 engines on it. Tenants: request records of 10 to 10,000 tenants, each with its
own sessions. CPU time is the median of several rounds; memory is what Python allocated.

    python -m benchmarks.exporter_growth [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.engine_pages import CAPTURE
from benchmarks.plot import Curve, Panel, svg
from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.requests.ledger import RequestLedger
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.kvcache.request_record import RequestRecord

ENGINES = (1, 2, 4, 8, 16, 32)
TENANTS = (10, 100, 1_000, 10_000)
_ROUNDS = 20
_WINDOW_SCRAPES = 14
_REQUESTS = 20_000


@dataclass(frozen=True)
class SeriesFigure:
    """Of one target. Memory is with a full window, and what a second target of the same shape adds."""

    engines: int
    samples: int
    scrape_cpu_ms: float
    target_kb: float


@dataclass(frozen=True)
class TenantFigure:
    """Of one ledger after 20,000 requests."""

    tenants: int
    record_cpu_us: float
    ledger_kb: float
    page_kb: float


def page(engines: int, moment: int) -> bytes:
    """A real page with this many engines on it, at one moment: every whole number above 0 has grown."""
    lines = []
    for line in CAPTURE.read_bytes().split(b"\n"):
        copies = engines if b'engine="0"' in line else 1
        for engine in range(copies):
            one = line.replace(b'engine="0"', b'engine="%d"' % engine)
            lines.append(re.sub(rb"^(vllm:\S*) ([1-9]\d*)\.0$", lambda m: b"%s %d.0" % (m[1], int(m[2]) + moment), one))
    return b"\n".join(lines)


def by_series(engines: int) -> SeriesFigure:
    configs = [TargetConfig(name=name, url=f"http://{name}/metrics") for name in ("first", "second")]
    settings = ExporterConfig(targets=tuple(configs))
    first, second = (Target(config, settings, shipped_catalogue()) for config in configs)
    bodies = [page(engines, moment) for moment in range(_WINDOW_SCRAPES)]

    def feed(target: Target) -> None:
        for step, body in enumerate(bodies):
            target.ingest(Scrape(0.01, body), 5.0 * step)
        assert target.up, target.detail

    feed(first)
    kb = allocated_kb(lambda: feed(second))
    turns = iter(range(10**9))

    def scrape() -> None:
        turn = next(turns)
        first.ingest(Scrape(0.01, bodies[turn % len(bodies)]), 1000.0 + turn)

    return SeriesFigure(engines, first.health.samples or 0, cpu_ms(scrape, _ROUNDS), kb)


def by_tenants(tenants: int) -> TenantFigure:
    records = [
        RequestRecord(
            ended_unix_seconds=1_700_000_000.0 + number / 100,
            outcome="completed",
            worker=f"w{number % 8}",
            tenant=f"tenant-{number % tenants}",
            session=f"session-{number % (5 * tenants)}",
            request_class="chat",
            prompt_tokens=2_000,
            cached_tokens=(number % 3) * 512,
            ttft_seconds=0.2,
            e2e_seconds=2.0,
        )
        for number in range(_REQUESTS)
    ]
    ledgers: list[RequestLedger] = []

    def fill() -> None:
        ledger = RequestLedger()
        for record in records:
            ledger.record(record, "router")
        ledgers.append(ledger)

    fill()
    kb = allocated_kb(fill)
    cpu = cpu_ms(fill, 3)
    body, _ = render([], "", ledgers[:1])
    return TenantFigure(tenants, cpu / _REQUESTS * 1e3, kb, len(body) / 1e3)


def cpu_ms(work: Callable[[], object], rounds: int) -> float:
    figures = []
    for _ in range(rounds):
        before = time.process_time()
        work()
        figures.append((time.process_time() - before) * 1e3)
    return statistics.median(figures)


def allocated_kb(work: Callable[[], object]) -> float:
    """What is still held after `work`."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    work()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / 1e3


def tables(series: Sequence[SeriesFigure], tenants: Sequence[TenantFigure]) -> str:
    """Markdown."""
    rows = [
        "| engines on a page | samples taken | CPU ms a scrape, no fetch | KB a target |",
        "| --- | --- | --- | --- |",
    ]
    rows += [f"| {one.engines} | {one.samples:,} | {one.scrape_cpu_ms:.2f} | {one.target_kb:.0f} |" for one in series]
    rows += ["", "| tenants | CPU µs a request record | ledger KB | page KB |", "| --- | --- | --- | --- |"]
    rows += [
        f"| {one.tenants:,} | {one.record_cpu_us:.1f} | {one.ledger_kb:,.0f} | {one.page_kb:,.0f} |" for one in tenants
    ]
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--plot", type=Path, help="draw the growth curves there (SVG)")
    options = parser.parse_args(argv)
    series = [by_series(engines) for engines in ENGINES]
    tenants = [by_tenants(count) for count in TENANTS]
    print(tables(series, tenants))
    if options.json:
        figures = {"series": [asdict(one) for one in series], "tenants": [asdict(one) for one in tenants]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if options.plot:
        cpu = Curve("CPU ms a scrape", [(float(one.samples), one.scrape_cpu_ms) for one in series])
        memory = Curve("KB a target", [(float(one.samples), one.target_kb) for one in series])
        ledger = Curve("ledger KB", [(float(one.tenants), one.ledger_kb) for one in tenants])
        text = Curve("page KB", [(float(one.tenants), one.page_kb) for one in tenants])
        by_samples = Panel(
            "one target", "samples taken from its page", [cpu, memory], log_x=True, log_y=True, dots=True
        )
        options.plot.write_text(
            svg([by_samples, Panel("request ledger", "tenants", [ledger, text], log_x=True, log_y=True, dots=True)])
        )


if __name__ == "__main__":
    main()
