"""The records of finished requests, as the exporter reads them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from prefixwatch.kvcache.request_record import Pseudonyms, RequestPage, RequestRecord
from prefixwatch.router.records.cold_start import served_nothing
from prefixwatch.router.records.recorder import trace_id_of
from prefixwatch.router.records.request_log import RequestLog
from tests.router.conftest import Client, Start
from tests.router.fake_engine import (
    DONE,
    ROLE,
    FakeEngine,
    Out,
    answer_ok,
    delta,
    never_answer,
    read_for_ever,
    reset_at_once,
    until,
    usage,
)  # fmt: skip

TEXT = "x" * 64
AUDITED = {"policy": "round_robin", "always_predict": True, "isolation": {"caches_at_start": "empty"}}


def numbered(outcome: int) -> RequestRecord:
    return RequestRecord(float(outcome), "completed")


def test_a_page_begins_after_the_last_number_that_the_reader_has() -> None:
    log = RequestLog(3)
    for number in range(1, 6):
        log.add(numbered(number))
    assert [(p.first, [r.ended_unix_seconds for r in p.records]) for p in map(log.page, (0, 3, 5, 99))] == [
        (3, [3.0, 4.0, 5.0]),  # 1 and 2 were overwritten: the reader sees that by `first`
        (4, [4.0, 5.0]),
        (6, []),
        (6, []),
    ]
    assert log.page(0, limit=2).records == [numbered(3), numbered(4)]


def test_pseudonyms_are_keyed_and_known_tenants_keep_their_names() -> None:
    one, other = Pseudonyms(), Pseudonyms()
    assert one.session("user-1") == one.session("user-1") != other.session("user-1")
    assert Pseudonyms("a shared secret!").session("u") == Pseudonyms("a shared secret!").session("u")
    assert (one.session(""), one.tenant("", {"acme"}), one.tenant("acme", {"acme"})) == ("", "", "acme")
    hidden = one.tenant("bob@example.org", {"acme"})
    assert (hidden[0], len(hidden)) == ("#", 9)


@pytest.mark.parametrize(
    ("header", "trace_id"),
    [
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "4bf92f3577b34da6a3ce929d0e0e4736"),
        ("00-00000000000000000000000000000000-00f067aa0ba902b7-01", ""),
        ("nonsense", ""),
    ],
)
def test_the_trace_id_of_a_traceparent(header: str, trace_id: str) -> None:
    assert trace_id_of(header) == trace_id


@pytest.mark.parametrize(
    ("metrics", "cold"),
    [
        (b'vllm:prompt_tokens_total{engine="0"} 0.0\nvllm:prompt_tokens_total{engine="1"} 0.0\n', True),
        (b'vllm:prompt_tokens_total{engine="0"} 0.0\nvllm:prompt_tokens_total{engine="1"} 9.0\n', False),
        (b"up 1\n", False),
    ],
)
def test_an_engine_is_cold_when_it_says_that_it_computed_nothing(metrics: bytes, cold: bool) -> None:
    assert served_nothing(metrics) is cold


async def page(client: Client, after: int = 0) -> RequestPage:
    async with client.session.get(f"{client.url}/router/requests", params={"after": after}) as answer:
        assert answer.status == 200
        return msgspec.json.decode(await answer.read(), type=RequestPage)


async def last_record(client: Client) -> RequestRecord:
    return (await page(client)).records[-1]


def answering(cached: int | None, prompt: int = 81, output: int = 3) -> Any:
    async def answer(out: Out) -> None:
        await out.stream(ROLE, delta("a"), delta("b"), delta("c"), usage(prompt, cached, output), DONE)

    return answer


async def test_a_completed_request_is_recorded_with_what_the_engine_said(
    start: Start, engines: list[FakeEngine]
) -> None:
    client = await start(engines[:1], tenants={"names": ["acme"]}, **AUDITED)
    engines[0].behaviour = answering(cached=0)
    headers = {
        "x-tenant-id": "acme", "x-session-id": "s", "x-request-class": "chat",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    }  # fmt: skip
    for _ in range(2):
        async with client.chat(TEXT, headers=headers) as answer:
            await answer.read()
    first, second = (await page(client)).records
    assert (second.outcome, second.worker, second.tenant, second.request_class) == ("completed", "a", "acme", "chat")
    assert (second.prompt_tokens, second.cached_tokens, second.output_tokens, second.salted) == (81, 0, 3, False)
    assert (first.own_tokens, second.own_tokens, second.block_size) == (0, 80, 16)
    assert (first.held_tokens, first.held_by, second.held_tokens, second.held_by) == (0, "", 80, "a")
    assert second.trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert second.session == first.session != "s"
    assert second.ttft_seconds is not None
    assert second.e2e_seconds is not None
    assert second.tpot_seconds is not None
    assert second.ttft_seconds + 2 * second.tpot_seconds <= second.e2e_seconds


async def test_time_to_first_token_is_of_the_first_content(start: Start, engines: list[FakeEngine]) -> None:
    """vllm-project/aibrix#2477 (RT38): not of the last chunk."""
    go_on = asyncio.Event()

    async def slow(out: Out) -> None:
        await out.head()
        await out.chunk(ROLE)
        await out.chunk(delta("a"))
        await go_on.wait()
        for event in (delta("b"), usage(10, 0, 2), DONE):
            await out.chunk(event)
        await out.end()

    engines[0].behaviour = slow
    client = await start(engines[:1])
    async with client.chat() as answer:
        await answer.content.readuntil(b'"a"')
        await asyncio.sleep(0.1)
        go_on.set()
        await answer.read()
    record = await last_record(client)
    assert record.ttft_seconds is not None
    assert record.e2e_seconds is not None
    assert record.tpot_seconds is not None
    assert record.e2e_seconds - record.ttft_seconds >= 0.1
    assert record.tpot_seconds >= 0.1


