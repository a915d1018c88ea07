"""A small whole stack with something for most panels: engines in zones, tenants, sessions, prices, probes, canaries,
recorded pages of other systems, and Prometheus with the rules on a clock 60 times as fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import re
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

from prefixwatch.alerts.build import build, rendered
from prefixwatch.alerts.prometheus import Prometheus, new_session
from prefixwatch.alerts.settings import RuleSettings
from prefixwatch.dashboards.queries.check import Outcome, check, counted
from prefixwatch.dashboards.queries.inventory import ANNOTATION, Shown
from prefixwatch.engines.process import ManagedProcess, free_ports
from prefixwatch.engines.simulated.config import SimulatedEngineConfig
from prefixwatch.engines.tiny_model import MODEL_NAME, default_model_dir
from prefixwatch.stack.local.traffic import Sender, Traffic

CAPTURES = Path("tests/exporters/captures")
RECORDED = {
    "recorded-vllm": "metrics_vllm_0.32.0_kvmetrics_mfu_spec.txt.gz",
    "recorded-lmcache": "metrics_lmcache-inprocess_0.5.6.txt.gz",
    "recorded-store": "metrics_lmcache-server_0.5.6.txt.gz",
}
"""Pages of other systems, whose counters are made to grow from scrape to scrape."""
HASTEN = 60.0
SCRAPE_SECONDS = 1.0
TENANTS = ("acme", "globex", "initech")
_READY_SECONDS = 90.0
RANGE_SECONDS = 60.0
_REGENERATING = 3
"""Clients that always have a request in flight: hotspots are judged from one request on average on."""
FEW = 30
"""Queries without an answer in this stack, of some 280: no GPUs, no transfers, nothing wrong, and request
records that make engines' bounds needless."""
FILLED_SECONDS = 180.0
"""Records over 15 hastened minutes, 20 hits and misses of one length, probes of two lengths, caches that overflow."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine as router and exporter know it."""

    name: str
    url: str
    kv_events: str | None
    kv_replay: str | None
    zone: str
    node: str


@dataclass(frozen=True, slots=True)
class Running:
    prometheus: str
    exporter: str
    router: str
    renamed: set[str]
    """Metrics that recorded pages give under another name from now on; empty at first."""


@contextlib.asynccontextmanager
async def simulated_engines(folder: Path, count: int = 3) -> AsyncIterator[list[Engine]]:
    """Engines whose caches are too small for the traffic, two in one zone."""
    found = []
    with contextlib.ExitStack() as cleanup:
        processes = []
        for number, port in enumerate(free_ports(count)):
            name, url = f"engine-{number}", f"http://127.0.0.1:{port}"
            config = SimulatedEngineConfig(
                model_dir=default_model_dir(),
                port=port,
                capacity_blocks=512,
                max_model_len=4096,
                kv_events_endpoint=f"ipc://{folder / name}.kv",
                replay_endpoint=f"ipc://{folder / name}.replay",
            )
            command = [
                sys.executable,
                "-P",
                "-m",
                "prefixwatch.engines.simulated.server",
                "--config",
                str(written(folder, name, config.model_dump(mode="json"))),
            ]
            process = ManagedProcess(name, command, folder / f"{name}.log")
            cleanup.callback(process.kill)
            processes.append(process.wait_ready(f"{url}/health", _READY_SECONDS))
            place = {"zone": f"zone-{number // 2}", "node": f"node-{number}"}
            found.append(Engine(name, url, config.kv_events_endpoint, config.replay_endpoint, **place))
        await asyncio.gather(*processes)
        yield found


