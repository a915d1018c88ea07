"""The prober against endpoints that misbehave, tell little, or don't stream."""

from __future__ import annotations

import asyncio
import json
import textwrap
from pathlib import Path

import pytest
from aiohttp import web

from tests.exporters.probing import TEXT, USAGE, Endpoint, MakeProbes, Probes, Serve, streaming


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
        (breaks, "failed", "HTTP 500: out of memory"),
        (overloaded, "refused", "HTTP 429"),
        (cuts, "failed", "Client"),
        (streaming(TEXT), "failed", "the stream was cut off"),
        (streaming(TEXT, {"error": {"message": "engine died"}}, None), "failed", "engine died"),
        (streaming("{not json"), "failed", "unreadable event"),
        (streaming("x" * 4_000_000), "failed", "more than 1048576 bytes"),
    ],
    ids=["500", "429", "reset", "no end", "error event", "no json", "endless line"],
)
async def test_an_endpoint_at_fault(
    serve: Serve, probes: MakeProbes, endpoint: Endpoint, outcome: str, said: str
) -> None:
    probed = probes(await serve(endpoint))
    await probed.rounds(1)
    (record,) = probed.ledger.records
    assert (record.outcome, record.ttft_seconds, record.cached_tokens) == (outcome, None, None)
    assert probed.samples() == {("probe_requests_total", f"w/{outcome}"): 1}
    assert said in probed.state.problem


async def test_an_endpoint_that_hangs_costs_no_more_than_the_timeout(serve: Serve, probes: MakeProbes) -> None:
    """The model is given: asking for it has the same timeout, which a busy machine may well need for that."""
    probed = probes(await serve(hangs), target={"model": "m"}, timeout_seconds=0.2)
    await probed.rounds(1)
    (record,) = probed.ledger.records
    assert (record.outcome, record.ttft_seconds, record.cached_tokens) == ("timed_out", None, None)
    assert probed.state.problem == "no complete answer within 0.2 s"


async def test_an_answer_in_pieces_is_read_to_its_end(probes: MakeProbes) -> None:
    """A list of models, or an answer that isn't streamed, may come in several packets."""

    def in_pieces(document: object) -> Endpoint:
        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)
            for piece in textwrap.wrap(json.dumps(document), 40, drop_whitespace=False):
                await response.write(piece.encode())
                await asyncio.sleep(0.005)
            return response

        return answer

    answer = in_pieces({"choices": [{"text": "a"}], "usage": USAGE["usage"]})
    models = in_pieces({"data": [{"id": "a-model-with-a-long-name"}, {"id": "another"}]})
    app = web.Application()
    app.add_routes([web.post("/v1/completions", answer), web.get("/v1/models", models)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    probed = probes(f"http://127.0.0.1:{runner.addresses[0][1]}")
    await probed.rounds(1)
    await runner.cleanup()
    assert [(r.outcome, r.model, r.prompt_tokens) for r in probed.ledger.records] == [
        ("completed", "a-model-with-a-long-name", 500)
    ] * 2


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
    async with asyncio.timeout(20):
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
    assert probed.prober.baselines.estimates() == {}


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
