"""Golden vectors: what each producer of GenAI spans writes, and what of it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.exporters.spans.genai import Level, RequestSpan, Span, Value, request_span, shipped_table

START = 1_700_000_000_000_000_000
SECOND = 1_000_000_000


def span(
    attributes: Mapping[str, Value],
    *,
    name: str = "chat llama",
    kind: Any = "client",
    seconds: float = 2.0,
    events: Mapping[str, float] | None = None,
    failed: bool = False,
) -> Span:
    """A span of two seconds; `events` are names and seconds after its start."""
    return Span(
        trace_id="0af7651916cd43dd8448eb211c80319c",
        span_id="b7ad6b7169203331",
        parent_id="",
        name=name,
        kind=kind,
        start_ns=START,
        end_ns=START + int(seconds * SECOND),
        attributes=attributes,
        events=[(event, START + int(at * SECOND)) for event, at in (events or {}).items()],
        failed=failed,
    )


def read(attributes: Mapping[str, Value], **fields: Any) -> RequestSpan:
    told = request_span(span(attributes, **fields), shipped_table())
    assert told is not None
    return told


VLLM: Mapping[str, Value] = {
    "gen_ai.latency.time_to_first_token": 0.25,
    "gen_ai.latency.e2e": 1.9,
    "gen_ai.latency.time_in_queue": 0.01,
    "gen_ai.usage.prompt_tokens": 1200,
    "gen_ai.usage.completion_tokens": 64,
    "gen_ai.latency.time_in_model_prefill": 0.2,
    "gen_ai.latency.time_in_model_decode": 1.6,
    "gen_ai.latency.time_in_model_inference": 1.8,
    "gen_ai.request.id": "cmpl-1",
    "gen_ai.request.temperature": 1.0,
}


def test_vllm_tells_no_cached_tokens() -> None:
    """vLLM 0.32's `llm_request` has none, so the request's cache class is unknown, not a miss."""
    told = read(VLLM, name="llm_request", kind="server")
    assert (told.producer, told.level) == ("vllm", Level.ENGINE)
    assert (told.prompt_tokens, told.cached_tokens, told.output_tokens) == (1200, None, 64)
    assert (told.ttft_seconds, told.e2e_seconds, told.outcome) == (0.25, 1.9, "completed")
    assert told.faults == ()


def test_vllm_of_before_v1() -> None:
    old: Mapping[str, Value] = {
        "gen_ai.response.model": "llama",
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.latency.time_in_scheduler": 0.1,
        "gen_ai.latency.time_in_model_forward": 100.0,
        "gen_ai.latency.time_to_first_token": 0.5,
        "gen_ai.usage.prompt_tokens": 10,
    }
    told = read(old, name="llm_request", kind="server")
    assert (told.level, told.model, told.prompt_tokens, told.ttft_seconds) == (Level.ENGINE, "llama", 10, 0.5)


def test_a_first_token_that_never_came_is_unknown() -> None:
    """vLLM writes 0.0 for a request that was aborted before its first token."""
    told = read({**VLLM, "gen_ai.latency.time_to_first_token": 0.0}, name="llm_request")
    assert (told.ttft_seconds, told.faults) == (None, ())


def test_sglang_tells_cached_tokens() -> None:
    told = read(
        {
            "gen_ai.usage.prompt_tokens": 900,
            "gen_ai.usage.completion_tokens": 3,
            "gen_ai.usage.cached_tokens": 832,
            "gen_ai.latency.time_to_first_token": 0.08,
            "gen_ai.latency.e2e": 0.4,
        },
        name="Req 1f2e",
        kind="internal",
    )
    assert (told.level, told.prompt_tokens, told.cached_tokens, told.ttft_seconds) == (Level.ENGINE, 900, 832, 0.08)


def test_our_router() -> None:
    told = read(
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "tiny",
            "gen_ai.usage.input_tokens": 40,
            "gen_ai.usage.output_tokens": 2,
            "prefixwatch.policy": "affinity",
            "prefixwatch.worker": "a",
            "prefixwatch.reason": "sticky",
            "prefixwatch.predicted_cached_tokens": 16,
            "prefixwatch.reported_cached_tokens": 32,
            "prefixwatch.decision_seconds": 0.0004,
            "prefixwatch.time_to_first_token_seconds": 0.1,
            "prefixwatch.retries": 1,
            "prefixwatch.tenant": "alice",
            "prefixwatch.outcome": "timed_out",
        },
        kind="server",
    )
    assert (told.level, told.worker, told.policy, told.reason) == (Level.ROUTER, "a", "affinity", "sticky")
    assert (told.prompt_tokens, told.cached_tokens, told.predicted_tokens, told.output_tokens) == (40, 32, 16, 2)
    assert (told.ttft_seconds, told.decision_seconds, told.retries) == (0.1, 0.0004, 1)
    assert (told.tenant, told.model, told.outcome) == ("alice", "tiny", "timed_out")


def test_envoy_ai_gateway_as_openinference() -> None:
    told = read(
        {
            "openinference.span.kind": "LLM",
            "llm.model_name": "gpt-oss",
            "llm.token_count.prompt": 500,
            "llm.token_count.prompt_details.cache_read": 0,
            "llm.token_count.completion": 20,
        },
        name="ChatCompletion",
        kind="internal",
        events={"First Token Stream Event": 0.3},
    )
    assert (told.producer, told.level, told.model) == ("openinference", Level.GATEWAY, "gpt-oss")
    assert (told.prompt_tokens, told.cached_tokens, told.output_tokens) == (500, 0, 20)
    assert told.ttft_seconds == pytest.approx(0.3)


def test_litellm() -> None:
    told = read(
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "gpt-oss",
            "gen_ai.response.model": "gpt-oss-120b",
            "gen_ai.usage.input_tokens": 500,
            "gen_ai.usage.cache_read.input_tokens": 480,
            "gen_ai.usage.output_tokens": 20,
            "gen_ai.response.time_to_first_chunk": 0.2,
            "gen_ai.conversation.id": "session-1",
            "litellm.call_id": "x",
            "litellm.request.streaming": True,
        }
    )
    assert (told.producer, told.level, told.model) == ("litellm", Level.GATEWAY, "gpt-oss-120b")
    assert (told.prompt_tokens, told.cached_tokens, told.ttft_seconds) == (500, 480, 0.2)
    assert told.session == "session-1"


def test_litellms_older_spans_hold_every_value_as_text() -> None:
    older = {"gen_ai.operation.name": "acompletion", "gen_ai.usage.input_tokens": "500", "llm.is_streaming": "True"}
    told = read(older)
    assert (told.producer, told.prompt_tokens) == ("litellm", 500)


def test_openllmetry() -> None:
    told = read(
        {
            "gen_ai.request.model": "gpt-oss",
            "llm.request.type": "chat",
            "gen_ai.usage.input_tokens": 500,
            "gen_ai.usage.cache_read_input_tokens": 128,
            "gen_ai.usage.output_tokens": 20,
        },
        events={"llm.content.completion.chunk": 0.4},
    )
    assert (told.level, told.cached_tokens) == (Level.CLIENT, 128)
    assert told.ttft_seconds == pytest.approx(0.4)


@pytest.mark.parametrize(
    "attributes",
    [
        {"gen_ai.operation.name": "invoke_agent", "gen_ai.usage.input_tokens": 9_000},
        {"gen_ai.operation.name": "embeddings", "gen_ai.usage.input_tokens": 10},
        {"traceloop.span.kind": "workflow", "gen_ai.usage.input_tokens": 10},
        {"openinference.span.kind": "AGENT", "llm.token_count.prompt": 10},
        {"http.response.status_code": 200},
        {},
    ],
)
def test_agents_tools_and_plain_http_are_no_requests(attributes: Mapping[str, Value]) -> None:
    """An agent's span sums the tokens of its calls: counting it would count them twice."""
    assert request_span(span(attributes), shipped_table()) is None


