"""The prober against the real simulated engine, and against endpoints that misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from engines import fleet
from engines.tiny_model import make_tiny_model
from exporters.http.client import Credentials
from exporters.probes.config import ProbeConfig
from exporters.probes.prober import TENANT, Prober
from kvcache.request_record import RequestRecord
from router.app import create_app
from router.config import RouterConfig
from router.policies import make_policy

BLOCK = 16
STEP_SECONDS, TOKEN_SECONDS = 0.005, 0.0002
"""A cold prompt of 500 tokens takes the engine 105 ms, its repeat some 8 ms."""


class Ledger:
    """Keeps the records."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.second = asyncio.Event()

    def record(self, record: RequestRecord, source: str) -> None:
        assert source == "probes"
        self.records.append(record)
        if len(self.records) == 2:
            self.second.set()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Probes:
    """A prober of one target with a clock of its own; rounds are run by hand."""

    def __init__(self, url: str, waiting: float | None = None, target: Any = None, **config: Any) -> None:
        targets = [{"name": "w", "url": url, **(target or {})}]
        self.ledger, self.clock, self.waiting = Ledger(), Clock(), waiting
        self.prober = Prober(
            ProbeConfig.model_validate({"prompt_tokens": [500], **config, "targets": targets}),
            self.ledger,
            lambda _: self.waiting,
            Credentials(),
            clock=self.clock,
        )
        self.state = self.prober.targets["w"]

    async def rounds(self, count: int) -> None:
        """As many rounds, a minute apart."""
        for _ in range(count):
            await self.prober.round(self.state)
            self.clock.now += 60

    def samples(self) -> dict[tuple[str, str], float]:
        """Samples of the metrics page by name and the labels' values, without buckets."""
        return {
            (sample.name.removeprefix("prefixwatch_"), "/".join(sample.labels.values())): sample.value
            for family in self.prober.metrics(0)
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }


MakeProbes = Callable[..., Probes]


