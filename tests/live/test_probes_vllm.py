"""Probes of a real vLLM engine, and the spans that it writes itself."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from prefixwatch.engines import fleet
from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.engines.process import free_port
from prefixwatch.exporters.http.credentials import Credentials
from prefixwatch.exporters.probes.config import ProbeConfig
from prefixwatch.exporters.probes.prober import Prober
from prefixwatch.exporters.spans.config import OtlpConfig
from prefixwatch.exporters.spans.receiver import OtlpReceiver
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.kvcache.request_record import RequestRecord
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.policies import make_policy
from prefixwatch.router.serving.create import create_app
from tests.live.conftest import MakePrompt

pytestmark = pytest.mark.vllm

BLOCK = 32


class Ledger:
    """Keeps the records. Spans of earlier tests may still come: what is waited for is told by its prompt's length."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.grown = asyncio.Event()

    def record(self, record: RequestRecord, source: str) -> None:
        self.records.append(record)
        self.grown.set()

    async def with_prompt(self, tokens: int, count: int) -> list[RequestRecord]:
        """As many records of prompts of this length, once they are there."""
        async with asyncio.timeout(60):
            while len(found := [record for record in self.records if record.prompt_tokens == tokens]) < count:
                self.grown.clear()
                await self.grown.wait()
        return found


@pytest.fixture(scope="module")
def traces_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def traced_engine(
    traces_port: int, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineHandle]:
    """An engine that sends its spans over HTTP to a port where a receiver may listen."""
    traces = ("--otlp-traces-endpoint", f"http://127.0.0.1:{traces_port}/v1/traces")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        logs = tmp_path_factory.mktemp("traced-vllm")
        (handle,) = asyncio.run(fleet.start_vllm(1, model_dir, logs, extra_arguments=traces))
    yield handle
    asyncio.run(fleet.stop([handle]))


@asynccontextmanager
async def listening(app: web.Application, port: int = 0) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def receiving(port: int, settle_seconds: float = 3.0) -> AsyncIterator[Ledger]:
    ledger = Ledger()
    receiver = OtlpReceiver(OtlpConfig(settle_seconds=settle_seconds), ledger.record)
    app = web.Application()
    app.add_routes(receiver.routes())
    async with listening(app, port):
        receiver.start()
        yield ledger
        await receiver.stop()


@asynccontextmanager
async def probing(engine: EngineHandle, **config: Any) -> AsyncIterator[tuple[Prober, Ledger]]:
    ledger = Ledger()
    document = {"targets": [{"name": "w", "url": engine.url}], **config}
    prober = Prober(ProbeConfig.model_validate(document), ledger.record, lambda _: None, Credentials())
    yield prober, ledger
    await prober.stop()


async def test_a_probe_misses_and_its_repeat_hits_all_full_blocks(traced_engine: EngineHandle) -> None:
    async with probing(traced_engine, prompt_tokens=[400, 1600]) as (prober, ledger):
        state = prober.targets["w"]
        for _ in range(6):
            await prober.round(state)
    cold, repeats = ledger.records[::2], ledger.records[1::2]
    assert [record.outcome for record in ledger.records] == ["completed"] * 12
    for first, again in zip(cold, repeats, strict=True):
        assert first.prompt_tokens == again.prompt_tokens
        assert first.prompt_tokens is not None
        assert first.cached_tokens == 0
        assert again.cached_tokens == (first.prompt_tokens - 1) // BLOCK * BLOCK
    times = [[record.ttft_seconds or 0.0 for record in records] for records in (cold, repeats)]
    assert statistics.median(times[0]) > statistics.median(times[1])
    flags = state.findings.flags()
    assert (flags["caching_off"], flags["cached_tokens_unreported"], flags["cold_prompt_hit"]) == (False, False, False)
    line = prober.baselines.line()
    assert line is not None
    assert line.slope_seconds_per_token > 0


@pytest.mark.parametrize(("salted", "result"), [(True, "miss"), (False, "hit")])
async def test_the_canary_sees_whether_tenants_are_kept_apart(
    traced_engine: EngineHandle, salted: bool, result: str
) -> None:
    identities = {name: {"salted": salted, "http_headers": {"x-tenant-id": name}} for name in ("first", "second")}
    async with probing(traced_engine, prompt_tokens=[400], isolation={"every_rounds": 1, **identities}) as (prober, _):
        state = prober.targets["w"]
        await prober.round(state)
    assert +state.canaries == {result: 1}


async def test_vllms_own_span_is_a_request_of_unknown_cache_class(
    traced_engine: EngineHandle, traces_port: int, session: aiohttp.ClientSession, make_prompt: MakePrompt
) -> None:
    """Its span has times and prompt tokens, and nothing of the cache: unknown is not a miss."""
    body = {"model": traced_engine.model, "prompt": make_prompt(300), "max_tokens": 5, "ignore_eos": True}
    async with receiving(traces_port, settle_seconds=1.0) as ledger:
        async with session.post(f"{traced_engine.url}/v1/completions", json=body) as answer:
            assert answer.status == 200
        (record,) = await ledger.with_prompt(300, count=1)
    assert (record.outcome, record.cached_tokens, record.output_tokens) == ("completed", None, 5)
    assert record.ttft_seconds is not None
    assert record.e2e_seconds is not None
    assert 0 < record.ttft_seconds < record.e2e_seconds


async def test_router_and_vllm_write_one_request_together(
    traced_engine: EngineHandle,
    traces_port: int,
    session: aiohttp.ClientSession,
    make_prompt: MakePrompt,
    tokenizer: Tokenizer,
) -> None:
    """Both spans carry one trace: times of the router's, prompt tokens of both, cached tokens only the router's."""
    config = RouterConfig.model_validate(
        {
            "workers": [{"name": "w", "url": traced_engine.url}],
            "otlp_endpoint": f"http://127.0.0.1:{traces_port}",
        }
    )
    body = {
        "model": traced_engine.model,
        "prompt": make_prompt(320),
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with receiving(traces_port, settle_seconds=12.0) as ledger:
        async with listening(create_app(config, policy=make_policy("round_robin"), tokenizer=tokenizer)) as url:
            for _ in range(2):
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    await answer.read()
        records = await ledger.with_prompt(320, count=2)
    assert [(record.worker, record.policy) for record in records] == [("w", "round_robin")] * 2
    assert sorted(record.cached_tokens or 0 for record in records) == [0, 288]
