"""CPU of one scrape and derivation of a 64 KB vLLM page, over real HTTP on loopback.

The page is a real one whose counters move between scrapes, served by a process of its own. In the same run and
on the same text: prometheus_client's parser alone, a bytes regex alone, and Prometheus itself scraping the same
server, where its binary is installed (with its storage, which the exporter doesn't have). Shared machines are
noisy: each figure is the median of several rounds of CPU time.

    python -m benchmarks.exporter_scrape [--scrapes 200] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import re
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psutil
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.exporter import Exporter

AIM_MS = 0.6
PAGE_BYTES = 65_536
_PAGES = 100
_CAPTURE = Path(__file__).parent.parent / "tests/exporters/captures/metrics_vllm_0.32.0.txt"
_PROMETHEUS_TARGETS = 20
_PROMETHEUS_INTERVAL_MS = 250
_PROMETHEUS_SECONDS = 8.0


def pages() -> list[bytes]:
    """A real page, its help texts as long as makes 64 KB, at many moments: every whole number has grown."""
    text = _CAPTURE.read_bytes()
    helps = text.count(b"(text removed)")
    filler = b"x" * (len(b"(text removed)") + (PAGE_BYTES - len(text)) // helps)
    text = text.replace(b"(text removed)", filler)

    def at(moment: int) -> bytes:
        return re.sub(
            rb"(?m)^(vllm:\S*) ([1-9]\d*)\.0$",
            lambda match: b"%s %d.0" % (match[1], int(match[2]) + moment),
            text,
        )

    return [at(moment) for moment in range(_PAGES)]


def serve(port: Synchronized[int], served: Synchronized[int], listening: Event) -> None:
    """Answer every request with the next page."""
    answers = [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s" % (len(p), p) for p in pages()
    ]

    class Page(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport: asyncio.WriteTransport = transport  # type: ignore[assignment]  # what TCP servers get

        def data_received(self, _: bytes) -> None:
            self.transport.write(answers[served.value % _PAGES])
            served.value += 1

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Page, "127.0.0.1", 0)
        port.value = server.sockets[0].getsockname()[1]
        listening.set()
        await server.serve_forever()

    asyncio.run(main())


def cpu_ms(rounds: int, count: int, work: Callable[[], object]) -> float:
    """Median CPU milliseconds of one call."""
    figures = []
    for _ in range(rounds):
        before = time.process_time()
        for _ in range(count):
            work()
        figures.append((time.process_time() - before) / count * 1e3)
    return statistics.median(figures)


async def exporter_cpu_ms(port: int, rounds: int, scrapes: int) -> tuple[float, float]:
    """CPU milliseconds of a scrape with its derivation, and of its fetch alone."""
    target = TargetConfig(name="engine-0", url=f"http://127.0.0.1:{port}/metrics")
    exporter = Exporter(ExporterConfig(targets=(target,)))
    await exporter.open()
    try:
        await exporter.scrape_all()
        whole = await _loop_ms(rounds, scrapes, lambda: _scrape_and_derive(exporter))
        assert exporter.targets[0].up
        fetch = await _loop_ms(rounds, scrapes, lambda: exporter.fetch(exporter.targets[0]))
    finally:
        await exporter.close()
    return whole, fetch


async def _scrape_and_derive(exporter: Exporter) -> object:
    """Numbers are derived when somebody reads them; here somebody does so after each scrape."""
    await exporter.scrape(exporter.targets[0])
    return exporter.targets[0].numbers


async def _loop_ms(rounds: int, count: int, work: Callable[[], Awaitable[object]]) -> float:
    figures = []
    for _ in range(rounds):
        before = time.process_time()
        for _ in range(count):
            await work()
        figures.append((time.process_time() - before) / count * 1e3)
    return statistics.median(figures)


def regex_of_wanted() -> re.Pattern[bytes]:
    """What a selective reader without any memory would do: one pass of one pattern."""
    names = sorted(shipped_catalogue().get("vllm").wanted_names(), reverse=True)
    return re.compile(rb"^(" + "|".join(map(re.escape, names)).encode() + rb")(\{[^\n]*\})? (\S+)", re.MULTILINE)


def prometheus_cpu_ms(port: int, served: Synchronized[int]) -> float | None:
    """CPU milliseconds that Prometheus takes a scrape of the same server, storage included; None without it."""
    binary = shutil.which("prometheus")
    if binary is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        jobs = "".join(
            f"  - {{job_name: j{i}, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}\n"
            for i in range(_PROMETHEUS_TARGETS)
        )
        interval = f"{_PROMETHEUS_INTERVAL_MS}ms"
        config = f"global: {{scrape_interval: {interval}, scrape_timeout: {interval}}}\nscrape_configs:\n{jobs}"
        Path(folder, "prometheus.yml").write_text(config)
        command = [
            binary,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{_free_port()}",
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(4)  # its start and first scrapes, which build its caches, aren't counted
            times, requests = psutil.Process(process.pid).cpu_times(), served.value
            time.sleep(_PROMETHEUS_SECONDS)
            later = psutil.Process(process.pid).cpu_times()
            scrapes = served.value - requests
        finally:
            process.terminate()
            process.wait()
    spent = later.user + later.system - times.user - times.system
    return spent / scrapes * 1e3 if scrapes else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def report(rows: Sequence[tuple[str, float | None]], ours_ms: float) -> None:
    """One line a figure, each as a ratio to the exporter's scrape and derivation on uvloop."""
    print(f"CPU a scrape of {PAGE_BYTES // 1024} KB (x: times the exporter's, on uvloop)")
    for name, ms in rows:
        print(f"  {name:<58}" + ("not installed" if ms is None else f"{ms:8.3f} ms {ms / ours_ms:8.2f} x"))
    print(f"  aim: at most {AIM_MS} ms: {'met' if ours_ms <= AIM_MS else 'missed'}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scrapes", type=int, default=200, help="scrapes in a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    context: Any = multiprocessing.get_context("spawn")
    port, served, listening = context.Value("i", 0), context.Value("i", 0), context.Event()
    server = context.Process(target=serve, args=(port, served, listening), daemon=True)
    server.start()
    try:
        if not listening.wait(30):
            raise SystemExit("the page server did not start within 30 s")
        some = pages()[:20]
        pattern = regex_of_wanted()
        turn = iter(range(10**9))
        ours, fetch = uvloop.run(exporter_cpu_ms(port.value, options.rounds, options.scrapes))
        plain, plain_fetch = asyncio.run(exporter_cpu_ms(port.value, options.rounds, options.scrapes))
        rows: list[tuple[str, float | None]] = [
            ("exporter on uvloop: fetch, read, derive", ours),
            ("  of which the fetch", fetch),
            ("exporter on asyncio's own loop: fetch, read, derive", plain),
            ("  of which the fetch", plain_fetch),
            ("bytes regex alone, no fetch", cpu_ms(options.rounds, 20, lambda: pattern.findall(some[next(turn) % 20]))),
            (
                "prometheus_client's parser alone, no fetch",
                cpu_ms(3, 5, lambda: list(text_string_to_metric_families(some[next(turn) % 20].decode()))),
            ),
            ("Prometheus: fetch, parse, store", prometheus_cpu_ms(port.value, served)),
        ]
    finally:
        server.terminate()
        server.join()
    report(rows, ours)


if __name__ == "__main__":
    main()