@contextlib.asynccontextmanager
async def observed(
    engines: Sequence[Engine], folder: Path, model_dir: Path, model: str, block_size: int = 16
) -> AsyncIterator[Running]:
    """Router, exporter and Prometheus for these engines, whose blocks are of so many tokens."""
    router, exporter, prometheus = (f"127.0.0.1:{port}" for port in free_ports(3))
    renamed: set[str] = set()
    async with _recorded_pages(renamed) as pages:
        tokenizer = {"model_dir": str(model_dir), "block_size": block_size}
        exporting = _exporter(engines, router, exporter, model, pages)
        config = _config(engines, _router(router, exporter), exporting, tokenizer)
        file = written(folder, "prefixwatch", config)
        rules = rules_folder(folder)
        scraping = written(folder, "prometheus", prometheus_config(rules, exporter))
        commands = {
            "router": (
                [sys.executable, "-P", "-m", "prefixwatch", "router", "--config", str(file)],
                f"http://{router}/health",
            ),
            "exporter": (
                [sys.executable, "-P", "-m", "prefixwatch", "exporter", "--config", str(file)],
                f"http://{exporter}/-/healthy",
            ),
            "prometheus": (
                [
                    str(shutil.which("prometheus")),
                    f"--config.file={scraping}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={prometheus}",
                ],
                f"http://{prometheus}/-/ready",
            ),
        }
        with contextlib.ExitStack() as cleanup:
            ready = []
            for name, (command, url) in commands.items():
                process = ManagedProcess(name, command, folder / f"{name}.log")
                cleanup.callback(process.kill)
                ready.append(process.wait_ready(url, _READY_SECONDS))
            await asyncio.gather(*ready)
            yield Running(f"http://{prometheus}", f"http://{exporter}", f"http://{router}", renamed)


async def answered(running: Running, model: str, rate_per_second: float = 8.0) -> Sequence[Outcome]:
    """Outcomes once every query has an answer or a reason, and few a reason, or the time is over."""
    deadline = time.monotonic() + FILLED_SECONDS
    async with traffic(running.router, model, rate_per_second), new_session() as session:
        while True:
            outcomes = await check(Prometheus(running.prometheus, session), Shown(RANGE_SECONDS, SCRAPE_SECONDS))
            enough = all(one.ok for one in outcomes) and len(without_answer(outcomes)) < FEW
            if enough or time.monotonic() > deadline:
                return outcomes
            await asyncio.sleep(2.0)


def faults(outcomes: Sequence[Outcome]) -> list[str]:
    """Queries without an answer or a reason; prints what was listed."""
    listed = sorted(f"{one.asked} ({one.why})" for one in outcomes if one.status == "listed")
    print(counted(outcomes), *listed, sep="\n")
    found = [f"{one.asked}: {one.status}: {one.why}" for one in outcomes if not one.ok]
    print(*found, sep="\n")
    return found


def without_answer(outcomes: Sequence[Outcome]) -> list[str]:
    """Queries of panels and variables that have none, for a reason that isn't that all is well."""
    return [
        str(one.asked)
        for one in outcomes
        if one.status != "data" and not one.asked.explains and one.asked.panel != ANNOTATION
    ]


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Of a name short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        yield Path(folder)


@contextlib.asynccontextmanager
async def traffic(router: str, model: str = MODEL_NAME, rate_per_second: float = 8.0) -> AsyncIterator[Sender]:
    """While inside: chats of several tenants, prompts that nobody sent before, and answers asked for again and again,
    so that there are partial hits, misses and hits, and on engines of any speed requests in flight.
    """
    chats = Traffic(rate_per_second=rate_per_second, tenants=TENANTS, openings=24, opening_words=160, turns=4)
    chats.flood_per_second, chats.flood_words = rate_per_second / 2, 300
    sender = Sender(router, chats)
    again = [_regenerate(router, model, number) for number in range(_REGENERATING)]
    tasks = [asyncio.create_task(each) for each in (sender.run(), *again)]
    try:
        yield sender
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _regenerate(router: str, model: str, number: int) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"again {number} " * 100}],
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"x-tenant-id": TENANTS[number % len(TENANTS)], "x-session-id": f"regenerate-{number}"}
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.post(f"{router}/v1/chat/completions", json=body, headers=headers) as response:
                await response.read()
            await asyncio.sleep(0.05)


