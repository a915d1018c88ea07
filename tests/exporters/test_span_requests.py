"""Every request once: spans of several processes, in any order, late, broken or too many."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.exporters.spans.genai import Span, Value, shipped_table
from prefixwatch.exporters.spans.requests import SpanRefused, SpanRequests
from prefixwatch.kvcache.request_record import RequestRecord

NOW = 1_700_000_000
TRACE = "0af7651916cd43dd8448eb211c80319c"
_numbers = count(1)

ENGINE: Mapping[str, Value] = {
    "gen_ai.usage.prompt_tokens": 1000,
    "gen_ai.usage.completion_tokens": 11,
    "gen_ai.latency.time_to_first_token": 0.3,
    "gen_ai.latency.e2e": 0.9,
}
ROUTER: Mapping[str, Value] = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "tiny",
    "prefixwatch.policy": "affinity",
    "prefixwatch.worker": "w1",
    "prefixwatch.time_to_first_token_seconds": 0.5,
    "prefixwatch.reported_cached_tokens": 960,
    "prefixwatch.tenant": "alice",
    "gen_ai.usage.input_tokens": 1001,
}
GATEWAY: Mapping[str, Value] = {
    "gen_ai.operation.name": "chat",
    "gen_ai.response.time_to_first_chunk": 0.6,
    "gen_ai.request.model": "public-name",
    "litellm.call_id": "1",
}


def span(attributes: Mapping[str, Value], start: float, end: float, **fields: Any) -> Span:
    """A span from `start` to `end` seconds after NOW."""
    given: dict[str, Any] = {"trace_id": TRACE, "span_id": f"{next(_numbers):016x}", "parent_id": "ff" * 8, **fields}
    return Span(
        name="",
        kind="server",
        start_ns=int((NOW + start) * 1e9),
        end_ns=int((NOW + end) * 1e9),
        attributes=attributes,
        **given,
    )


def gathered(*spans: Span, read_elsewhere: Container[str] = ()) -> tuple[list[RequestRecord], SpanRequests]:
    requests = SpanRequests(shipped_table(), str.upper, str.upper, read_elsewhere=read_elsewhere)
    for each in spans:
        requests.add(each, 0.0, NOW)
    return list(requests.settled(15.0)), requests


def test_router_and_engine_are_one_request() -> None:
    """The outermost span gives the times, the innermost the tokens, and what only one knows comes from that one."""
    router = span(ROUTER, 0, 1)
    engine = span(ENGINE, 0.1, 0.95, parent_id=router.span_id)
    (record,), requests = gathered(engine, router)
    assert record == RequestRecord(
        ended_unix_seconds=NOW + 1,
        outcome="completed",
        worker="w1",
        model="tiny",
        tenant="ALICE",
        policy="affinity",
        prompt_tokens=1000,
        cached_tokens=960,
        output_tokens=11,
        ttft_seconds=0.5,
        e2e_seconds=1.0,
        tpot_seconds=0.05,
        trace_id=TRACE,
    )
    assert requests.results == {"used": 1, "merged": 1}


def test_the_way_from_gateway_to_engine_may_lead_over_spans_of_other_kinds() -> None:
    gateway = span(GATEWAY, 0, 2, parent_id="")
    http = span({"http.response.status_code": 200}, 0.1, 2, parent_id=gateway.span_id)
    router = span(ROUTER, 0.2, 1.5, parent_id=http.span_id)
    engine = span(ENGINE, 0.3, 1.4, parent_id=router.span_id)
    (record,), requests = gathered(engine, router, http, gateway)
    assert (record.ttft_seconds, record.model, record.worker) == (0.6, "public-name", "w1")
    assert requests.results == {"used": 1, "merged": 2, "other": 1}


def test_an_agents_calls_in_one_trace_are_as_many_requests() -> None:
    agent = span({"gen_ai.operation.name": "invoke_agent", "gen_ai.usage.input_tokens": 3000}, 0, 9, parent_id="")
    calls = [span(GATEWAY, 3 * n, 3 * n + 2, parent_id=agent.span_id) for n in range(3)]
    engines = [span(ENGINE, 3 * n + 0.1, 3 * n + 1, parent_id=calls[n].span_id) for n in range(3)]
    records, _ = gathered(agent, *engines, *calls)
    assert [record.prompt_tokens for record in records] == [1000, 1000, 1000]
    assert [record.ttft_seconds for record in records] == [0.6, 0.6, 0.6]


def test_where_a_hop_is_missing_time_tells() -> None:
    """The gateway's HTTP client reports elsewhere, so the engine's parent is unknown; clocks differ by 0.2 s."""
    gateway = span(GATEWAY, 0, 1)
    engine = span(ENGINE, -0.1, 0.7)
    (record,), _ = gathered(gateway, engine)
    assert (record.prompt_tokens, record.ttft_seconds) == (1000, 0.6)


def test_a_known_link_outweighs_time() -> None:
    """Two calls at the same time: the engine's span belongs to its ancestor, though the other one ends closer."""
    first, second = span(GATEWAY, 0, 5), span({**GATEWAY, "gen_ai.request.model": "b"}, 0, 1.01)
    engine = span(ENGINE, 0.5, 1.0, parent_id=first.span_id)
    records, _ = gathered(first, second, engine)
    assert {record.model: record.prompt_tokens for record in records} == {"public-name": 1000, "b": None}


