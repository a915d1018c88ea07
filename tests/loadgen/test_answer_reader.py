from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.loadgen.client import answer_reader
from prefixwatch.loadgen.client.answer_reader import AnswerReader, Exchange
from prefixwatch.loadgen.client.http_response import HttpError
from prefixwatch.loadgen.request_log.records import Outcome

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def event(content: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'delta': {'content': content}}]})}\n\n".encode()


STEP = 2.0**-7
"""Seconds between two reads: many of them within KEPT_SECONDS, and sums of it are exact."""
DONE = chunk(b"data: [DONE]\n\n")


def read(reads: list[bytes]) -> Exchange:
    """All of these reads, stamped 1, 2, 3, … steps; the last one must end the answer."""
    reader = AnswerReader(Exchange(0.0))
    over = [reader.take(data, number * STEP) for number, data in enumerate(reads, start=1)]
    assert over == [False] * (len(reads) - 1) + [True]
    return reader.exchange


def test_a_read_counts_at_its_own_stamp_however_late_it_is_parsed() -> None:
    got = read([HEAD, chunk(event("")), chunk(event("A")), chunk(b": ping\n\n"), chunk(event("B")), DONE + END])
    assert (got.first_event, got.first_token, got.last_token, got.end) == (2 * STEP, 3 * STEP, 5 * STEP, 6 * STEP)
    assert (got.gaps_seconds, got.outcome) == ([2 * STEP], Outcome.COMPLETED)


def kept_after(seconds_between: float, reads: int) -> int:
    """How many of these reads after the head aren't parsed yet."""
    reader = AnswerReader(Exchange(0.0))
    reader.take(HEAD, 0.0)
    for number in range(1, reads + 1):
        reader.take(chunk(event("A")), number * seconds_between)
    return reads if reader.behind_since == seconds_between else 0


@pytest.mark.parametrize(
    ("seconds_between", "reads", "kept"),
    [
        (0.001, answer_reader.KEPT_READS - 1, answer_reader.KEPT_READS - 1),
        (0.001, answer_reader.KEPT_READS, 0),
        (answer_reader.KEPT_SECONDS / 2, 3, 3),
        (answer_reader.KEPT_SECONDS / 2, 4, 0),
    ],
)
def test_neither_too_many_reads_are_kept_nor_for_too_long(seconds_between: float, reads: int, kept: int) -> None:
    """A pause in which much is parsed would make stamps of other streams late."""
    assert kept_after(seconds_between, reads) == kept


@pytest.mark.parametrize("cut", range(1, len(END)))
def test_the_end_is_seen_at_once_however_it_is_cut(cut: int) -> None:
    got = read([HEAD, chunk(event("A")), DONE + END[:cut], END[cut:]])
    assert (got.outcome, got.end) == (Outcome.COMPLETED, 4 * STEP)


def test_the_end_is_seen_at_once_after_trailers() -> None:
    got = read([HEAD, chunk(event("A")), DONE, b"0\r\nX-Checksum: 1\r\n", b"\r\n"])
    assert (got.outcome, got.end) == (Outcome.COMPLETED, 5 * STEP)


def test_nonsense_among_kept_reads_is_an_error_when_they_are_parsed() -> None:
    reader = AnswerReader(Exchange(0.0))
    for number, data in enumerate([HEAD, chunk(event("A")), b"nonsense\r\nthat is no chunk"]):
        assert not reader.take(data, number * STEP)
    with pytest.raises(HttpError, match="chunk size"):
        reader.catch_up()
    assert reader.exchange.first_token == STEP


def test_what_stops_an_answer_is_told_after_what_its_kept_reads_brought() -> None:
    reader = AnswerReader(Exchange(0.0))
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7}}\n\n'
    for number, data in enumerate([HEAD, chunk(event("A")), chunk(usage)]):
        reader.take(data, number * STEP)
    reader.stopped(Outcome.TIMED_OUT, "inter_token_stall")
    got = reader.exchange
    assert (got.outcome, got.error, got.first_token) == (Outcome.TIMED_OUT, "inter_token_stall", STEP)
    assert got.usage.prompt_tokens == 7


def test_bytes_after_the_end_are_an_error() -> None:
    reader = AnswerReader(Exchange(0.0))
    reader.take(HEAD, 0.0)
    reader.take(chunk(event("A")) + END + b"HTTP/1.1 200 OK", 1.0)
    with pytest.raises(HttpError, match="after the end"):
        reader.catch_up()


_newline = st.sampled_from([b"\n", b"\r\n"])
_line = st.sampled_from(
    [event("").strip(), event("A").strip(), event("é\r\n0").strip(), b": ping", b"event: x", b"data: [DONE]"]
)


@given(st.lists(_line, min_size=1, max_size=12), _newline, st.data())
def test_keeping_reads_changes_nothing_but_when_they_are_parsed(
    lines: list[bytes], newline: bytes, data: st.DataObject
) -> None:
    body = b"".join(line + newline * 2 for line in lines)
    chunk_cuts = sorted(data.draw(st.sets(st.integers(1, len(body) - 1), max_size=6)))
    stream = b"".join(chunk(body[a:b]) for a, b in pairwise([0, *chunk_cuts, len(body)])) + END
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=12)))
    reads = [HEAD, *(stream[a:b] for a, b in pairwise([0, *cuts, len(stream)]))]
    kept = read(reads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_reader, "KEPT_READS", 1)
        assert kept == read(reads)