async def test_an_answer_that_was_not_streamed_has_no_time_to_first_token(
    start: Start, engines: list[FakeEngine]
) -> None:
    """kubernetes-sigs/inference-perf#150 (LT27)."""

    async def whole(out: Out) -> None:
        await out.json(
            {"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 5, "completion_tokens": 9}}
        )

    engines[0].behaviour = whole
    client = await start(engines[:1])
    async with client.chat(stream=False) as answer:
        await answer.read()
    record = await last_record(client)
    assert (record.outcome, record.ttft_seconds, record.tpot_seconds, record.output_tokens) == (
        "completed", None, None, 9,
    )  # fmt: skip
    assert record.e2e_seconds is not None


async def test_refusals_and_failures_are_recorded_too(start: Start, engines: list[FakeEngine]) -> None:
    """An independent A/B of a KV-aware router under saturation (SL20): what was refused must not drop out of sight."""

    async def refuse(out: Out) -> None:
        await out.json({"error": {"message": "full", "code": 429}}, status=429)

    async def wrong(out: Out) -> None:
        await out.json({"error": {"message": "no such model"}}, status=404)

    client = await start(engines[:1], timeouts={"first_byte_seconds": 0.4})
    engines[0].script = [refuse, wrong, never_answer, answer_ok]
    for _ in range(4):
        async with client.chat() as answer:
            await answer.read()
    engines[0].script = [never_answer]
    reader = asyncio.ensure_future(read_for_ever(client))
    await until(lambda: any(client.in_flight().values()))
    reader.cancel()
    await client.settled()
    async with client.session.post(f"{client.url}/v1/chat/completions", data=b"no json") as answer:
        assert answer.status == 400
    engines[0].script = [reset_at_once]
    engines[0].health = 503
    async with client.chat() as answer:
        assert answer.status == 502
    outcomes = [record.outcome for record in (await page(client)).records]
    assert outcomes == ["refused", "rejected", "timed_out", "completed", "disconnected", "rejected", "failed"]


async def test_made_up_models_and_tenants_make_no_new_names(start: Start, engines: list[FakeEngine]) -> None:
    """ai-dynamo/dynamo#9836 (EM33): the record is bounded in length; labels are the exporter's to bound."""
    client = await start(engines[:1])
    headers = {"x-tenant-id": "t" * 4000, "x-request-class": "c" * 4000}
    async with client.chat(model="m" * 4000, headers=headers) as answer:
        await answer.read()
    record = await last_record(client)
    assert (len(record.model), len(record.request_class), len(record.tenant)) == (128, 64, 9)


async def test_a_header_that_is_no_text_spoils_no_page(start: Start, engines: list[FakeEngine]) -> None:
    client = await start(engines[:1])
    reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
    body = b'{"model": "\\ud800", "messages": []}'
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Request-Class: \xff\xfe\r\nX-Tenant-Id: \xff\r\n")
    writer.write(b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    await reader.read()
    writer.close()
    assert (await last_record(client)).request_class == "??"


async def test_what_engines_served_before_the_router_began_is_no_proof(start: Start, engines: list[FakeEngine]) -> None:
    client = await start(engines[:1], always_predict=True)  # asks the engine, which has no metrics
    engines[0].script = [answering(cached=80), answering(cached=80)]
    for _ in range(2):
        async with client.chat(TEXT) as answer:
            await answer.read()
    first, second = (await page(client)).records
    assert first.own_tokens is None
    assert second.own_tokens == 80  # sent before, whatever else is in that cache


async def test_a_turn_that_finds_the_last_answer_cached_owns_it(start: Start, engines: list[FakeEngine]) -> None:
    """Engines cache what they generate, so the next turn reuses more than was ever sent, and nobody else's."""
    client = await start(engines[:1], **AUDITED)
    engines[0].script = [answering(cached=0, prompt=64, output=32), answering(cached=80, prompt=100)]
    for prompt in (TEXT, TEXT + "y" * 36):
        body = {"model": "tiny", "stream": True, "prompt": prompt}
        async with client.session.post(f"{client.url}/v1/completions", json=body) as answer:
            await answer.read()
    record = await last_record(client)
    assert (record.cached_tokens, record.own_tokens) == (80, 96)


async def test_a_prompt_that_the_engine_counts_otherwise_leaves_the_tenants_own_unknown(
    start: Start, engines: list[FakeEngine]
) -> None:
    """Another template or a token in front: what the engine cached aren't the blocks that the router knows."""
    client = await start(engines[:1], **AUDITED)
    engines[0].script = [answering(cached=0, prompt=83), answering(cached=48, prompt=82)]
    for _ in range(2):
        async with client.chat(TEXT + "!") as answer:
            await answer.read()
    engines[0].script = [answering(cached=48, prompt=67)]
    async with client.chat("other" * 10) as answer:
        await answer.read()
    assert [record.own_tokens for record in (await page(client)).records] == [None, 80, None]


async def test_a_batch_of_prompts_leaves_the_tenants_own_unknown(start: Start, engines: list[FakeEngine]) -> None:
    client = await start(engines[:1], **AUDITED)
    engines[0].behaviour = answering(cached=32, prompt=64)
    for prompt in (["y" * 64, TEXT], TEXT):
        body = {"model": "tiny", "stream": True, "prompt": prompt}
        async with client.session.post(f"{client.url}/v1/completions", json=body) as answer:
            await answer.read()
    assert (await last_record(client)).own_tokens is None


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "9" * 40])
async def test_a_wrong_after_is_refused_with_the_remedy(start: Start, engines: list[FakeEngine], after: str) -> None:
    client = await start(engines[:1])
    async with client.session.get(f"{client.url}/router/requests", params={"after": after}) as answer:
        assert answer.status == 400
        assert "give the last one that you have, or 0" in (await answer.json())["error"]["message"]


