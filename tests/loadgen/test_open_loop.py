from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import gevent
import numpy as np

from prefixwatch.loadgen.client.http_client import HttpClient, Target
from prefixwatch.loadgen.plan.request import Plan, PlannedRequest
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.loadgen.scenario.model import Timeouts
from prefixwatch.loadgen.sending.open_loop import OpenLoop, RequestOptions
from tests.loadgen.conftest import Connection, FakeServer, Script

Serve = Callable[[Script], FakeServer]


def request(index: int, at: float, phase: str = "measured", **more: object) -> PlannedRequest:
    fixed = {"tenant": "acme", "session": f"s{index}", "turn": 0, "group": "g0", "request_class": "interactive"}
    sizes = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt_tokens": 1, "shared_tokens": 0}
    return PlannedRequest(**{"index": index, "phase": phase, "scheduled_s": at, **fixed, **sizes, **more})  # type: ignore[arg-type]  # fields by name


def run_plan(server: FakeServer, requests: list[PlannedRequest], drain_seconds: float = 5.0) -> list[RequestRecord]:
    client = HttpClient(Target.parse(server.url), Timeouts())
    loop = OpenLoop(Plan("t", 0, "n", "m", requests), client, RequestOptions(model="m", policy="p", repeat=2))
    loop.prime()
    loop.measure(drain_seconds)
    client.close()
    return loop.records


def quick(server: Connection, _: bytes) -> None:
    server.start_stream(
        x_prefixwatch_worker="w0",
        x_prefixwatch_reason="affinity",
        x_prefixwatch_predicted_tokens="48",
        x_prefixwatch_decision_us="12.5",
        x_prefixwatch_retries="1",
    )
    server.content("A")
    server.usage(prompt_tokens=7, completion_tokens=1)
    server.end_stream()


def test_a_record_holds_what_was_planned_and_what_came(serve: Serve) -> None:
    server = serve(quick)
    (record,) = run_plan(server, [request(0, 0.05, salt="s3", headers={"x-more": "1"}, shared_tokens=5)])
    assert (record.id, record.policy, record.repeat, record.outcome) == ("p-2-0", "p", 2, Outcome.COMPLETED)
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 1, None)
    assert (record.worker, record.reason, record.predicted_tokens) == ("w0", "affinity", 48)
    assert (record.decision_us, record.retries, record.planned_shared_tokens) == (12.5, 1, 5)
    assert record.scheduled_s == 0.05
    assert record.sent_s is not None
    assert record.client_lag_s == record.sent_s - record.scheduled_s >= 0
    sent = server.requests[0]
    for part in (b"x-tenant-id: acme\r\n", b"x-session-id: s0\r\n", b"x-more: 1\r\n", b'"cache_salt":"s3"'):
        assert part in sent
    assert b'"stream_options":{"include_usage":true}' in sent


def test_tools_are_sent_as_the_field_that_they_are(serve: Serve) -> None:
    server = serve(quick)
    tools = [{"type": "function", "function": {"name": "search"}}]
    run_plan(server, [request(0, 0, tools=tools, tool_choice="none"), request(1, 0.05)])
    with_tools, without = sorted(server.requests, key=len, reverse=True)
    assert b'"tools":[{"type":"function","function":{"name":"search"}}],"tool_choice":"none"' in with_tools
    assert b"tool" not in without


def test_a_stall_is_seen_by_every_request_that_was_due_in_it(serve: Serve) -> None:
    """gatling/gatling#2077 (LT20): open loop, counted from the scheduled time; a closed loop sees one bad sample."""
    stall = 0.6
    serving = threading.Lock()

    def script(server: Connection, sent: bytes) -> None:
        with serving:
            if b"x-session-id: stalls" in sent:
                time.sleep(stall)
        quick(server, sent)

    every = 0.03
    requests = [request(i, i * every, session="stalls" if i == 7 else f"s{i}") for i in range(40)]
    records = run_plan(serve(script), requests)
    assert [record.outcome for record in records] == [Outcome.COMPLETED] * 40
    for record in records[7:]:
        waited_out = max(0.0, 7 * every + stall - record.scheduled_s)
        assert record.ttft_s is not None
        assert record.ttft_s >= waited_out - 0.01
    # No later than the machine lets it: what comes after the stall is sent and answered as before it.
    assert min(record.ttft_s or 0.0 for record in records if record.scheduled_s > 7 * every + stall) < stall
    # 20 of the 40 requests are due in the stall, so every other sample sees it.
    assert np.quantile([record.ttft_s or 0.0 for record in records], 0.7) > 0.1


