from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import gevent
import pytest

from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.client import http_client
from prefixwatch.loadgen.client.answer_reader import Exchange
from prefixwatch.loadgen.client.http_client import HttpClient, Target
from prefixwatch.loadgen.request_log.records import Outcome
from prefixwatch.loadgen.scenario.model import Timeouts
from tests.loadgen.conftest import Connection, FakeServer, Script

Serve = Callable[[Script], FakeServer]

FIRST_SOON = Timeouts(first_token_seconds=0.2, inter_token_seconds=30, total_seconds=60)
NEXT_SOON = Timeouts(first_token_seconds=30, inter_token_seconds=0.2, total_seconds=60)
"""Only the limit that a test is about is short: a busy machine may take long to answer at all."""


def ask(server: FakeServer | str, timeouts: Timeouts | None = None) -> Exchange:
    url = server if isinstance(server, str) else server.url
    client = HttpClient(Target.parse(url), timeouts or Timeouts())
    try:
        return client.post(client.head("/v1/chat/completions", {"x-tenant-id": "acme"}), b"{}")
    finally:
        client.close()


def test_the_role_event_is_not_the_first_token(serve: Serve) -> None:
    """sgl-project/sglang#29251 (LT05)"""

    def script(server: Connection, request: bytes) -> None:
        server.start_stream()
        server.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        time.sleep(0.3)
        server.content("A")
        server.end_stream()

    got = ask(serve(script))
    assert got.outcome is Outcome.COMPLETED
    assert got.first_event is not None
    assert got.first_token is not None
    assert got.first_token - got.first_event >= 0.1  # less than the pause, for a busy machine reads the first one late


def test_the_usage_event_neither_moves_the_first_token_nor_counts_as_a_gap(serve: Serve) -> None:
    """sgl-project/genai-bench#44 (LT07)"""

    def script(server: Connection, request: bytes) -> None:
        server.start_stream()
        for text in "AB":
            server.content(text)
            time.sleep(0.15)
        server.usage(prompt_tokens=7, completion_tokens=2)
        server.end_stream()

    got = ask(serve(script))
    assert got.usage.output_tokens == 2
    assert len(got.gaps_seconds) == 1
    assert got.first_token is not None
    assert got.end is not None
    assert got.end - got.first_token >= 0.09


def test_routing_headers_and_length_are_kept(serve: Serve) -> None:
    """locustio/locust#3492 (LT11): the length is what the body had."""

    def script(server: Connection, request: bytes) -> None:
        server.start_stream(x_prefixwatch_worker="w1")
        server.content("A")
        server.end_stream()

    got = ask(serve(script))
    assert got.headers["x-prefixwatch-worker"] == "w1"
    assert got.body_bytes == len(b'data: {"choices": [{"index": 0, "delta": {"content": "A"}}]}\n\ndata: [DONE]\n\n')


def test_a_reset_in_midstream_is_a_failure_that_keeps_its_first_token(serve: Serve) -> None:
    """locustio/locust#1472 (LT18)"""

    def script(server: Connection, request: bytes) -> None:
        server.start_stream()
        server.content("A")
        server.content("B")
        time.sleep(0.05)
        server.reset()

    got = ask(serve(script))
    assert (got.outcome, got.error) == (Outcome.CUT_OFF, "midstream_reset")
    assert got.first_token is not None


def test_the_end_of_the_connection_without_done_is_a_failure(serve: Serve) -> None:
    def script(server: Connection, request: bytes) -> None:
        server.start_stream()
        server.content("A")
        server.close()

    got = ask(serve(script))
    assert (got.outcome, got.error) == (Outcome.CUT_OFF, "eof_without_done")


def test_a_whole_body_without_done_is_a_failure(serve: Serve) -> None:
    def script(server: Connection, request: bytes) -> None:
        server.start_stream()
        server.content("A")
        server.send(b"0\r\n\r\n")

    assert ask(serve(script)).error == "eof_without_done"


def test_done_and_close_without_a_last_chunk_is_complete(serve: Serve) -> None:
    def script(server: Connection, request: bytes) -> None:
        server.start_stream()
        server.content("A")
        server.event("[DONE]")
        server.close()

    assert ask(serve(script)).outcome is Outcome.COMPLETED


