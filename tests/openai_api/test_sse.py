from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.openai_api import sse
from prefixwatch.openai_api.sse import SseParser


def events_of(*pieces: bytes) -> list[bytes]:
    parser = SseParser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.end()


def test_an_event_ends_with_an_empty_line() -> None:
    parser = SseParser()
    assert parser.feed(b"data: one\n") == []
    assert parser.incomplete
    assert parser.feed(b"\n") == [b"one"]
    assert not parser.incomplete


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_all_three_line_ends_are_read(newline: bytes) -> None:
    stream = b"data: one" + newline + newline + b"data: two" + newline + newline
    assert events_of(stream) == [b"one", b"two"]


def test_the_last_event_may_lack_its_empty_line() -> None:
    assert events_of(b"data: one\n\ndata: two") == [b"one", b"two"]
    assert events_of(b"data: one\r") == [b"one"]


def test_one_byte_order_mark_may_open_the_stream() -> None:
    assert events_of(b"\xef\xbb", b"\xbfdata: x\n\n") == [b"x"]
    assert events_of(b"data: x\n\n\xef\xbb\xbfdata: y\n\n") == [b"x"]


@pytest.mark.parametrize("piece", [b"x" * 1000, b"data: x\n", b"data:\n"])
def test_an_event_without_an_end_is_dropped(monkeypatch: pytest.MonkeyPatch, piece: bytes) -> None:
    """Security review M7: 64 MB without a line end took 70 s, and all of it was kept."""
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 10_000)
    parser = SseParser()
    for _ in range(3000):
        assert parser.feed(piece) == []
    assert parser.too_long
    assert not parser.incomplete
    assert parser.feed(b"\n\ndata: x\n\n") == []


def test_a_long_event_is_read_in_linear_time() -> None:
    """Each byte is copied a bounded number of times, however small the reads."""
    parser = SseParser()
    for _ in range(200_000):
        parser.feed(b"data: xx")
    assert parser.feed(b"\n\n") == [b"xx" + b"data: xx" * 199_999]


def test_comments_and_other_fields_are_no_data() -> None:
    assert events_of(b": ping\n\nevent: error\nid: 7\ndata: x\n\n") == [b"x"]


def test_several_data_lines_join_with_a_newline() -> None:
    assert events_of(b"data: a\ndata:b\ndata\n\n") == [b"a\nb\n"]


def test_only_one_space_after_the_colon_is_dropped() -> None:
    assert events_of(b"data:  x\n\n") == [b" x"]


def test_a_character_cut_by_a_read_stays_whole() -> None:
    """api7/aisix#111 (RT32)"""
    stream = "data: schön 🙂\n\n".encode()
    for cut in range(len(stream)):
        assert events_of(stream[:cut], stream[cut:]) == ["schön 🙂".encode()]


_line = st.sampled_from(
    [
        b"data: x",
        b"data:",
        b"data: \xc3\xa9",
        b": c",
        b"",
        b"event: e",
        b"data",
        b"data: [DONE]",
        b"\xef\xbb\xbfdata: y",
    ]
)
_newline = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.tuples(_line, _newline), max_size=12), st.data())
def test_any_split_gives_the_same_events(lines: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    stream = b"".join(line + newline for line, newline in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert events_of(*pieces) == events_of(stream)