@pytest.fixture
async def probes() -> AsyncIterator[MakeProbes]:
    made: list[Probes] = []

    def make(url: str, **config: Any) -> Probes:
        made.append(Probes(url, **config))
        return made[-1]

    yield make
    for each in made:
        await each.prober.stop()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a simulated engine, a process of its own."""
    folder = tmp_path_factory.mktemp("probed")
    model_dir = make_tiny_model(folder / "model")
    step_time = {"base_s": STEP_SECONDS, "per_prefill_token_s": TOKEN_SECONDS}
    options: dict[str, Any] = {"step_time": step_time, "max_num_batched_tokens": 8192, "block_size": BLOCK}
    (handle,) = asyncio.run(fleet.start_simulated(1, model_dir, folder, **options))
    yield handle.url
    asyncio.run(fleet.stop([handle]))


def full_blocks(prompt_tokens: int) -> int:
    """What an engine can reuse of a prompt that it has seen: whole blocks, and the last token is always computed."""
    return (prompt_tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_a_cold_prompt_misses_and_its_repeat_hits(engine: str, probes: MakeProbes, api: str) -> None:
    probed = probes(engine, target={"api": api})
    await probed.rounds(1)
    cold, repeat = probed.ledger.records
    assert cold.prompt_tokens is not None
    assert 450 < cold.prompt_tokens < 1200
    assert repeat.prompt_tokens == cold.prompt_tokens
    template = BLOCK if api == "chat" else 0  # a chat template's opening may fill a block
    assert cold.cached_tokens is not None
    assert cold.cached_tokens <= template
    assert repeat.cached_tokens == full_blocks(cold.prompt_tokens)
    assert cold.ttft_seconds is not None
    assert repeat.ttft_seconds is not None
    assert cold.ttft_seconds > STEP_SECONDS + TOKEN_SECONDS * (cold.prompt_tokens - template)
    assert repeat.ttft_seconds < cold.ttft_seconds
    assert (cold.outcome, cold.worker, cold.model, cold.tenant, cold.request_class) == (
        "completed", "w", "tiny", TENANT, "probe",
    )  # fmt: skip


async def test_the_page(engine: str, probes: MakeProbes) -> None:
    probed = probes(engine)
    await probed.rounds(3)
    samples = probed.samples()
    prompt_tokens = samples["probe_prompt_tokens", "w"]
    assert samples["probe_requests_total", "w/completed"] == 6
    assert samples["probe_cached_tokens", "w/cold"] == 0
    assert samples["probe_cached_tokens", "w/repeat"] == full_blocks(int(prompt_tokens))
    assert samples["probe_ttft_seconds_count", "w/cold"] == samples["probe_ttft_seconds_count", "w/repeat"] == 3
    assert samples["probe_ttft_seconds_sum", "w/cold"] > samples["probe_ttft_seconds_sum", "w/repeat"]
    findings = ("caching_off", "cached_tokens_unreported", "repeat_not_faster", "cold_prompt_hit")
    assert [samples["probe_finding", f"w/{finding}"] for finding in findings] == [0, 0, 0, 0]
    assert ("probe_finding", "w/cross_tenant_hit") not in samples


async def test_the_baseline_is_the_engines_step_time(engine: str, probes: MakeProbes) -> None:
    """Three lengths in turn; each estimate lies above what the model says, by no more than a busy machine adds."""
    probed = probes(engine, prompt_tokens=[200, 800, 2400])
    await probed.rounds(9)
    estimates = probed.prober.baseline.estimates()
    assert list(estimates) == ["0-512", "512-2048", "2048-8192"]
    for estimate in estimates.values():
        expected = STEP_SECONDS + TOKEN_SECONDS * estimate.tokens
        assert expected <= estimate.seconds < 1.3 * expected + 0.05
    line = probed.prober.baseline.line()
    assert line is not None
    assert line.slope_seconds_per_token == pytest.approx(TOKEN_SECONDS, rel=0.3)
    page = probed.samples()
    assert page["cold_prefill_baseline_seconds", "2048-8192"] == estimates["2048-8192"].seconds


async def test_salts_keep_the_canary_apart(engine: str, probes: MakeProbes) -> None:
    probed = probes(engine, isolation={"every_rounds": 1})
    await probed.rounds(1)
    assert probed.samples()["probe_finding", "w/cross_tenant_hit"] == 0
    assert probed.samples()["probe_canaries_total", "w/miss"] == 1
    assert probed.samples()["probe_canaries_total", "w/hit"] == 0


async def test_without_salts_the_canary_hits(engine: str, probes: MakeProbes) -> None:
    """Two tenants by header only, and nothing in front of the engine that salts: a certain cross-tenant reuse."""
    senders = {
        "first": {"salted": False, "http_headers": {"x-tenant-id": "a"}},
        "second": {"salted": False, "http_headers": {"x-tenant-id": "b"}},
    }
    probed = probes(engine, isolation={"every_rounds": 1, **senders})
    await probed.rounds(1)
    assert probed.samples()["probe_finding", "w/cross_tenant_hit"] == 1
    assert probed.samples()["probe_canaries_total", "w/hit"] == 1


@pytest.mark.parametrize(("salts", "result"), [({"a": "salt of a", "b": "salt of b"}, "miss"), ({}, "hit")])
async def test_through_a_router_the_canary_sees_whether_it_salts(
    engine: str, probes: MakeProbes, salts: dict[str, str], result: str
) -> None:
    """Neither sender salts, both are the router's tenants by header: whether they are apart is the router's doing."""
    senders = {
        "first": {"salted": False, "http_headers": {"x-tenant-id": "a"}},
        "second": {"salted": False, "http_headers": {"x-tenant-id": "b"}},
    }
    config = RouterConfig.model_validate({"workers": [{"name": "e", "url": engine}], "tenants": {"salts": salts}})
    runner = web.AppRunner(create_app(config, policy=make_policy("round_robin"), tokenizer=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    probed = probes(url, target={"api": "chat", "model": "tiny"}, isolation={"every_rounds": 1, **senders})
    await probed.rounds(1)
    await runner.cleanup()
    assert +probed.state.canaries == {result: 1}


async def test_no_probe_while_requests_wait(engine: str, probes: MakeProbes) -> None:
    probed = probes(engine, waiting=1.0)
    await probed.rounds(1)
    assert probed.ledger.records == []
    assert probed.samples() == {("probe_requests_total", "w/skipped"): 1}
    assert probed.state.paused == "1 requests are waiting, more than max_waiting_requests 0"
    probed.waiting = 0.0
    await probed.rounds(1)
    assert len(probed.ledger.records) == 2
    assert probed.state.paused == ""


async def test_no_probe_beyond_the_budget(engine: str, probes: MakeProbes) -> None:
    probed = probes(engine, target_tokens_per_minute=3000)
    for _ in range(4):
        await probed.prober.round(probed.state)
    spent = sum((record.prompt_tokens or 0) + (record.output_tokens or 0) for record in probed.ledger.records)
    assert 0 < spent <= 3000
    assert "target_tokens_per_minute is spent" in probed.state.paused
    probed.clock.now += 60
    sent = len(probed.ledger.records)
    await probed.rounds(1)
    assert len(probed.ledger.records) == sent + 2


async def test_a_prompt_that_is_too_long_is_left_out(engine: str, probes: MakeProbes) -> None:
    """The engine takes 8,192 tokens at most; lengths are estimates from the words of the first prompt."""
    probed = probes(engine, prompt_tokens=[200, 16_000], target_tokens_per_minute=40_000)
    await probed.rounds(2)
    assert probed.state.plan.lengths == [200]
    assert probed.samples()["probe_requests_total", "w/rejected"] == 1
    assert "HTTP 400" in probed.state.problem


async def test_it_runs_by_itself(engine: str, probes: MakeProbes) -> None:
    probed = probes(engine, interval_seconds=1)
    probed.clock.now = 60
    probed.prober.start()
    async with asyncio.timeout(20):
        await probed.ledger.second.wait()
    await probed.prober.stop()
    assert probed.state.rounds == 1


Endpoint = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Endpoint], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts an endpoint that answers completions as it likes."""
    runners: list[web.AppRunner] = []

    async def start(answer: Endpoint) -> str:
        async def models(_: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "m"}]})

        app = web.Application()
        app.add_routes([web.post("/v1/completions", answer), web.get("/v1/models", models)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


def streaming(*events: object) -> Endpoint:
    """An endpoint that sends these events, and the end of the stream where there is a `None`."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            data = "[DONE]" if event is None else event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())
        return response

    return answer


TEXT = {"choices": [{"text": "a"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 500, "completion_tokens": 1}}


async def hangs(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError


async def breaks(_: web.Request) -> web.Response:
    return web.Response(status=500, text="out of memory")


async def overloaded(_: web.Request) -> web.Response:
    return web.Response(status=429)


async def cuts(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
    assert request.transport is not None
    request.transport.abort()
    return response


@pytest.mark.parametrize(
    ("endpoint", "outcome", "said"),
    [
        (hangs, "timed_out", "no complete answer within 0.2 s"),
        (breaks, "failed", "HTTP 500: out of memory"),
        (overloaded, "refused", "HTTP 429"),
        (cuts, "failed", "Client"),
        (streaming(TEXT), "failed", "the stream was cut off"),
        (streaming(TEXT, {"error": {"message": "engine died"}}, None), "failed", "engine died"),
        (streaming("{not json"), "failed", "DecodeError"),
        (streaming(TEXT, {"usage": {"prompt_tokens": -5}}, None), "failed", "ValidationError"),
        (streaming("x" * 4_000_000), "failed", "LineTooLong"),
    ],
    ids=["hang", "500", "429", "reset", "no end", "error event", "no json", "negative count", "endless line"],
)
async def test_an_endpoint_at_fault(
    serve: Serve, probes: MakeProbes, endpoint: Endpoint, outcome: str, said: str
) -> None:
    probed = probes(await serve(endpoint), timeout_seconds=0.2)
    await probed.rounds(1)
    (record,) = probed.ledger.records
    assert (record.outcome, record.ttft_seconds, record.cached_tokens) == (outcome, None, None)
    assert probed.samples() == {("probe_requests_total", f"w/{outcome}"): 1}
    assert said in probed.state.problem


async def test_nobody_listens(probes: MakeProbes) -> None:
    probed = probes("http://127.0.0.1:1")
    await probed.rounds(2)
    assert probed.samples() == {("probe_requests_total", "w/failed"): 2}
    assert "/v1/models lists no model" in probed.state.problem
    assert probed.ledger.records == []


async def test_a_fault_of_ours_ends_no_targets_probes(
    serve: Serve, probes: MakeProbes, caplog: pytest.LogCaptureFixture
) -> None:
    probed = probes(await serve(streaming(TEXT, USAGE, None)), interval_seconds=0.01)
    failed = asyncio.Event()

    def broken(_: str) -> float:
        failed.set()
        raise RuntimeError("ours")

    working, probed.prober._waiting = probed.prober._waiting, broken
    probed.clock.now = 60
    probed.prober.start()
    async with asyncio.timeout(10):
        await failed.wait()
        probed.prober._waiting = working
        probed.clock.now += 60
        await probed.ledger.second.wait()
    assert "ended by a fault of the exporter" in caplog.text


async def test_an_endpoint_that_tells_no_usage_still_gives_times(serve: Serve, probes: MakeProbes) -> None:
    probed = probes(await serve(streaming(TEXT, None)))
    await probed.rounds(3)
    samples = probed.samples()
    assert samples["probe_ttft_seconds_count", "w/cold"] == 3
    assert samples["probe_finding", "w/cached_tokens_unreported"] == 1
    assert ("probe_finding", "w/caching_off") not in samples
    assert ("probe_cached_tokens", "w/repeat") not in samples
    assert ("probe_prompt_tokens", "w") not in samples
    assert probed.prober.baseline.estimates() == {}


async def test_an_endpoint_that_caches_nothing(serve: Serve, probes: MakeProbes) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 500, "prompt_tokens_details": {"cached_tokens": 0}}}
    probed = probes(await serve(streaming(TEXT, usage, None)), isolation={"every_rounds": 1})
    await probed.rounds(3)
    assert probed.samples()["probe_finding", "w/caching_off"] == 1
    assert ("probe_finding", "w/cross_tenant_hit") not in probed.samples()


async def test_an_endpoint_that_doesnt_stream_has_no_first_token(serve: Serve, probes: MakeProbes) -> None:
    async def whole(_: web.Request) -> web.Response:
        usage = {"prompt_tokens": 500, "prompt_tokens_details": {"cached_tokens": 480}}
        return web.json_response({"choices": [{"text": "a", "finish_reason": "stop"}], "usage": usage})

    probed = probes(await serve(whole))
    await probed.rounds(1)
    assert probed.samples()["probe_cached_tokens", "w/repeat"] == 480
    assert [record.ttft_seconds for record in probed.ledger.records] == [None, None]


async def test_secrets_are_sent_and_never_shown(serve: Serve, probes: MakeProbes) -> None:
    seen: list[str | None] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        return await streaming(TEXT, USAGE, None)(request)

    target = {"authorization": {"credentials": "hunter2"}}
    probed = probes(await serve(answer), target=target)
    await probed.rounds(1)
    assert seen == ["Bearer hunter2"] * 2
    assert "hunter2" not in json.dumps(probed.prober.document(0)) + repr(probed.state)


async def test_a_secrets_file_that_is_gone_is_said_and_tried_again(
    serve: Serve, probes: MakeProbes, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    target = {"authorization": {"credentials_file": str(file)}}
    probed = probes(await serve(streaming(TEXT, USAGE, None)), target=target)
    await probed.rounds(1)
    assert str(file) in probed.state.problem
    file.write_text("hunter2")
    await probed.rounds(1)
    assert probed.state.problem == ""


def test_the_document_says_what_is_missing_and_why() -> None:
    document = Probes("http://127.0.0.1:1").prober.document(0)
    assert document["absent"] == {"cold_prefill_baseline": "no cold probe was answered yet"}
    assert document["targets"]["w"]["prompt_lengths"] == [500]