def test_a_silent_stall_times_out(serve: Serve) -> None:
    released = threading.Event()

    def script(server: Connection, request: bytes) -> None:
        server.start_stream()
        server.content("A")
        released.wait(60)

    got = ask(serve(script), NEXT_SOON)
    released.set()
    assert (got.outcome, got.error) == (Outcome.TIMED_OUT, "inter_token_stall")
    assert got.first_token is not None


def test_no_first_token_times_out_although_the_role_event_came(serve: Serve) -> None:
    released = threading.Event()

    def script(server: Connection, request: bytes) -> None:
        server.start_stream()
        server.event({"choices": [{"delta": {"role": "assistant"}}]})
        released.wait(60)

    got = ask(serve(script), FIRST_SOON)
    released.set()
    assert (got.outcome, got.error, got.first_token) == (Outcome.TIMED_OUT, "first_token", None)
    assert got.end is not None
    assert got.end - got.sent >= 0.2


@pytest.mark.parametrize(
    ("status", "outcome", "error"),
    [
        ("503 Service Unavailable", Outcome.REFUSED, "http_503: no room"),
        ("429 Too Many Requests", Outcome.REFUSED, "http_429: no room"),
        ("400 Bad Request", Outcome.FAILED, "http_400: no room"),
        ("500 Oops", Outcome.FAILED, "http_500: no room"),
    ],
)
def test_http_errors(serve: Serve, status: str, outcome: Outcome, error: str) -> None:
    got = ask(serve(lambda server, request: server.answer(status, {"error": {"message": "no room"}})))
    assert (got.outcome, got.error, got.status) == (outcome, error, int(status[:3]))


@pytest.mark.parametrize(("code", "outcome"), [(500, Outcome.FAILED), (503, Outcome.REFUSED)])
def test_an_error_inside_200_is_no_answer(serve: Serve, code: int, outcome: Outcome) -> None:
    def script(server: Connection, request: bytes) -> None:
        server.start_stream()
        server.event({"error": {"message": "boom", "code": code}})
        server.end_stream()

    got = ask(serve(script))
    assert (got.outcome, got.error, got.status) == (outcome, "error_in_200: boom", 200)