async def test_reuse_across_tenants_has_a_cause_and_the_requests_that_show_it(
    start: Start, engines: list[FakeEngine]
) -> None:
    client = await start(engines[:1], **AUDITED)
    engines[0].script = [answering(cached=0), answering(cached=80)]
    for request, tenant in (("r1", "acme"), ("r2", "bolt")):
        headers = {"x-tenant-id": tenant, "X-Request-Id": request}
        body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": TEXT}]}
        async with client.session.post(f"{client.url}/v1/chat/completions", json=body, headers=headers) as answer:
            await answer.read()
    first, second = (await page(client)).records
    assert (first.finding, first.finding_requests) == ("", ())
    assert (second.finding, second.finding_requests) == ("tenant_without_salt", ("r2", "r1"))
    assert second.finding_tenant == first.tenant


async def test_a_worker_drains_by_request_of_an_administrator(start: Start, engines: list[FakeEngine]) -> None:
    client = await start(engines[:2], admin_token="a-long-enough-token")
    [name, other] = [worker["name"] for worker in (await admin_health(client))["workers"]]
    address = f"{client.url}/router/workers/{name}/drain"
    async with client.session.post(address) as refused:
        assert refused.status == 401
    async with client.session.post(address, headers=ADMIN) as answer:
        assert await answer.json() == {"name": name, "draining": True, "in_flight": 0}
    for _ in range(4):
        async with await client.chat() as response:
            assert response.headers["x-prefixwatch-worker"] == other
    async with client.session.get(address, headers=ADMIN) as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "POST, DELETE")
    assert (await admin_health(client))["workers"][0]["draining"] is True, "whoever looks changes nothing"
    async with client.session.delete(address, headers=ADMIN) as answer:
        assert (await answer.json())["draining"] is False
    async with client.session.post(f"{client.url}/router/workers/nobody/drain", headers=ADMIN) as answer:
        assert answer.status == 404


ADMIN = {"Authorization": "Bearer a-long-enough-token"}


async def admin_health(client: Client) -> Any:
    async with client.session.get(f"{client.url}/health", headers=ADMIN) as answer:
        return await answer.json()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/generate"])
async def test_answers_of_other_formats_have_their_token_counts_in_the_record(
    start: Start, engines: list[FakeEngine], path: str
) -> None:
    async def answer(out: Out) -> None:
        await out.json(
            {"usage": {"input_tokens": 80, "input_tokens_details": {"cached_tokens": 64}, "output_tokens": 5}}
        )

    engines[0].behaviour = answer
    client = await start(engines[:1])
    async with client.session.post(f"{client.url}{path}", json={"model": "tiny"}) as answered:
        await answered.read()
    record = await last_record(client)
    assert (record.outcome, record.prompt_tokens, record.cached_tokens, record.output_tokens) == (
        "completed",
        80,
        64,
        5,
    )
