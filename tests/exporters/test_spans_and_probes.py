"""Spans and probes in a running exporter, from its configuration file to its metrics page."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefixwatch.engines import fleet
from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.engines.tiny_model import make_tiny_model
from prefixwatch.exporters.app import running
from prefixwatch.exporters.errors import ExporterError
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.kvcache.request_record import RequestRecord
from prefixwatch.stack.config import load_config

Key = tuple[str, tuple[tuple[str, str], ...]]
Page = dict[Key, float]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHandle]:
    folder = tmp_path_factory.mktemp("probed-by-exporter")
    model_dir = make_tiny_model(folder / "model")
    (handle,) = asyncio.run(fleet.start_simulated(1, model_dir, folder))
    yield handle
    asyncio.run(fleet.stop([handle]))


def config_file(folder: Path, engine: EngineHandle, exporter: dict[str, Any], **sections: Any) -> Path:
    file = folder / "prefixwatch.yaml"
    targets = [{"name": "w", "url": engine.url}]
    file.write_text(json.dumps({"exporter": {"listen": "127.0.0.1:0", "targets": targets, **exporter}, **sections}))
    return file


async def page(session: aiohttp.ClientSession, exporter: Exporter) -> Page:
    async with session.get(f"{exporter.url}/metrics") as answer:
        text = await answer.text()
    return {
        (sample.name.removeprefix("prefixwatch_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def page_with(session: aiohttp.ClientSession, exporter: Exporter, sample: Key) -> Page:
    """The page, once this sample is on it."""
    async with asyncio.timeout(20):
        while sample not in (found := await page(session, exporter)):  # noqa: ASYNC110 - over HTTP there is no event
            await asyncio.sleep(0.05)
    return found


def span(number: int, **tokens: int) -> dict[str, Any]:
    """A streamed chat of 2 s with its first token after 0.5 s, as a gateway's span."""
    end = time.time()
    values: dict[str, Any] = {f"gen_ai.usage.{name}": {"intValue": count} for name, count in tokens.items()}
    values |= {"gen_ai.operation.name": {"stringValue": "chat"}, "litellm.team.id": {"stringValue": "blue"}}
    values["gen_ai.response.time_to_first_chunk"] = {"doubleValue": 0.5}
    return {
        "traceId": f"{number:032x}",
        "spanId": f"{number:016x}",
        "startTimeUnixNano": int((end - 2) * 1e9),
        "endTimeUnixNano": int(end * 1e9),
        "attributes": [{"key": name, "value": value} for name, value in values.items()],
    }


async def test_spans_become_requests_by_cache_class_and_tenant(engine: EngineHandle, tmp_path: Path) -> None:
    otlp = {"tenant_attributes": ["litellm.team.id"], "settle_seconds": 0.2}
    file = config_file(tmp_path, engine, {"otlp": otlp}, tenants=[{"name": "blue"}])
    spans = [
        span(1, input_tokens=1000, **{"cache_read.input_tokens": 992}),
        span(2, input_tokens=1000, **{"cache_read.input_tokens": 0}),
        span(3, input_tokens=1000),  # nobody told what was cached: neither hit nor miss
        span(4, input_tokens=1000),  # our router's own records tell this one
    ]
    async with aiohttp.ClientSession() as session, running(load_config(file, {}).exporter_config([])) as exporter:
        exporter.ledger.record(RequestRecord(time.time(), "completed", trace_id=f"{4:032x}"), "router")
        document = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
        async with session.post(f"{exporter.url}/v1/traces", json=document) as answer:
            assert (answer.status, await answer.json()) == (200, {})
        found = await page_with(session, exporter, ("request_records_total", (("source", "spans"),)))
    assert found["request_records_total", (("source", "spans"),)] == 3
    assert found["spans_total", (("result", "elsewhere"),)] == 1
    assert found["otlp_exports_total", (("code", "200"),)] == 1
    assert found["ttft_seconds_count", (("cache", "hit"),)] == 1
    assert found["ttft_seconds_count", (("cache", "miss"),)] == 1
    assert found["tenant_ttft_seconds_count", (("cache", "hit"), ("tenant", "blue"))] == 1


async def test_probes_reach_the_page_and_measure_the_misses(engine: EngineHandle, tmp_path: Path) -> None:
    """The misses' cost is held against the probes' baseline, not against other misses."""
    probes = {"targets": [{"name": "w", "url": engine.url}], "prompt_tokens": [1000], "interval_seconds": 0.2}
    file = config_file(tmp_path, engine, {"probes": probes})
    async with aiohttp.ClientSession() as session, running(load_config(file, {}).exporter_config([])) as exporter:
        repeated = ("probe_ttft_seconds_count", (("model", "tiny"), ("target", "w"), ("temperature", "repeat")))
        await page_with(session, exporter, repeated)
        assert exporter.prober is not None
        await exporter.prober.stop()  # so that the baseline stays what it is
        async with session.get(f"{exporter.url}/api/v1/fleet") as answer:
            (baseline,) = (await answer.json())["probes"]["cold_prefill_baseline"]
        tokens, twice_as_long = round(baseline["tokens"]), 2 * baseline["seconds"]
        miss = RequestRecord(
            time.time(), "completed", prompt_tokens=tokens, cached_tokens=0, ttft_seconds=twice_as_long
        )
        exporter.ledger.record(miss, "router")
        found = await page(session, exporter)
    assert found["probe_cached_tokens", (("model", "tiny"), ("target", "w"), ("temperature", "cold"))] == 0
    assert found["prefix_miss_cost_ratio_count", ()] == 1
    assert found["prefix_miss_cost_ratio_sum", ()] == pytest.approx(2, rel=0.01)
    assert (
        found["cold_prefill_baseline_seconds", (("length", "512-2048"), ("model", baseline["model"]))]
        == baseline["seconds"]
    )
    assert baseline["samples"] >= 1


async def test_without_the_section_no_spans_are_taken(engine: EngineHandle, tmp_path: Path) -> None:
    file = config_file(tmp_path, engine, {})
    async with (
        aiohttp.ClientSession() as session,
        running(load_config(file, {}).exporter_config([])) as exporter,
        session.post(f"{exporter.url}/v1/traces", json={}) as answer,
    ):
        assert answer.status == 404


async def test_both_need_a_restart_to_change(engine: EngineHandle, tmp_path: Path) -> None:
    config = load_config(config_file(tmp_path, engine, {}), {}).exporter_config([])
    other = load_config(config_file(tmp_path, engine, {"otlp": {}}), {}).exporter_config([])
    async with running(config) as exporter:
        with pytest.raises(ExporterError, match="otlp can't change while running"):
            await exporter.reconfigure(other)


def test_a_mistake_in_the_file_is_said_with_its_line(engine: EngineHandle, tmp_path: Path) -> None:
    file = tmp_path / "prefixwatch.yaml"
    file.write_text("exporter:\n  probes:\n    targets: [{name: w, url: 'host:8000'}]\n")
    with pytest.raises(Exception, match=r"prefixwatch.yaml:3: .*'host:8000' is not an http"):
        load_config(file, {})
