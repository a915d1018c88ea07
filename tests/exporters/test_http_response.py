"""Reading HTTP responses that anybody may have written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.exporters.http.response import MOST_HEAD_BYTES, Answer, BadHttp, ResponseReader, TooLarge

LIMIT_BYTES = 100

WITH_LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nX-A: 1\r\nx-a: 2\r\n\r\nload 1\n"
IN_CHUNKS = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;why=not\r\nloa\r\n004\r\nd 1\n\r\n0\r\nTrailer: t\r\n\r\n"
)
TO_THE_END = b"HTTP/1.0 200 OK\r\n\r\nload 1\n"
AFTER_INTERIM = b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" * 3 + WITH_LENGTH
BARE_LINE_ENDS = WITH_LENGTH.replace(b"\r\n", b"\n")


def read(*pieces: bytes, ends: bool = False) -> tuple[Answer | None, bool]:
    reader = ResponseReader(LIMIT_BYTES)
    for piece in pieces:
        reader.feed(piece)
    if ends:
        reader.end()
    return reader.answer, reader.reusable


@pytest.mark.parametrize(
    ("response", "reusable"),
    [
        (WITH_LENGTH, True),
        (IN_CHUNKS, True),
        (TO_THE_END, False),
        (AFTER_INTERIM, True),
        (BARE_LINE_ENDS, True),
        (WITH_LENGTH.replace(b"1.1", b"1.0"), False),
        (WITH_LENGTH.replace(b"X-A: 1", b"Connection: close"), False),
        (WITH_LENGTH.replace(b"1.1", b"1.0").replace(b"X-A: 1", b"Connection: Keep-Alive"), True),
    ],
)
@given(data=st.data())
def test_a_body_is_the_same_however_it_arrives(response: bytes, reusable: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(response) - 1), max_size=5)))
    pieces = [response[start:stop] for start, stop in zip([0, *cuts], [*cuts, None], strict=True)]
    answer, again = read(*pieces, ends=response is TO_THE_END)
    assert answer is not None
    assert (answer.status, answer.reason, answer.body, again) == (200, "OK", b"load 1\n", reusable)


def test_headers_are_in_lower_case_and_repeated_ones_joined() -> None:
    answer, _ = read(WITH_LENGTH)
    assert answer is not None
    assert answer.headers == {"content-length": "7", "x-a": "1, 2"}


@pytest.mark.parametrize(
    ("response", "reusable"),
    [
        (b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno", True),
        (b"HTTP/1.1 500 No\r\nContent-Length: 1000000\r\n\r\nno", False),
        (b"HTTP/1.1 404 No\r\n\r\n", False),
        (b"HTTP/1.1 302 No\r\nTransfer-Encoding: chunked\r\n\r\n", False),
    ],
)
def test_another_status_is_an_answer_at_once(response: bytes, reusable: bool) -> None:
    """A failing target that trickles its error page still says at once that it fails."""
    answer, again = read(response)
    assert answer is not None
    assert (answer.reason, answer.body, again) == ("No", b"", reusable)


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "Expected HTTP/.* at b'SSH-2.0"),
        (b"HTTP/2 200\r\n\r\n", "Expected dot at b'HTTP/2"),
        (b"HTTP/1.1 OK\r\n\r\n", "Invalid status code"),
        (b"HTTP/1.1 200 OK\r\nX-A\r\n\r\n", "Invalid header token"),
        (b"HTTP/1.1 200 OK\r\nX A: 1\r\n\r\n", "Invalid header token"),
        (b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * MOST_HEAD_BYTES, "headers, .* of more than 65536 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "Invalid character in Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "Content-Length"),
        (IN_CHUNKS.replace(b"Transfer", b"Content-Length: 3\r\nTransfer"), "Transfer-Encoding"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "gzip, chunked is not supported"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", "Invalid character in chunk size"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n", "chunk data"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 5_000, "Chunk size overflow"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 20_000, "trailers or"),
        (b"HTTP/1.1 204 None\r\nX-A: a\r\n  folded\r\n\r\n", "whitespace after header value"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n", "another protocol"),
    ],
)
def test_what_is_no_response_is_refused(response: bytes, why: str) -> None:
    with pytest.raises(BadHttp, match=why):
        read(response)


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * 101,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffff\r\n" + b"a" * 101,
    ],
)
def test_a_body_beyond_the_limit_is_too_large(response: bytes) -> None:
    with pytest.raises(TooLarge):
        read(response)


@pytest.mark.parametrize("response", [b"", WITH_LENGTH[:-1], IN_CHUNKS[:-1], b"HTTP/1.1 200 OK\r\n"])
def test_an_end_before_the_end_is_a_reset(response: bytes) -> None:
    with pytest.raises(ConnectionResetError):
        read(response, ends=True)


def test_bytes_after_the_answer_are_nobodys_and_end_the_connection() -> None:
    answer, reusable = read(WITH_LENGTH + b"HTTP/1.1 200 OK\r\n")
    assert answer is not None
    assert (answer.body, reusable) == (b"load 1\n", False)


@given(
    st.lists(
        st.one_of(st.binary(max_size=20), st.sampled_from([WITH_LENGTH, IN_CHUNKS, b"\r\n\r\n", b"HTTP/1.1 200 "])),
        max_size=6,
    )
)
def test_nothing_else_is_ever_raised(pieces: list[bytes]) -> None:
    reader = ResponseReader(LIMIT_BYTES)
    try:
        for piece in pieces:
            reader.feed(piece)
        reader.end()
    except (BadHttp, TooLarge, ConnectionResetError):
        return
    assert reader.answer is not None
