"""A pair of exporters under a real Prometheus: rules that are built for replicas count every request once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from prefixwatch.alerts.build import build
from prefixwatch.alerts.rule import RecordingRule
from prefixwatch.alerts.settings import RuleSettings
from prefixwatch.engines.process import free_port
from prefixwatch.exporters.app import running
from prefixwatch.exporters.config import validated
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.stack.local.monitoring import prometheus_command
from tests.exporters.requests import done

Ask = Callable[[str], Awaitable[list[float]]]
REPLICAS = ("a", "b")
REQUESTS = 120


def configuration(pages: dict[str, str]) -> dict[str, Any]:
    """Both pages every second, each with its replica as a label."""
    targets = [{"targets": [address], "labels": {"replica": name}} for name, address in pages.items()]
    return {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [{"job_name": "prefixwatch", "static_configs": targets}],
    }


def rule(replica_labels: tuple[str, ...]) -> str:
    """The expression that every burn rate of the TTFT objective rests on."""
    rules = [
        rule
        for file in build(["ttft"], RuleSettings(replica_labels=replica_labels))
        for group in file.groups
        for rule in group.rules
        if isinstance(rule, RecordingRule) and rule.name == "prefixwatch:slo_total_events:increase5m"
    ]
    return rules[0].expr


async def eventually(ask: Ask, query: str, expected: list[float]) -> None:
    deadline = time.monotonic() + 120
    while sorted(await ask(query)) != expected:
        assert time.monotonic() < deadline, (query, await ask(query))
        await asyncio.sleep(0.3)


@pytest.mark.prometheus
async def test_a_real_prometheus_with_a_pair_counts_every_request_once(tmp_path: Path) -> None:
    """B5: two exporters over one fleet showed every count twice."""

    def exporter(name: str) -> Any:
        return running(validated({"targets": [{"name": "a", "url": "127.0.0.1:1"}], "listen": "127.0.0.1:0"}, name))

    async with exporter("a") as first, exporter("b") as second, aiohttp.ClientSession() as session:
        pair: dict[str, Exporter] = dict(zip(REPLICAS, (first, second), strict=True))
        pages = {name: one.url.removeprefix("http://") for name, one in pair.items()}
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration(pages)))
        address = f"127.0.0.1:{free_port()}"
        server = await asyncio.create_subprocess_exec(
            *prometheus_command("prometheus", tmp_path, address),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip

        async def ask(query: str, at: float | None = None) -> list[float]:
            asked = {"query": query} | ({} if at is None else {"time": str(at)})
            try:
                async with session.get(f"http://{address}/api/v1/query", params=asked) as answer:
                    found = (await answer.json()).get("data", {}).get("result", ())
            except aiohttp.ClientError:
                return []
            return [float(series["value"][1]) for series in found]

        try:
            counted = 'sum by (replica) (prefixwatch_slo_requests_total{slo="ttft"})'
            for one in pair.values():
                one.ledger.expect("router")
                one.ledger.serves("m", "w0")
            await eventually(ask, counted, [0.0, 0.0])
            for one in pair.values():  # each reads every router's records
                for _ in range(REQUESTS):
                    one.ledger.record(done(), "router")
            await eventually(ask, counted, [REQUESTS, REQUESTS])
            await eventually(ask, "count(count_over_time(prefixwatch_pages_total[1m]) > 5)", [2.0])
            at = time.time()
            (each_a, each_b) = await ask(
                'sum by (replica) (increase(prefixwatch_slo_requests_total{slo="ttft"}[5m]))', at
            )
            (once,), (twice,) = await ask(rule(("replica", "instance")), at), await ask(rule(()), at)
            assert each_a > 0
            assert once == pytest.approx(max(each_a, each_b))
            assert twice == pytest.approx(each_a + each_b)
        finally:
            server.terminate()
            await server.wait()