def test_two_engine_spans_beside_each_other_are_two_requests() -> None:
    records, _ = gathered(span(ENGINE, 0, 1), span(ENGINE, 0.1, 0.9))
    assert len(records) == 2


def test_a_retried_request_is_one() -> None:
    router = span(ROUTER, 0, 3)
    failed = span({**ENGINE, "error.type": "500"}, 0.1, 0.5, parent_id=router.span_id)
    (record,), _ = gathered(router, failed, span(ENGINE, 0.6, 2.9, parent_id=router.span_id))
    assert record.outcome == "completed"


def test_an_engine_alone_has_no_cache_class() -> None:
    """vLLM's span has no cached tokens: unknown is not a miss."""
    (record,), _ = gathered(span({**ENGINE, "k8s.pod.name": "vllm-0"}, 0, 1))
    assert (record.cached_tokens, record.ttft_seconds, record.worker) == (None, 0.3, "vllm-0")


def test_what_the_routers_own_records_tell_is_not_counted_again() -> None:
    router = span(ROUTER, 0, 1)
    records, requests = gathered(router, span(ENGINE, 0.1, 0.9, parent_id=router.span_id), read_elsewhere={TRACE})
    assert records == []
    assert requests.results == {"elsewhere": 2}


def test_a_trace_waits_for_the_exporters_batches() -> None:
    requests = SpanRequests(shipped_table(), str, str, settle_seconds=15)
    router = span(ROUTER, 0, 1)
    requests.add(router, 0.0, NOW)
    assert list(requests.settled(14.9)) == []
    requests.add(span(ENGINE, 0.1, 0.9, parent_id=router.span_id), 14.9, NOW)
    assert len(list(requests.settled(15.0))) == 1
    assert list(requests.settled(30.0)) == []


def test_a_latecomer_is_not_counted_again_and_a_later_call_of_the_trace_is() -> None:
    requests = SpanRequests(shipped_table(), str, str, settle_seconds=15)
    router = span(ROUTER, 0, 1)
    requests.add(router, 0.0, NOW)
    assert len(list(requests.settled(15.0))) == 1
    requests.add(span(ENGINE, 0.1, 0.9, parent_id=router.span_id), 16.0, NOW)
    requests.add(span(ROUTER, 20, 21), 21.0, NOW)
    assert list(requests.settled(30.0)) == []
    assert len(list(requests.settled(36.0))) == 1
    assert requests.results == {"used": 2, "merged": 0, "late": 1}