@pytest.mark.parametrize(
    ("attributes", "outcome"),
    [
        ({}, "completed"),
        ({"error.type": "429"}, "refused"),
        ({"http.response.status_code": 503}, "refused"),
        ({"http.response.status_code": 504}, "timed_out"),
        ({"http.status_code": 400}, "rejected"),
        ({"error.type": "500"}, "failed"),
        ({"error.type": "openai.APITimeoutError"}, "timed_out"),
        ({"error.type": "RateLimitError"}, "refused"),
        ({"error.type": "asyncio.CancelledError"}, "disconnected"),
        ({"error.type": "ValueError"}, "failed"),
    ],
)
def test_how_a_request_ended(attributes: Mapping[str, Value], outcome: str) -> None:
    assert read({"gen_ai.operation.name": "chat", **attributes}).outcome == outcome


def test_an_error_status_alone_is_a_failure() -> None:
    assert read({"gen_ai.operation.name": "chat"}, failed=True).outcome == "failed"


@pytest.mark.parametrize(
    ("attributes", "events", "fault"),
    [
        ({"gen_ai.usage.input_tokens": -1}, {}, "prompt_tokens_out_of_range"),
        ({"gen_ai.usage.input_tokens": float("nan")}, {}, "prompt_tokens_out_of_range"),
        ({"gen_ai.usage.input_tokens": True}, {}, "prompt_tokens_out_of_range"),
        ({"gen_ai.usage.input_tokens": 1.5}, {}, "prompt_tokens_not_whole"),
        ({"gen_ai.usage.output_tokens": 10**12}, {}, "output_tokens_out_of_range"),
        ({"gen_ai.usage.input_tokens": 10, "gen_ai.usage.cached_tokens": 11}, {}, "cached_beyond_prompt"),
        ({"gen_ai.latency.time_to_first_token": -0.5}, {}, "ttft_seconds_out_of_range"),
        ({"gen_ai.latency.time_to_first_token": 2.5}, {}, "first_token_after_end"),
        ({}, {"gen_ai.first_token": -1.0}, "first_token_before_start"),
    ],
)
def test_what_cant_be_true_is_dropped_and_named(
    attributes: Mapping[str, Value], events: Mapping[str, float], fault: str
) -> None:
    told = read({"gen_ai.operation.name": "chat", **attributes}, events=events)
    assert told.faults == (fault,)
    assert (told.ttft_seconds, told.cached_tokens, told.output_tokens) == (None, None, None)


def test_a_configured_attribute_names_the_tenant_before_the_tables_own() -> None:
    table = shipped_table().with_tenant_attributes(["team.id"])
    told = request_span(span({"gen_ai.operation.name": "chat", "team.id": "blue", "prefixwatch.tenant": "x"}), table)
    assert told is not None
    assert told.tenant == "blue"
    assert "team.id" in table.wanted


_values = st.one_of(st.text(max_size=8), st.booleans(), st.integers(), st.floats())


@given(st.dictionaries(st.sampled_from(sorted(shipped_table().wanted)), _values), st.sampled_from(["", "server"]))
def test_no_attributes_break_it(attributes: dict[str, Value], kind: str) -> None:
    told = request_span(span(attributes, kind=kind), shipped_table())
    if told is not None:
        counts = (told.prompt_tokens, told.cached_tokens, told.output_tokens)
        assert all(count is None or count >= 0 for count in counts)
        assert told.ttft_seconds is None or 0 < told.ttft_seconds <= (told.e2e_seconds or 0) + 0.001
