"""A fleet as it is in the field: what the exporter makes of it, and what that costs.

200 engines (captured vLLM pages whose counters grow, Poisson loads), three models of 100, 60 and 40 workers, six
routers of three makes, 50 tenants whose requests arrive as records at 90 a second. One worker is dead from a third of
the run on, and every tenth restarts once. The exporter is the real command, scraping every 5 s; its page is read every
15 s, as Prometheus would. Prints the figures beside those of an earlier commit on the same fleet (`EARLIER`).

    python -m benchmarks.field_fleet [--seconds 120] [--workers 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import itertools
import json
import multiprocessing
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import psutil
import uvloop
import yaml
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from prefixwatch.engines.process import free_port
from prefixwatch.kvcache.request_record import RequestPage, RequestRecord

CAPTURES = Path(__file__).parent.parent / "tests/exporters/captures"
MODELS = {"llama-70b": (0.5, 12.0), "qwen-32b": (0.3, 8.0), "gemma-8b": (0.2, 5.0)}
"""Model → its share of the workers, and the mean load of one."""
TENANTS = [f"tenant-{number:02}" for number in range(50)]
REQUESTS_PER_SECOND = 90.0
INTERVAL_SECONDS = 5.0
PAGE_EVERY_SECONDS = 15.0

EARLIER: dict[str, str] = {
    "page_kb": "1330–1410",
    "page_gzip_kb": "84.8 (not offered: compressed by hand)",
    "series": "16,000–16,900",
    "quality_series": "3,066 (27 of them not 0)",
    "page_cpu_ms": "137",
    "core_percent": "10.4–12.2",
    "rss_mb": "186–196",
    "page_wall_ms": "400–3,300",
    "workers_with_a_load": "100 of 200, the rest as `other`",
    "top_share": "0.485, of the worker `other`",
}
"""The same fleet at fee1d5a, on the same machine: the review's figures."""

AIMS = {"page_kb": 600.0, "page_gzip_kb": 60.0, "page_cpu_ms": 40.0}
"""At 200 engines, 3 models and 50 tenants."""

_MEASURED_PAGES = 3

_NUMBER = re.compile(r"^(?P<series>vllm:\S+) (?P<value>[0-9.eE+-]+)$", re.M)
_GAUGES = ("num_requests", "cache_usage", "_info", "_created", "lora")


@dataclass(frozen=True)
class Worker:
    """One engine of the fleet."""

    name: str
    model: str
    mean_load: float
    dies: bool
    restarts: bool


@dataclass(frozen=True)
class Figures:
    """What was measured; `flags` are those that were raised at the end, by name."""

    page_kb: float
    page_gzip_kb: float
    series: int
    quality_series: int
    page_cpu_ms: float
    core_percent: float
    rss_mb: float
    page_wall_ms: float
    workers_with_a_load: int
    top_share: float | None
    targets_down: int
    flags: dict[str, int]
    largest: dict[str, int]