def test_an_export_sent_twice_counts_once() -> None:
    router = span(ROUTER, 0, 1)
    records, requests = gathered(router, router)
    assert len(records) == 1
    assert requests.results["duplicate"] == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"trace_id": "00" * 16}, "bad_trace_id"),
        ({"trace_id": ""}, "bad_trace_id"),
        ({"span_id": "ab"}, "bad_span_id"),
        ({"start": -NOW}, "missing_time"),
        ({"end": -5}, "negative_duration"),
        ({"start": 90_000, "end": 90_001}, "wrong_clock"),
    ],
)
def test_unusable_spans_are_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    times = {"start": fields.pop("start", 0), "end": fields.pop("end", 1)}
    requests = SpanRequests(shipped_table(), str, str)
    with pytest.raises(SpanRefused, match=reason):
        requests.add(span(ENGINE, **times, **fields), 0.0, NOW)
    assert requests.faults == {reason: 1}
    assert requests.results == {"refused": 1}


def test_a_thousand_spans_of_a_trace_wait_at_a_time() -> None:
    """An evaluation may run for hours under one trace; what was counted makes room."""
    requests = SpanRequests(shipped_table(), str, str)
    for number in range(1_000):
        requests.add(span(ENGINE, number, number + 1), 0.0, NOW)
    with pytest.raises(SpanRefused, match="too_many_spans"):
        requests.add(span(ENGINE, 0, 1), 0.0, NOW)
    assert len(list(requests.settled(15.0))) == 1_000
    requests.add(span(ENGINE, 2_000, 2_001), 16.0, NOW)
    assert len(list(requests.settled(31.0))) == 1


def test_a_chain_of_spans_built_to_take_long_doesnt() -> None:
    """1,000 spans, each the child of the one before: links are followed 64 steps."""
    chain = [span(ENGINE, 0, 1, span_id=f"{n + 1:016x}", parent_id=f"{n:016x}") for n in range(999)]
    began = time.process_time()
    records, requests = gathered(*chain)
    assert time.process_time() - began < 5
    assert 1 <= len(records) <= 999
    assert requests.results.total() == 999


def test_memory_is_bounded_and_nothing_is_lost() -> None:
    requests = SpanRequests(shipped_table(), str, str, max_traces=10)
    for number in range(100):
        requests.add(span(ENGINE, 0, 1, trace_id=f"{number + 1:032x}"), 0.0, NOW)
    assert len(list(requests.settled(0.0))) == 90
    assert requests.waiting_traces == 10
    assert len(list(requests.all())) == 10


def test_a_ring_of_parents_ends() -> None:
    a, b = "0" * 15 + "a", "0" * 15 + "b"
    records, requests = gathered(span(ENGINE, 0, 1, span_id=a, parent_id=b), span(ROUTER, 0, 1, span_id=b, parent_id=a))
    assert 1 <= len(records) <= 2
    assert requests.results.total() == 2


def test_a_gateways_own_client_span_lies_within_its_server_span() -> None:
    """Links tell who is outside, not the kind of span."""
    server = span({**GATEWAY, "gen_ai.response.time_to_first_chunk": 0.7}, 0, 2, parent_id="")
    client = span({"gen_ai.operation.name": "chat", "gen_ai.response.time_to_first_chunk": 0.6}, 0.1, 1.9,
                  parent_id=server.span_id)  # fmt: skip
    (record,), _ = gathered(client, server)
    assert record.ttft_seconds == 0.7


@given(
    st.lists(
        st.tuples(
            st.sampled_from([ENGINE, ROUTER, GATEWAY, {}]),
            st.integers(0, 5),
            st.integers(0, 5),
            st.sampled_from(["", *(f"{n:016x}" for n in range(1, 9))]),
        ),
        max_size=8,
    ),
    st.randoms(use_true_random=False),
)
def test_every_span_is_accounted_for_whatever_the_order(
    rows: list[tuple[Mapping[str, Value], int, int, str]], random: Any
) -> None:
    spans = [
        span(attributes, start, start + length, span_id=f"{number + 1:016x}", parent_id=parent)
        for number, (attributes, start, length, parent) in enumerate(rows)
    ]
    records, requests = gathered(*spans)
    assert requests.results.total() == len(spans)
    assert requests.results["used"] == len(records)
    random.shuffle(spans)
    again, _ = gathered(*spans)
    assert len(again) == len(records)
