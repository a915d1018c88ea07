"""Rules without the exporter: a real Prometheus scrapes two real vLLM engines, and its figures equal the exporter's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from prefixwatch.alerts.build import build, engine_series, rendered
from prefixwatch.alerts.prometheus import Prometheus, new_session
from prefixwatch.alerts.settings import RuleSettings
from prefixwatch.dashboards.queries.check import check
from prefixwatch.dashboards.queries.inventory import Shown
from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.engines.process import ManagedProcess, free_port
from prefixwatch.exporters.app import running
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.stack.local.monitoring import prometheus_command
from tests.live.conftest import Complete, MakePrompt

pytestmark = [pytest.mark.vllm, pytest.mark.prometheus]

SPEED = 60
PATIENCE_SECONDS = 120.0
COMPARED = (
    "prefix_query_tokens_total",
    "prefix_hit_tokens_total",
    "engine_finished_requests_total",
    "engine_generation_tokens_total",
    "engine_ttft_seconds_count",
    "engine_e2e_seconds_bucket{le='+Inf'}",
)
GAUGES = ("requests_running", "requests_waiting", "kv_usage_ratio")


@asynccontextmanager
async def scraping(engines: Sequence[EngineHandle], exporter: str, folder: Path) -> AsyncIterator[Prometheus]:
    """A Prometheus with the rules `--from engines` on a fast clock. The exporter's series get another prefix there."""
    (folder / "rules").mkdir()
    for name, text in rendered(build(settings=RuleSettings(source="engines", speedup=SPEED))).items():
        (folder / "rules" / name).write_text(text)
    renamed = {"source_labels": ["__name__"], "regex": "prefixwatch_(.+)", "target_label": "__name__"}
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [f"{folder}/rules/*.yaml"],
        "scrape_configs": [
            {"job_name": "vllm", "static_configs": [{"targets": [urlsplit(each.url).netloc for each in engines]}]},
            {
                "job_name": "beside",
                "static_configs": [{"targets": [urlsplit(exporter).netloc]}],
                "metric_relabel_configs": [{**renamed, "replacement": "exporter_$1"}],
            },
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    process = ManagedProcess("prometheus", prometheus_command("prometheus", folder, address), folder / "log")
    try:
        await process.wait_ready(f"http://{address}/-/ready", PATIENCE_SECONDS)
        async with new_session() as session:
            yield Prometheus(f"http://{address}", session)
    finally:
        process.kill()


async def total(prometheus: Prometheus, series: str) -> float | None:
    found = await prometheus.instant(f"sum({series})")
    return found[0].points[0][1] if found else None


async def both(prometheus: Prometheus, name: str) -> tuple[float | None, float | None]:
    return await total(prometheus, f"prefixwatch_{name}"), await total(prometheus, f"exporter_{name}")


async def grown(prometheus: Prometheus, before: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """What each counter grew by since: of the rules, and of the exporter."""
    found = {}
    for name, (ours, theirs) in before.items():
        now = await both(prometheus, name)
        found[name] = ((now[0] or 0.0) - ours, (now[1] or 0.0) - theirs)
    return found


async def test_figures_of_two_engines_without_the_exporter_equal_its_own(
    engines: list[EngineHandle], complete: Complete, make_prompt: MakePrompt, tmp_path: Path
) -> None:
    targets = tuple(TargetConfig(name=one.name, url=one.url) for one in engines)
    config = ExporterConfig(listen="127.0.0.1:0", interval_seconds=1.0, timeout_seconds=0.9, targets=targets)
    async with running(config) as exporter, scraping(engines, exporter.url, tmp_path) as prometheus:

        async def ask() -> tuple[int, int]:
            prompt, cached = make_prompt(500), 0
            for engine in engines:
                for _ in range(2):
                    cached += (await complete(engine.url, prompt, max_tokens=8)).cached_tokens
            return 4, cached

        await ask()  # counters with labels are born with their first event
        deadline = time.monotonic() + PATIENCE_SECONDS
        while None in [value for name in COMPARED for value in await both(prometheus, name)]:
            assert time.monotonic() < deadline
            await asyncio.sleep(1.0)
        await asyncio.sleep(5.0)  # everything of the first requests has been scraped twice
        before = {name: (await total(prometheus, f"prefixwatch_{name}") or 0.0,
                         await total(prometheus, f"exporter_{name}") or 0.0) for name in COMPARED}  # fmt: skip
        requests = hits = 0
        judged: float | None = None
        while not judged or requests < 24:
            assert time.monotonic() < deadline + PATIENCE_SECONDS
            asked, cached = await ask()
            requests, hits = requests + asked, hits + cached
            judged = await total(prometheus, 'prefixwatch:slo_total_events:increase5m{slo="engine-ttft"}')

        outcomes = await check(prometheus, Shown(60.0, 1.0), measured=engine_series())
        while True:
            increase = await grown(prometheus, before)
            if increase["engine_finished_requests_total"] == (requests, requests):
                break
            assert time.monotonic() < deadline + 2 * PATIENCE_SECONDS, increase
            await asyncio.sleep(1.0)

        assert increase["prefix_hit_tokens_total"] == (hits, hits)
        assert {name: ours for name, (ours, _) in increase.items()} == {
            n: theirs for n, (_, theirs) in increase.items()
        }
        for name in GAUGES:
            ours, theirs = await both(prometheus, name)
            assert ours == theirs == 0.0, name
        bad = await total(prometheus, 'prefixwatch:slo_bad_ratio:increase5m{slo="engine-availability"}')

    assert judged
    assert bad in {None, 0.0}
    drawn = {(one.asked.dashboard, one.asked.panel) for one in outcomes if one.status == "data"}
    assert {("overview", "KV cache in use"), ("prefix-cache", "Hit ratio")} & drawn
    assert [f"{one.asked}: {one.why}" for one in outcomes if not one.ok] == []
    needs = {one.why for one in outcomes if one.why.startswith("needs the exporter, which gives ")}
    assert any("prefixwatch_tenant_hit_tokens_total" in why for why in needs)
    assert len(drawn) >= 10
