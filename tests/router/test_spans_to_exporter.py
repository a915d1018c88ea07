"""The router's own spans, sent to the exporter's receiver, become the records of its requests."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from prefixwatch.exporters.spans.config import OtlpConfig
from prefixwatch.exporters.spans.receiver import OtlpReceiver
from prefixwatch.kvcache.request_record import RequestRecord
from tests.router.fake_engine import DONE, ROLE, FakeEngine, Out, delta, reset_at_once, usage

Start = Any  # a coroutine function, see conftest.start


class Ledger:
    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def record(self, record: RequestRecord, source: str) -> None:
        assert source == "spans"
        self.records.append(record)


async def received(start: Start, engines: list[FakeEngine], read_elsewhere: Any, *tenants: str) -> list[RequestRecord]:
    """One chat for each tenant through a router that sends its spans to a receiver."""
    ledger = Ledger()
    receiver = OtlpReceiver(OtlpConfig(), ledger.record, tenants=("alice",), read_elsewhere=read_elsewhere)
    app = web.Application()
    app.add_routes(receiver.routes())
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = await start(engines[:1], otlp_endpoint=f"http://127.0.0.1:{runner.addresses[0][1]}")
    for tenant in tenants:
        async with client.chat("some words", headers={"x-tenant-id": tenant}) as answer:
            await answer.read()
    await client.stop()  # flushes
    await receiver.stop()
    await runner.cleanup()
    return ledger.records


async def answers(out: Out) -> None:
    await out.stream(ROLE, delta("hello"), usage(prompt=40, cached=16, output=2), DONE)


async def test_a_request_comes_out_as_it_was(engines: list[FakeEngine], start: Start) -> None:
    engines[0].behaviour = answers
    first, second = await received(start, engines, (), "alice", "bob")
    assert (first.prompt_tokens, first.cached_tokens, first.output_tokens) == (40, 16, 2)
    assert (first.outcome, first.worker, first.model, first.policy) == ("completed", "a", "tiny", "round_robin")
    assert first.ttft_seconds is not None
    assert first.e2e_seconds is not None
    assert 0 < first.ttft_seconds <= first.e2e_seconds
    assert first.decision_seconds is not None
    assert first.tenant == "alice"
    assert second.tenant not in ("", "bob")
    assert len(first.trace_id) == 32


async def test_a_failed_request_is_a_failed_record(engines: list[FakeEngine], start: Start) -> None:
    engines[0].behaviour = reset_at_once
    (record,) = await received(start, engines, (), "alice")
    assert (record.outcome, record.cached_tokens, record.ttft_seconds) == ("failed", None, None)


class Everything:
    def __contains__(self, trace_id: object) -> bool:
        return True


async def test_with_the_routers_records_read_its_spans_are_not_counted_again(
    engines: list[FakeEngine], start: Start
) -> None:
    engines[0].behaviour = answers
    assert await received(start, engines, Everything(), "alice") == []