def fleet_of(count: int) -> list[Worker]:
    """This number of workers, split over the models by their shares."""
    workers: list[Worker] = []
    for model, (share, mean) in MODELS.items():
        for _ in range(max(2, round(count * share))):
            number = len(workers)
            name = f"worker-{number:03}"
            workers.append(Worker(name, model, mean, number == count * 17 // 200 + 1, number % 10 == 5))
    return workers


class EnginePage:
    """A captured page of vLLM whose counters grow: all by one factor, so that histograms stay consistent."""

    def __init__(self, text: str, worker: Worker, seed: int) -> None:
        self._random = random.Random(seed)
        self._worker = worker
        named = re.sub(r'model_name="[^"]*"', f'model_name="{worker.model}"', text)
        self._pieces: list[str] = []
        self._values: list[tuple[str, float]] = []
        end = 0
        for match in _NUMBER.finditer(named):
            self._pieces.append(named[end : match.start("value")])
            self._values.append((match["series"], float(match["value"])))
            end = match.end("value")
        self._pieces.append(named[end:])
        self._started = 1.7e9 + seed

    def at(self, seconds: float, restarted_at: float | None) -> str:
        lived = seconds + 300.0 if restarted_at is None else seconds - restarted_at
        started = self._started if restarted_at is None else self._started + 1e6
        found = [self._pieces[0]]
        load = sum(self._random.random() < 0.5 for _ in range(round(2 * self._worker.mean_load)))
        for (series, value), piece in zip(self._values, self._pieces[1:], strict=True):
            if series.startswith("vllm:num_requests_running"):
                now = float(load)
            elif series.startswith("vllm:num_requests_waiting"):
                now = float(max(0, load - 14)) if "_by_" not in series else 0.0
            elif series.startswith(("vllm:kv_cache_usage", "vllm:gpu_cache_usage")):
                now = min(1.0, 0.05 * load + 0.02 * self._random.random())
            elif any(part in series for part in _GAUGES):
                now = value
            else:
                now = float(int(value * lived / 100)) if "_sum" not in series else value * lived / 100
            found += (repr(now), piece)
        page = "".join(found)
        return re.sub(r"(?m)^process_start_time_seconds .*$", f"process_start_time_seconds {started}", page)


class Router:
    """A prefixwatch router: its own counts by worker, and records of its requests."""

    def __init__(self, workers: Sequence[Worker], seed: int) -> None:
        self._random = random.Random(seed)
        self._workers = workers
        self._sent: Counter[tuple[str, str]] = Counter()
        self._records: list[RequestRecord] = []
        self._life = f"life-{seed}"

    def run(self, requests: int, now: float) -> None:
        for _ in range(requests):
            worker = self._random.choice(self._workers)
            tenant = self._random.choices(TENANTS, weights=range(len(TENANTS), 0, -1))[0]
            prompt = self._random.randint(300, 6_000)
            cached = self._random.choice([0, prompt // 2 // 16 * 16, (prompt - 1) // 16 * 16])
            self._sent[worker.name, worker.model] += 1
            self._records.append(
                RequestRecord(
                    ended_unix_seconds=now,
                    outcome="completed",
                    worker=worker.name,
                    model=worker.model,
                    tenant=tenant,
                    session=f"{tenant}-{self._random.randint(0, 20)}",
                    policy="cache_aware",
                    reason="deepest_prefix",
                    salted=True,
                    prompt_tokens=prompt,
                    cached_tokens=cached,
                    predicted_tokens=cached,
                    held_tokens=cached,
                    held_by=worker.name,
                    reusable_tokens=cached,
                    block_size=16,
                    output_tokens=self._random.randint(20, 400),
                    decision_seconds=0.0004,
                    ttft_seconds=0.03 + 0.0002 * (prompt - cached),
                    e2e_seconds=2.0 + self._random.random(),
                    tpot_seconds=0.012,
                )
            )

    def metrics(self) -> str:
        lines = [f'prefixwatch_router_in_flight{{worker="{worker.name}"}} {self._random.randint(0, 3)}'
                 for worker in self._workers]  # fmt: skip
        lines += [
            f'prefixwatch_router_requests_total{{worker="{worker}",model="{model}",outcome="completed"}} {count}'
            for (worker, model), count in self._sent.items()
        ]
        return "\n".join([*lines, ""])

    def page(self, after: int) -> RequestPage:
        return RequestPage(self._life, after + 1, self._records[after : after + 1_000])


def serve(count: int, seconds: float, ready: Connection) -> None:
    """The whole fleet on one port: `/engine/NAME/metrics`, `/router/N/metrics` and `/router/N/router/requests`."""
    workers = fleet_of(count)
    text = (CAPTURES / "metrics_vllm_0.32.0_default_flags.txt").read_text()
    engines = {worker.name: (worker, EnginePage(text, worker, seed)) for seed, worker in enumerate(workers)}
    own = [Router(workers, seed) for seed in (101, 102)]
    others = [
        (CAPTURES / "metrics_production-stack_0.1.12-14-ga6c01db0_prefixaware.txt").read_text(),
        gzip.decompress((CAPTURES / "metrics_smg_1.13.0_cache_aware.txt.gz").read_bytes()).decode(),
    ]
    begun = time.monotonic()

    async def engine(request: web.Request) -> web.Response:
        worker, page = engines[request.match_info["name"]]
        now = time.monotonic() - begun
        if worker.dies and now > seconds / 3:
            return web.Response(status=503)
        restart = seconds / 2 if worker.restarts and now > seconds / 2 else None
        return web.Response(text=page.at(now, restart))

    async def router(request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        return web.Response(text=own[number].metrics() if number < len(own) else others[number % 2])

    async def requests(request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        return web.Response(body=msgspec.json.encode(own[number].page(int(request.query.get("after", 0)))))

    async def traffic() -> None:
        for step in itertools.count(1):
            for each in own:
                each.run(round(REQUESTS_PER_SECOND / len(own)), time.time())
            await asyncio.sleep(max(0.0, begun + step - time.monotonic()))

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/engine/{name}/metrics", engine)
        app.router.add_get("/router/{number}/metrics", router)
        app.router.add_get("/router/{number}/router/requests", requests)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=512).start()
        ready.send(runner.addresses[0][1])
        await traffic()

    uvloop.run(run())


def configuration(workers: Sequence[Worker], port: int, listen: int) -> dict[str, object]:
    """prefixwatch.yaml for this fleet."""
    at = f"http://127.0.0.1:{port}"
    targets = [{"name": worker.name, "url": f"{at}/engine/{worker.name}/metrics"} for worker in workers]
    targets += [{"name": f"router-{number}", "url": f"{at}/router/{number}/metrics"} for number in range(6)]
    return {"exporter": {"listen": f"127.0.0.1:{listen}", "interval_seconds": INTERVAL_SECONDS, "targets": targets}}


def read(url: str, coding: str = "identity") -> tuple[bytes, float]:
    """A page's bytes as they came over the wire, and how long they took."""
    begun = time.monotonic()
    request = urllib.request.Request(url, headers={"Accept-Encoding": coding})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read(), time.monotonic() - begun


def samples(page: bytes) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by family, without the namespace."""
    return {
        family.name.removeprefix("prefixwatch_"): [(sample.labels, sample.value) for sample in family.samples]
        for family in text_string_to_metric_families(page.decode())
    }


def measure(count: int, seconds: float) -> Figures:
    """Run the fleet and the exporter for so long."""
    workers = fleet_of(count)
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(count, seconds, theirs), daemon=True)
    server.start()
    with tempfile.TemporaryDirectory() as folder:
        listen = free_port()
        file = Path(folder) / "prefixwatch.yaml"
        file.write_text(yaml.safe_dump(configuration(workers, ours.recv(), listen)))
        command = [sys.executable, "-P", "-m", "prefixwatch.stack.cli.main", "exporter", "--config", str(file),
                   "--log-level", "error"]  # fmt: skip
        exporter = subprocess.Popen(command)
        try:
            return _figures(f"http://127.0.0.1:{listen}", psutil.Process(exporter.pid), seconds)
        finally:
            exporter.terminate()
            exporter.wait()
            server.terminate()


def _figures(url: str, exporter: psutil.Process, seconds: float) -> Figures:
    _wait_until_ready(f"{url}/-/ready")
    begun, cpu = time.monotonic(), sum(exporter.cpu_times()[:2])
    walls = []
    while (left := begun + seconds - time.monotonic()) > 0:
        time.sleep(min(left, PAGE_EVERY_SECONDS))
        walls.append(read(f"{url}/metrics", "gzip")[1])
    used = sum(exporter.cpu_times()[:2]) - cpu
    elapsed = time.monotonic() - begun
    packed, _ = read(f"{url}/metrics", "gzip")
    spent = []
    for _ in range(_MEASURED_PAGES):
        time.sleep(INTERVAL_SECONDS)  # until every target has been scraped again
        page, _ = read(f"{url}/metrics")
        found = samples(page)
        spent.append(found["page_cpu_seconds"][0][1])  # of all pages before this one
    page_cpu = min(later - earlier for earlier, later in itertools.pairwise(spent))
    shares = [value for _, value in found.get("hotspot_top_share_ratio", ())]
    flags = Counter(labels["flag"] for labels, _ in found.get("data_quality", ()))
    return Figures(
        page_kb=len(page) / 1e3,
        page_gzip_kb=len(packed) / 1e3,
        series=sum(map(len, found.values())),
        quality_series=sum(flags.values()),
        page_cpu_ms=1e3 * page_cpu,
        core_percent=100 * used / elapsed,
        rss_mb=exporter.memory_info().rss / 1e6,
        page_wall_ms=1e3 * max(walls),
        workers_with_a_load=len(found["worker_load_requests"]),
        top_share=max(shares) if shares else None,
        targets_down=sum(value == 0 for _, value in found["target_up"]),
        flags=dict(flags),
        largest=dict(Counter({name: len(every) for name, every in found.items()}).most_common(8)),
    )


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            read(url)
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise TimeoutError(f"the exporter was not ready: {url}")


def table(figures: Figures) -> str:
    """The figures beside the earlier ones, as Markdown."""
    shown = {
        name: f"{value:,.4g}" if isinstance(value, float) else f"{value}" for name, value in asdict(figures).items()
    }
    lines = ["| figure | now | earlier | aim |", "| --- | --- | --- | --- |"]
    for name, value in shown.items():
        aim = f"< {AIMS[name]:g}" if name in AIMS else ""
        lines.append(f"| {name} | {value} | {EARLIER.get(name, '')} | {aim} |")
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(given)
    figures = measure(args.workers, args.seconds)
    if args.json:
        args.json.write_text(json.dumps(asdict(figures), indent=1))
    print(table(figures))
    missed = [name for name, aim in AIMS.items() if getattr(figures, name) >= aim]
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
