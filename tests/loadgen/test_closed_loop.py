from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.loadgen.client.http_client import HttpClient, Target
from prefixwatch.loadgen.plan.request import Plan, PlannedRequest
from prefixwatch.loadgen.request_log.records import Outcome
from prefixwatch.loadgen.scenario.model import Timeouts
from prefixwatch.loadgen.sending.answers import GeneratedAnswers
from prefixwatch.loadgen.sending.open_loop import OpenLoop, RequestOptions
from tests.loadgen.conftest import Connection, FakeServer, Script

Serve = Callable[[Script], FakeServer]


def request(index: int, session: str, turn: int = 0, **more: object) -> PlannedRequest:
    fixed = {"tenant": "-", "group": "-", "request_class": "c", "phase": "measured", "scheduled_s": 0.0}
    sizes = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt_tokens": 1, "shared_tokens": 0}
    return PlannedRequest(
        **{"index": index, "session": session, "turn": turn, **fixed, **sizes, **more}  # type: ignore[arg-type]  # fields by name
    )  # fields by name


def send(server: FakeServer, plan: Plan, answers: GeneratedAnswers | None = None) -> OpenLoop:
    client = HttpClient(Target.parse(server.url), Timeouts())
    loop = OpenLoop(plan, client, RequestOptions(model="m"), answers=answers)
    loop.measure(5.0)
    client.close()
    return loop


def body(sent: bytes) -> dict[str, object]:
    content: dict[str, object] = json.loads(sent.partition(b"\r\n\r\n")[2])
    return content


def test_a_closed_loop_keeps_so_many_requests_in_flight_and_counts_from_the_sending(serve: Serve) -> None:
    running, most = 0, 0
    lock, three = threading.Lock(), threading.Barrier(3)

    def script(server: Connection, sent: bytes) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        three.wait(30)  # breaks, and the requests fail, where fewer are in flight
        time.sleep(0.05)
        with lock:
            running -= 1
        server.start_stream()
        server.content("A")
        server.end_stream()

    requests = [request(k, f"s{k}") for k in range(9)]
    loop = send(serve(script), Plan("t", 0, "n", "m", requests, concurrency=3))
    assert (most, loop.in_flight_max) == (3, 3)
    assert [record.outcome for record in loop.records] == [Outcome.COMPLETED] * 9
    assert max(record.scheduled_s for record in loop.records) >= 0.1  # not from the start of the run


def test_a_session_is_sent_by_one_user_turn_by_turn_with_its_thinking(serve: Serve) -> None:
    def script(server: Connection, sent: bytes) -> None:
        server.start_stream()
        server.content("A")
        server.end_stream()

    requests = [request(k, "s", turn=k, think_seconds=0.05 * (k > 0)) for k in range(3)]
    records = send(serve(script), Plan("t", 0, "n", "m", requests, concurrency=4)).records
    for before, after in pairwise(records):
        assert before.end_s is not None
        assert after.scheduled_s >= before.end_s + 0.05


def test_model_priority_and_salt_are_sent(serve: Serve) -> None:
    def script(server: Connection, sent: bytes) -> None:
        server.start_stream()
        server.end_stream()

    server = serve(script)
    send(server, Plan("t", 0, "n", "m", [request(0, "a"), request(1, "b", model="lora-7", priority=3, salt="x")]))
    first, second = sorted(
        (body(sent) for sent in server.requests), key=lambda content: str(content["model"]), reverse=True
    )
    assert (first["model"], "priority" in first) == ("m", False)
    assert (second["model"], second["priority"], second["cache_salt"]) == ("lora-7", 3, "x")


def test_generated_answers_are_sent_in_the_place_of_planned_ones(serve: Serve, tokenizer: Tokenizer) -> None:
    """kubernetes-sigs/inference-perf#649 (LT02): generated text comes back as other tokens, which is no cache fault."""

    def script(server: Connection, sent: bytes) -> None:
        server.start_stream()
        server.content("Hel")
        server.content("lo")
        server.usage(prompt_tokens=9, completion_tokens=2)
        server.end_stream()

    planned = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "planned"},
        {"role": "user", "content": "two"},
    ]
    requests = [request(0, "s", messages=planned[:1]), request(1, "s", turn=1, messages=planned)]
    plan = Plan("t", 0, "n", "m", requests, answers="generated")
    server = serve(script)
    answers = GeneratedAnswers(plan, tokenizer.encode_chat)
    records = send(server, plan, answers).records
    sent = body(server.requests[1])["messages"]
    assert sent == [planned[0], {"role": "assistant", "content": "Hello"}, planned[2]]
    first, second = (tokenizer.encode_chat(messages) for messages in (planned[:1], sent))
    assert records[1].planned_prompt_tokens == len(second)
    assert records[1].planned_shared_tokens == len(first)
    assert answers.lost_tokens == 2
    assert records[1].scheduled_s >= (records[0].end_s or 0.0)


def test_a_later_turn_does_not_wait_forever_for_an_answer_that_failed(serve: Serve, tokenizer: Tokenizer) -> None:
    def script(server: Connection, sent: bytes) -> None:
        server.answer("500 Internal Server Error", {"error": {"message": "no"}})

    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    requests = [request(0, "s", messages=messages[:1]), request(1, "s", turn=1, messages=messages)]
    plan = Plan("t", 0, "n", "m", requests, answers="generated")
    records = send(serve(script), plan, GeneratedAnswers(plan, tokenizer.encode_chat)).records
    assert [record.outcome for record in records] == [Outcome.FAILED, Outcome.FAILED]


def test_a_closed_loop_hides_a_stall_from_all_but_one_request(serve: Serve) -> None:
    """gatling/gatling#2077 (LT20): the open loop's side is in test_open_loop.py."""
    stalled = threading.Event()

    def script(server: Connection, sent: bytes) -> None:
        if b"x-session-id: s5\r\n" in sent and not stalled.is_set():
            stalled.set()
            time.sleep(1.0)
        server.start_stream()
        server.content("A")
        server.end_stream()

    loop = send(serve(script), Plan("t", 0, "n", "m", [request(k, f"s{k}") for k in range(20)], concurrency=1))
    assert loop.plan.loop == "closed"
    assert [record.index for record in loop.records if (record.ttft_s or 0.0) > 0.8] == [5]


@pytest.mark.parametrize("users", [1, 5])
def test_more_users_than_sessions_send_every_request_once(serve: Serve, users: int) -> None:
    def script(server: Connection, sent: bytes) -> None:
        server.start_stream()
        server.end_stream()

    server = serve(script)
    send(server, Plan("t", 0, "n", "m", [request(k, f"s{k}") for k in range(3)], concurrency=users))
    assert len(server.requests) == 3