def test_an_answer_that_is_not_streamed_has_no_first_token(serve: Serve) -> None:
    """kubernetes-sigs/inference-perf#150 (LT27)"""
    body = {"choices": [{"message": {"content": "A"}}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    got = ask(serve(lambda server, request: server.answer("200 OK", body)))
    assert (got.outcome, got.first_token) == (Outcome.COMPLETED, None)
    assert got.usage.prompt_tokens == 3


def test_a_character_cut_by_a_read_is_read_whole(serve: Serve) -> None:
    """vllm-project/vllm#50868 (RT32)"""
    event = 'data: {"choices":[{"delta":{"content":"🙂"}}]}\n\n'.encode()

    def script(server: Connection, request: bytes) -> None:
        server.start_stream()
        server.chunk(event[:-10])
        time.sleep(0.03)
        server.chunk(event[-10:])
        server.end_stream()

    got = ask(serve(script))
    assert (got.outcome, got.first_event_data) == (Outcome.COMPLETED, event[6:-2])


def test_nobody_listens() -> None:
    with socket.socket() as bound:  # bound and not listening: nobody else can get the port meanwhile
        bound.bind(("127.0.0.1", 0))
        got = ask(f"http://127.0.0.1:{bound.getsockname()[1]}")
    assert (got.outcome, got.error) == (Outcome.FAILED, "connect_refused")


def test_something_else_than_http_answers(serve: Serve) -> None:
    got = ask(serve(lambda server, request: server.send(b"SSH-2.0-hello\r\n\r\n")))
    assert got.outcome is Outcome.FAILED
    assert got.error.startswith("bad_http")


def quick(server: Connection, request: bytes) -> None:
    server.start_stream()
    server.content("A")
    server.end_stream()


def test_connections_are_kept_and_a_stale_one_is_replaced(serve: Serve) -> None:
    asked = 0

    def script(server: Connection, request: bytes) -> None:
        nonlocal asked
        asked += 1
        quick(server, request)
        if asked == 2:
            server.close()

    server = serve(script)
    client = HttpClient(Target.parse(server.url), Timeouts())
    head = client.head("/", {})
    outcomes = []
    for _ in range(3):
        outcomes.append(client.post(head, b"{}").outcome)
        gevent.sleep(0.02)
    client.close()
    assert outcomes == [Outcome.COMPLETED] * 3
    assert server.connections == 2


def test_concurrency_has_no_limit(serve: Serve) -> None:
    """vllm-project/vllm#7241 (LT21): a pool of 100 would never let all of these run at once."""
    together = threading.Barrier(130)

    def script(server: Connection, request: bytes) -> None:
        together.wait(40)
        quick(server, request)

    client = HttpClient(Target.parse(serve(script).url), Timeouts())
    head = client.head("/", {})
    asked = [gevent.spawn(client.post, head, b"{}") for _ in range(130)]
    gevent.joinall(asked, timeout=40)
    client.close()
    assert [greenlet.value.outcome for greenlet in asked] == [Outcome.COMPLETED] * 130


def test_cancel_ends_what_is_running(serve: Serve) -> None:
    released, sent = threading.Event(), threading.Event()

    def script(server: Connection, request: bytes) -> None:
        server.start_stream()
        server.content("A")
        sent.set()
        released.wait(60)

    client = HttpClient(Target.parse(serve(script).url), Timeouts())
    asked = gevent.spawn(client.post, client.head("/", {}), b"{}")
    while not sent.is_set():
        gevent.sleep(0.01)
    gevent.sleep(0.2)  # for it to be read
    client.cancel()
    got = asked.get(timeout=20)
    released.set()
    client.close()
    assert got.outcome is Outcome.CANCELLED
    assert got.first_token is not None
    assert got.end is not None


@pytest.mark.parametrize(
    ("url", "authority", "path"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", ""),
        ("127.0.0.1:8000", "127.0.0.1:8000", ""),
        ("http://h/v1/", "h:80", ""),
        ("https://h/llm/v1", "h:443", "/llm"),
        ("http://[::1]:9", "[::1]:9", ""),
    ],
)
def test_targets(url: str, authority: str, path: str) -> None:
    target = Target.parse(url)
    assert (target.authority, target.path) == (authority, path)


@pytest.mark.parametrize("url", ["ftp://h", "http://", "", "http://h:port", "http://h:70000"])
def test_a_wrong_target_says_how_to_write_it(url: str) -> None:
    with pytest.raises(InputError, match="write it as http://host:port"):
        Target.parse(url)


@pytest.mark.parametrize("login", ["user:password", "user", ":password"])
def test_a_login_in_the_url_is_refused_and_not_repeated(login: str) -> None:
    with pytest.raises(InputError, match=r"target at engine: a login in the URL .* --api-key-env") as refused:
        Target.parse(f"https://{login}@engine/v1")
    assert "password" not in str(refused.value)


def test_comments_that_keep_the_connection_alive_are_no_tokens(serve: Serve) -> None:
    over = threading.Event()

    def script(server: Connection, request: bytes) -> None:
        server.start_stream()
        server.content("A")
        while not over.wait(0.05):
            server.chunk(b": ping\n\n")

    got = ask(serve(script), NEXT_SOON)
    over.set()
    assert (got.outcome, got.error) == (Outcome.TIMED_OUT, "inter_token_stall")


def test_nonsense_in_a_quiet_stream_is_found_before_its_time_out(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "QUIET_SECONDS", 0.05)
    over = threading.Event()

    def script(server: Connection, request: bytes) -> None:
        server.start_stream()
        server.content("A")
        time.sleep(0.05)
        server.send(b"nonsense\r\nthat is no chunk")
        over.wait(60)

    got = ask(serve(script))
    over.set()
    assert got.outcome is Outcome.FAILED
    assert got.error.startswith("bad_http")
    assert got.first_token is not None


def test_names_that_are_not_ascii_go_as_utf_8() -> None:
    client = HttpClient(Target.parse("http://localhost:1"), Timeouts())
    head = client.head("/v1/chat/completions", {"x-tenant-id": "日本"})
    client.close()
    assert "\r\nx-tenant-id: 日本\r\n".encode() in head
