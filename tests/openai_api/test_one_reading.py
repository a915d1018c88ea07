"""Every legal or broken answer has the same outcome for the router, the load generator and the prober."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from prefixwatch.exporters.probes.request import send_probe
from prefixwatch.loadgen.client.answer_reader import AnswerReader, Exchange
from tests.router.conftest import Start, engines, model_dir, start, tokenizer  # noqa: F401  # fixtures
from tests.router.fake_engine import FakeEngine, Out

STREAM, JSON = "text/event-stream", "application/json"
A = b'{"choices":[{"index":0,"delta":{"content":"A"}}]}'
USAGE = (
    b'{"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":16}}}'
)
NULL_CHOICES = USAGE.replace(b"[]", b"null")
DONE = b"[DONE]"
KNOWN = (40, 16, 2)
UNKNOWN = (None, None, None)


def lines(*events: bytes, end: bytes = b"\n", field: bytes = b"data: ") -> bytes:
    return b"".join(field + event + end * 2 for event in events)


def chat(**delta: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode()


def error(**fields: Any) -> bytes:
    return json.dumps({"error": fields}).encode()


def usage(prompt: bytes, cached: bytes = b"16", output: bytes = b"2") -> bytes:
    return (
        USAGE.replace(b"40", prompt)
        .replace(b"16", cached)
        .replace(b'"completion_tokens":2', b'"completion_tokens":' + output)
    )


ANSWERS: dict[str, tuple[str, bytes, str, tuple[int | None, ...]]] = {
    "LF": (STREAM, lines(A, USAGE, DONE), "completed", KNOWN),
    "CRLF": (STREAM, lines(A, USAGE, DONE, end=b"\r\n"), "completed", KNOWN),
    "CR": (STREAM, lines(A, USAGE, DONE, end=b"\r"), "completed", KNOWN),
    "no space": (STREAM, lines(A, USAGE, DONE, field=b"data:"), "completed", KNOWN),
    "byte order mark": (STREAM, b"\xef\xbb\xbf" + lines(A, USAGE, DONE), "completed", KNOWN),
    "charset": ("Text/Event-Stream; charset=utf-8", lines(A, USAGE, DONE), "completed", KNOWN),
    "lines of data": (STREAM, lines(A, USAGE.replace(b",", b",\ndata: "), DONE), "completed", KNOWN),
    "comments": (STREAM, b": ping\n\n" + lines(A) + b":\n" + lines(USAGE) + b"event: x\nid: 1\n" + lines(DONE),
                 "completed", KNOWN),
    "empty events": (STREAM, b"data:\n\n" + lines(A, USAGE) + b"data\n\n" + lines(DONE), "completed", KNOWN),
    "last blank line": (STREAM, lines(A, USAGE) + b"data: [DONE]", "completed", KNOWN),
    "null choices": (STREAM, lines(A, NULL_CHOICES, DONE), "completed", KNOWN),
    "usage first": (STREAM, lines(USAGE, A, DONE), "completed", KNOWN),
    "parts": (STREAM, lines(chat(content=[{"type": "text", "text": "A"}]), USAGE, DONE), "completed", KNOWN),
    "tool call": (STREAM, lines(chat(content=None, tool_calls=[{"index": 0}]), USAGE, DONE), "completed", KNOWN),
    "reasoning": (STREAM, lines(chat(reasoning_content="hm"), USAGE, DONE), "completed", KNOWN),
    "finished, no [DONE]": (STREAM, lines(A[:-3] + b',"finish_reason":"stop"}]}', USAGE), "completed", KNOWN),
    "no [DONE]": (STREAM, lines(A, USAGE), "failed", KNOWN),
    "cut event": (STREAM, lines(A) + b'data: {"choi', "failed", UNKNOWN),
    "not JSON": (STREAM, lines(A, b"{not json", USAGE, DONE), "failed", KNOWN),
    "bad UTF-8": (STREAM, lines(A.replace(b"A", b"\xff"), USAGE, DONE), "completed", KNOWN),
    "NaN": (STREAM, lines(A[:-1] + b',"logprob":NaN}', USAGE, DONE), "completed", KNOWN),
    "lone surrogate": (STREAM, lines(A.replace(b"A", b"\\ud800"), USAGE, DONE), "completed", KNOWN),
    "negative usage": (STREAM, lines(A, usage(b"-5"), DONE), "completed", (None, 16, 2)),
    "2^53 usage": (STREAM, lines(A, usage(b"40", cached=b"9007199254740993"), DONE), "completed", (40, None, 2)),
    "400 digits": (STREAM, lines(A, usage(b"9" * 400), DONE), "completed", (None, 16, 2)),
    "usage in words": (STREAM, lines(A, usage(b'"many"', output=b"true"), DONE), "completed", (None, 16, None)),
    "usage 1e999": (STREAM, lines(A, usage(b"1e999"), DONE), "completed", (None, 16, 2)),
    "usage 40.0": (STREAM, lines(A, usage(b"40.0"), DONE), "completed", KNOWN),
    "usage is a list": (STREAM, lines(A, b'{"choices":[],"usage":[1]}', DONE), "completed", UNKNOWN),
    "deep": (STREAM, lines(A, b'{"choices":' + b"[" * 100_000, DONE), "failed", UNKNOWN),
    "error": (STREAM, lines(A, error(message="died"), DONE), "failed", UNKNOWN),
    "error 503": (STREAM, lines(error(message="later", code=503), DONE), "refused", UNKNOWN),
    "error '429'": (STREAM, lines(error(message="later", code="429"), DONE), "refused", UNKNOWN),
    "overload in words": (STREAM, lines(error(message="The engine is overloaded"), DONE), "refused", UNKNOWN),
    "error type": (STREAM, lines(error(message="x", type="rate_limit_exceeded"), DONE), "refused", UNKNOWN),
    "code of 5,000 digits": (STREAM, lines(error(message="x", code="9" * 5000), DONE), "failed", UNKNOWN),
    "number of 5,000 digits": (STREAM, lines(b'{"error":{"message":"queue full","code":' + b"9" * 5000 + b"}}", DONE),
                               "refused", UNKNOWN),
    "deep error": (STREAM, lines(b'{"error":' + b'{"a":' * 100_000, DONE), "failed", UNKNOWN),
    "plain error": (STREAM, lines(b'{"error":"plain"}', DONE), "failed", UNKNOWN),
    "no error": (STREAM, lines(A[:-1] + b',"error":null}', DONE), "completed", UNKNOWN),
    "older error": (STREAM, lines(b'{"object":"error","message":"queue is full"}', DONE), "refused", UNKNOWN),
    "whole": (JSON, b'{"choices":[{"message":{"content":"A"}}],"usage":{"prompt_tokens":40}}', "completed",
              (40, None, None)),
    "whole error": (JSON, error(message="died"), "failed", UNKNOWN),
    "whole error 429": (JSON, error(message="later", code=429), "refused", UNKNOWN),
    "whole page": ("text/html", b"<html>hello</html>", "failed", UNKNOWN),
    "whole without choices": (JSON, b"{}", "failed", UNKNOWN),
    "nothing": (JSON, b"", "failed", UNKNOWN),
}  # fmt: skip


def by_the_load_generator(content_type: str, body: bytes) -> tuple[str, tuple[int | None, ...]]:
    reader = AnswerReader(Exchange(0.0))
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    for position, byte in enumerate(head.encode() + body):
        reader.take(bytes((byte,)), float(position))
    return reader.exchange.outcome.value, reader.exchange.usage


@pytest.mark.parametrize("name", ANSWERS)
async def test_router_load_generator_and_prober_agree(engines: list[FakeEngine], start: Start, name: str) -> None:  # noqa: F811
    content_type, body, outcome, counts = ANSWERS[name]

    async def behaviour(out: Out) -> None:
        await out.head(200, content_type)
        if body:
            await out.chunk(body)
        await out.end()

    for engine in engines:
        engine.behaviour = behaviour
    async with aiohttp.ClientSession() as session:
        probed = await send_probe(
            session, f"{engines[0].url}/v1/chat/completions", {}, headers={}, tls=False, timeout_seconds=60
        )
    assert (probed.outcome, (probed.prompt_tokens, probed.cached_tokens, probed.output_tokens)) == (outcome, counts)
    measured, usage = by_the_load_generator(content_type, body)
    # The load generator tells an answer that began and broke off from one that failed.
    assert ("failed" if measured == "cut_off" else measured, usage) == (outcome, counts)
    client = await start(engines)
    async with client.chat() as answer:
        passed_on = await answer.read()
    assert passed_on.startswith(body)  # whatever the router makes of it, the client gets it
    await client.settled()
    async with client.session.get(f"{client.url}/router/requests") as page:
        (record,) = json.loads(await page.read())["records"]
    assert (record["outcome"], record.get("cached_tokens"), record.get("output_tokens")) == (outcome, *counts[1:])