def test_primes_are_sent_one_after_another_and_end_before_time_zero(serve: Serve) -> None:
    """sgl-project/sglang#37359 (LT22)"""
    running = threading.Lock()
    overlapped = []

    def script(server: Connection, sent: bytes) -> None:
        overlapped.append(not running.acquire(blocking=False))
        time.sleep(0.02)
        running.release()
        quick(server, sent)

    records = run_plan(serve(script), [request(0, 0, "prime"), request(1, 0, "prime"), request(2, 0.01)])
    assert not any(overlapped)
    assert records[1].end_s is not None
    assert records[1].end_s <= 0
    assert records[0].scheduled_s == records[0].sent_s


def test_what_still_runs_at_the_end_is_cancelled_and_logged(serve: Serve) -> None:
    """locustio/locust#1407 (LT17): requests in flight at the end neither vanish nor count as failures."""
    released = threading.Event()

    def script(server: Connection, sent: bytes) -> None:
        server.start_stream()
        server.content("A")
        released.wait(60)

    records = run_plan(serve(script), [request(i, 0.0) for i in range(10)], drain_seconds=0.2)
    released.set()
    assert [record.outcome for record in records] == [Outcome.CANCELLED] * 10
    for record in records:
        assert record.end_s is not None
        assert record.end_s >= 0.19


def test_a_failure_does_not_stop_the_requests_after_it(serve: Serve) -> None:
    def script(server: Connection, sent: bytes) -> None:
        if b"x-session-id: s0" in sent:
            server.start_stream()
            server.content("A")
            server.reset()
        else:
            quick(server, sent)

    records = run_plan(serve(script), [request(0, 0), request(1, 0.05)])
    assert [record.outcome for record in records] == [Outcome.CUT_OFF, Outcome.COMPLETED]


def test_stopping_logs_the_requests_that_were_never_sent(serve: Serve) -> None:
    client = HttpClient(Target.parse(serve(quick).url), Timeouts())
    plan = Plan("t", 0, "n", "m", [request(0, 0.0), request(1, 60.0)])
    loop = OpenLoop(plan, client, RequestOptions(model="m"), on_end=lambda record, exchange: loop.stop())
    started = time.monotonic()
    gevent.spawn(loop.measure, 5.0).join(timeout=50)
    client.close()
    assert time.monotonic() - started < 50  # it didn't wait for the second one's time
    assert [(record.outcome, record.sent_s is None) for record in loop.records] == [
        (Outcome.COMPLETED, False),
        (Outcome.NEVER_SENT, True),
    ]


def test_a_turn_with_a_delay_is_due_that_long_after_the_answer_before(serve: Serve) -> None:
    """ai-dynamo/aiperf#273 (N04). The first answer takes 0.4 s, so the second turn is due later than its own time."""

    def script(server: Connection, sent: bytes) -> None:
        if b"x-first" in sent:
            time.sleep(0.4)
        quick(server, sent)

    slow: dict[str, Any] = {"headers": {"x-first": "1"}, "session": "s"}
    later = request(1, 0.1, session="s", turn=1, delay_seconds=0.1)
    first, second, other = run_plan(serve(script), [request(0, 0, **slow), later, request(2, 0.2, session="o")])
    assert first.end_s is not None
    assert second.scheduled_s >= first.end_s + 0.09
    assert second.sent_s is not None
    assert second.sent_s >= second.scheduled_s
    assert other.scheduled_s == 0.2
    assert [r.outcome for r in (first, second, other)] == [Outcome.COMPLETED] * 3


def test_a_slow_event_loop_shows_up_as_client_lag(serve: Serve) -> None:
    """locustio/locust#2339 (LT19): whatever blocks the loop is counted as the client's own lateness."""
    gevent.spawn_later(0.05, lambda: threading.Event().wait(0.4))
    (record,) = run_plan(serve(quick), [request(0, 0.1)])
    assert record.client_lag_s is not None
    assert record.client_lag_s >= 0.25  # the block begins at 0.05 s, or sooner if the run begins late


def test_output_tokens_are_those_of_usage_and_never_a_count_of_chunks(serve: Serve) -> None:
    """eugr/llama-benchy#18 (LT04): three pieces of text, two tokens; without usage the number is unknown."""

    def script(usage: bool) -> Script:
        def answer(server: Connection, _: bytes) -> None:
            server.start_stream()
            for piece in ("Hel", "lo", " world"):
                server.content(piece)
            if usage:
                server.usage(prompt_tokens=7, completion_tokens=2)
            server.end_stream()

        return answer

    (told,) = run_plan(serve(script(usage=True)), [request(0, 0)])
    (untold,) = run_plan(serve(script(usage=False)), [request(0, 0)])

    assert (told.output_tokens, untold.output_tokens) == (2, None)
    assert (told.tpot_s is not None, untold.tpot_s) == (True, None)
