from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.loadgen.client.http_response import HttpError, HttpResponse


def read(*pieces: bytes) -> tuple[HttpResponse, bytes]:
    response = HttpResponse()
    return response, b"".join(response.feed(piece) for piece in pieces)


def test_a_body_of_known_length() -> None:
    response, body = read(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhel", b"lo")
    assert body == b"hello"
    assert (response.status, response.headers["x-a"], response.complete, response.keep_alive) == (200, "b", True, True)


def test_a_chunked_body_with_extension_and_trailer() -> None:
    response, body = read(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=1\r\nabc\r\n0A\r\n0123456789\r\n0\r\nT: 1\r\n\r\n"
    )
    assert (body, response.complete) == (b"abc0123456789", True)


def test_a_chunked_body_is_handed_over_before_its_chunk_ends() -> None:
    response, body = read(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nabc")
    assert (body, response.complete) == (b"abc", False)


def test_a_body_without_length_ends_with_the_connection() -> None:
    response, body = read(b"HTTP/1.1 200 OK\r\n\r\nabc")
    assert (body, response.complete, response.keep_alive) == (b"abc", False, False)
    assert response.end_of_connection()


def test_a_chunked_body_cut_by_the_connection_is_not_complete() -> None:
    response, _ = read(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
    assert not response.end_of_connection()


def test_an_interim_response_is_skipped() -> None:
    response, body = read(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Busy\r\nContent-Length: 1\r\n\r\nx")
    assert (response.status, body) == (503, b"x")


def test_connection_close_forbids_another_request() -> None:
    response, _ = read(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    assert (response.complete, response.keep_alive) == (True, False)


@pytest.mark.parametrize(
    "bytes_", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"x" * 70_000]
)
def test_other_bytes_are_no_http(bytes_: bytes) -> None:
    with pytest.raises(HttpError):
        read(bytes_)


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "bytes_",
    [
        HEAD + b"Content-Length: 5\r\nContent-Length: 9\r\n\r\nhello",
        HEAD + "Content-Length: ²\r\n\r\n".encode(),
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    ],
    ids=["two lengths", "superscript", "negative", "gzip", "length and chunks", "longer than it says", "upgrade"],
)
def test_bytes_that_others_could_read_otherwise_are_refused(bytes_: bytes) -> None:
    with pytest.raises(HttpError):
        read(bytes_)


def test_any_close_among_the_connections_options_forbids_another_request() -> None:
    response, _ = read(HEAD + b"Connection: close, TE\r\nContent-Length: 0\r\n\r\n")
    assert (response.complete, response.keep_alive) == (True, False)


@pytest.mark.parametrize("surplus", [b"x", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])
def test_bytes_after_the_end_leave_no_connection_for_another_request(surplus: bytes) -> None:
    response = HttpResponse()
    try:
        body = response.feed(HEAD + b"Content-Length: 2\r\n\r\nok" + surplus)
    except HttpError:
        return
    assert (body, response.complete, response.status, response.keep_alive) == (b"ok", True, 200, False)


def test_a_head_without_end_is_refused() -> None:
    with pytest.raises(HttpError, match="longer than 64 KiB"):
        read(*[HEAD] + [b"X-Long: " + b"y" * 1000 + b"\r\n"] * 70)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.data())
def test_any_split_gives_the_same_body(chunks: list[bytes], data: st.DataObject) -> None:
    coded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    stream = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + coded + b"0\r\n\r\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    response, body = read(*pieces)
    assert (body, response.complete) == (b"".join(chunks), True)
