"""Spans as real producers wrote them about the same two requests, a cold prompt and its repeat.

`spans/<producer>_<version>.json` are exports in OTLP's JSON. OpenLLMetry's, OpenInference's and LiteLLM's were made
against a simulated engine that reported 0 and 368 cached tokens; vLLM's own on its CPU build. LiteLLM's `metadata.*`
attributes, and addresses, are left out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixwatch.exporters.spans.decode import decode
from prefixwatch.exporters.spans.genai import Span, shipped_table
from prefixwatch.exporters.spans.requests import SpanRequests
from prefixwatch.kvcache.request_record import RequestRecord


def spans_of(producer: str) -> list[Span]:
    (file,) = (Path(__file__).parent / "spans").glob(f"{producer}_*.json")
    return decode(file.read_bytes(), "json", shipped_table().wanted, shipped_table().first_token_events)


def records_of(producer: str) -> list[RequestRecord]:
    spans = spans_of(producer)
    requests = SpanRequests(shipped_table(), str, str)
    for span in spans:
        requests.add(span, 0.0, span.end_ns / 1e9)
    assert requests.faults == {}
    return list(requests.all())


@pytest.mark.parametrize("producer", ["openllmetry-openai", "openinference-openai"])
def test_who_tells_cached_tokens_and_the_first_chunk(producer: str) -> None:
    cold, repeat = records_of(producer)
    assert [(r.prompt_tokens, r.cached_tokens, r.output_tokens) for r in (cold, repeat)] == [(373, 0, 4), (373, 368, 4)]
    assert [(r.outcome, r.model, r.worker) for r in (cold, repeat)] == [("completed", "tiny", "")] * 2
    assert cold.ttft_seconds is not None
    assert repeat.ttft_seconds is not None
    assert cold.e2e_seconds is not None
    assert repeat.ttft_seconds < cold.ttft_seconds < cold.e2e_seconds


def test_litellms_spans_know_neither() -> None:
    """Its default spans have no cached tokens and no first chunk: the requests count, their cache class is unknown."""
    records = records_of("litellm")
    assert [(r.prompt_tokens, r.cached_tokens, r.ttft_seconds, r.output_tokens) for r in records] == [
        (373, None, None, 4)
    ] * 2
    assert [(r.outcome, r.model) for r in records] == [("completed", "tiny")] * 2


def test_vllm_knows_the_first_token_and_not_the_cache() -> None:
    cold, repeat = records_of("vllm")
    assert (cold.prompt_tokens, cold.output_tokens) == (repeat.prompt_tokens, repeat.output_tokens) == (313, 4)
    assert (cold.cached_tokens, repeat.cached_tokens) == (None, None)
    assert cold.ttft_seconds is not None
    assert repeat.ttft_seconds is not None
    assert repeat.ttft_seconds < cold.ttft_seconds