def written(folder: Path, name: str, content: Any) -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return file


def rules_folder(folder: Path) -> Path:
    rules = folder / "rules"
    rules.mkdir()
    settings = RuleSettings(speedup=HASTEN, scrape_interval_seconds=SCRAPE_SECONDS, absent_alerts=False)
    for name, text in rendered(build(settings=settings)).items():
        (rules / name).write_text(text, encoding="utf-8")
    return rules


def prometheus_config(rules: Path, exporter: str) -> dict[str, Any]:
    return {
        "global": {
            "scrape_interval": "1s",
            "scrape_timeout": "1s",
            "evaluation_interval": "1s",
            "external_labels": {"cluster": "test"},
        },
        "rule_files": [str(rules / "*.yaml")],
        "scrape_configs": [
            {
                "job_name": "prefixwatch",
                "static_configs": [{"targets": [exporter], "labels": {"cluster": "test"}}],
            }
        ],
    }


def _config(
    engines: Sequence[Engine], router: dict[str, Any], exporter: dict[str, Any], tokenizer: dict[str, Any]
) -> dict[str, Any]:
    return {
        "fleet": {"targets": [asdict(engine) for engine in engines]},
        "tenants": [{"name": name, "salt": f"salt of {name}"} for name in TENANTS],
        "tokenizer": tokenizer,
        "router": router,
        "pricing": {"gpu_usd_per_hour": 2.5},
        "exporter": exporter,
    }


def _router(address: str, exporter: str) -> dict[str, Any]:
    host, port = address.split(":")
    return {
        "host": host,
        "port": int(port),
        "policy": {"name": "score"},
        "cache_view": {"source": "events"},
        "degradation": {"enabled": True, "ttft_seconds": 60.0},  # the chain is watched, and nothing enters it
        "otlp_endpoint": f"http://{exporter}/v1/traces",
    }


def _exporter(
    engines: Sequence[Engine], router: str, address: str, model: str, pages: dict[str, str]
) -> dict[str, Any]:
    probes = {
        "targets": [{"name": engine.name, "url": engine.url, "model": model} for engine in engines],
        "interval_seconds": 5.0,
        "prompt_tokens": [256, 1024],
        "tokens_per_minute": 200_000,
        "target_tokens_per_minute": 100_000,
        "max_waiting_requests": 100.0,
        "isolation": {"every_rounds": 2},
    }
    return {
        "listen": address,
        "interval_seconds": SCRAPE_SECONDS,
        "timeout_seconds": 0.9,
        "window_seconds": 30.0,
        "targets": [{"name": name, "url": url} for name, url in {"router": f"http://{router}", **pages}.items()],
        "otlp": {},
        "probes": probes,
    }


_COUNTED = re.compile(r"^(?P<series>\S+?(?:_total|_bucket|_sum|_count)(?:\{.*\})?) (?P<value>[0-9.e+]+)$", re.MULTILINE)


@contextlib.asynccontextmanager
async def _recorded_pages(renamed: set[str]) -> AsyncIterator[dict[str, str]]:
    """Addresses by target name."""
    scrapes = dict.fromkeys(RECORDED, 0)
    texts = {name: gzip.decompress((CAPTURES / file).read_bytes()).decode() for name, file in RECORDED.items()}

    async def page(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        scrapes[name] += 1
        factor = 1 + scrapes[name] / 20
        grown = _COUNTED.sub(lambda match: f"{match['series']} {float(match['value']) * factor!r}", texts[name])
        for metric in renamed:
            grown = grown.replace(metric, f"{metric}_v2")
        return web.Response(text=grown)

    app = web.Application()
    app.router.add_get("/{name}/metrics", page)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        yield {name: f"http://127.0.0.1:{port}/{name}/metrics" for name in RECORDED}
    finally:
        await runner.cleanup()
