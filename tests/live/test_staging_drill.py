"""Staging seen whole: two real vLLM engines behind another project's router, with and without others' traffic."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.engines.process import ManagedProcess, free_ports, stop_all
from prefixwatch.loadgen.request_log.fleet_rows import read_fleet
from tests.peers.peer_venv import PYTHON
from tests.stack.command_line import prefixwatch
from tests.stack.staging import Staging, others_chatting

pytestmark = [pytest.mark.vllm, pytest.mark.peers]


@pytest.fixture
def staging(engines: list[EngineHandle], tmp_path: Path) -> Iterator[Staging]:
    """vLLM's own router, as its project ships it, and an exporter that scrapes the engines alone."""
    router_port, metrics_port, exporter_port = free_ports(3)
    urls = [engine.url for engine in engines]
    address = ["--host", "127.0.0.1", "--port", str(router_port), "--policy", "cache_aware"]
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    command = [str(PYTHON), "-m", "vllm_router.launch_router", *address, "--worker-urls", *urls, *metrics]
    listen = f"127.0.0.1:{exporter_port}"
    config = {
        "exporter": {"listen": listen, "interval_seconds": 1},
        "fleet": {"targets": [{"name": engine.name, "url": engine.url} for engine in engines]},
    }
    file = tmp_path / "prefixwatch.json"
    file.write_text(json.dumps(config))
    exporter = [sys.executable, "-P", "-m", "prefixwatch", "exporter", "--config", str(file)]
    parts = [
        ManagedProcess("vllm-router", command, tmp_path / "router.log"),
        ManagedProcess("exporter", exporter, tmp_path / "exporter.log"),
    ]
    ready = (f"http://127.0.0.1:{router_port}/readiness", f"http://{listen}/-/healthy")

    async def start() -> None:
        await asyncio.gather(*(part.wait_ready(url, 60) for part, url in zip(parts, ready, strict=True)))

    try:
        asyncio.run(start())
        yield Staging(f"http://127.0.0.1:{router_port}", f"http://127.0.0.1:{exporter_port}")
    finally:
        stop_all(parts)


def bench(staging: Staging, model_dir: Path, out: Path) -> Any:
    target = ("--target", staging.router, "--exporter", staging.exporter, "--model-dir", str(model_dir))
    result = prefixwatch("bench", "smoke", *target, "--repeats", "1", "--out", str(out))
    assert result.code in (0, 1, 3), result.err
    return json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize("others", [False, True])
def test_the_report_shows_the_workers_and_flags_somebody_elses_traffic(
    staging: Staging, engines: list[EngineHandle], model_dir: Path, tmp_path: Path, *, others: bool
) -> None:
    out = tmp_path / "out"
    if others:
        with others_chatting(staging.router):
            summary = bench(staging, model_dir, out)
    else:
        summary = bench(staging, model_dir, out)
    page = (out / "report.html").read_text()
    assert {row.worker for row in read_fleet(out / "fleet.parquet")} == {engine.name for engine in engines}
    assert all(engine.name in page for engine in engines)
    assert 'id="engine-load"' in page
    [run] = summary["runs"]
    assert run["engine"]["query_tokens"] > 0
    reasons = " ".join(summary["validity"]["reasons"])
    found = "others used these engines during the run: the engines looked up" in reasons
    assert found is others, summary["validity"]
    if others:
        assert summary["verdict"] == "inconclusive"
        assert "others used these engines" in page
