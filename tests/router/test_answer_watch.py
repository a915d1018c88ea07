from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.sse import AnswerWatch
from tests.router.fake_engine import DONE, ROLE, delta, usage


def watched(*chunks: bytes) -> AnswerWatch:
    watch = AnswerWatch()
    for chunk in chunks:
        watch.feed(chunk)
    return watch


def seen(watch: AnswerWatch) -> tuple[Any, ...]:
    counts = (watch.prompt_tokens, watch.cached_tokens, watch.output_tokens)
    return (watch.content_seen, watch.done, watch.error, counts, watch.inside_event)


POSING = delta('\\"usage\\" "error" [DONE]')
EVENTS = [ROLE, delta("a"), POSING, delta("中文"), usage(40, 16), DONE, b": ping\n\n"]


@given(st.lists(st.sampled_from(EVENTS), max_size=8), st.lists(st.integers(0, 400), max_size=12))
def test_where_a_stream_is_cut_makes_no_difference(stream: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(stream)
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    pieces = [whole[a:b] for a, b in itertools.pairwise(edges)]
    assert seen(watched(*pieces)) == seen(watched(*stream))


def test_a_role_or_an_empty_text_is_not_content() -> None:
    assert not watched(ROLE, delta(""), b'data: {"choices":[{"text":""}]}\n\n').content_seen


@pytest.mark.parametrize(
    "choice",
    [
        {"delta": {"content": "x"}},
        {"delta": {"reasoning_content": "x"}},
        {"delta": {"reasoning": "x"}},
        {"delta": {"tool_calls": [{"index": 0}]}},
        {"text": "x"},
    ],
)
def test_text_reasoning_and_tool_calls_are_content(choice: dict[str, Any]) -> None:
    assert watched(f"data: {json.dumps({'choices': [choice]})}\n\n".encode()).content_seen


def test_cached_tokens_that_nobody_reports_are_unknown_and_not_zero() -> None:
    watch = watched(delta("x"), usage(prompt=40, cached=None), DONE)
    assert (watch.prompt_tokens, watch.cached_tokens) == (40, None)


def test_generated_text_cannot_pose_as_an_error_or_the_end() -> None:
    watch = watched(delta("x"), delta('data: [DONE]\n\ndata: {"error":{"message":"no"}}'))
    assert (watch.done, watch.error) == (False, None)


@pytest.mark.parametrize(
    ("event", "message", "overload"),
    [
        ({"error": {"message": "queue full", "code": 503}}, "queue full", True),
        ({"error": {"message": "slow down", "code": "429"}}, "slow down", True),
        ({"error": {"message": "died", "type": "InternalServerError", "code": None}}, "died", False),
        ({"error": "plain"}, "plain", False),
        ({"object": "error", "message": "older form", "code": 500}, "older form", False),
    ],
)
def test_errors_inside_a_stream(event: dict[str, Any], message: str, overload: bool) -> None:
    error = watched(f"data: {json.dumps(event)}\n\n".encode(), DONE).error
    assert error is not None
    assert (error.message, error.overload) == (message, overload)


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_no_bytes_upset_it(chunks: list[bytes]) -> None:
    watched(*chunks)
