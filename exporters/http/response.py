"""HTTP/1.1 responses from anybody: read as the bytes arrive, within limits, and no bytes are trusted.

A head, then a body in one of the three framings of RFC 9112, section 6: a length, chunks, or all until the peer
closes. Nothing here does I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

MOST_HEAD_BYTES = 65_536
_MOST_CHUNK_LINE_BYTES = 4_096

_BEGINS = b"HTTP/1."
_STATUS_LINE = re.compile(rb"HTTP/1\.(\d) +(\d{3})(?: +([^\n]*))?")
_HEAD_END = re.compile(rb"\n\r?\n")
_FOLDED = re.compile(rb"\r?\n[ \t]+")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_WITHOUT_BODY = frozenset({204, 304})


class BadHttp(Exception):
    """What came is no HTTP/1.1 response."""


class TooLarge(Exception):
    """A body of more bytes than allowed."""


class Answer(NamedTuple):
    """A response. Header names are in lower case, repeated ones joined with a comma.

    The body is read only of a 200: of another one it is empty.
    """

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes = b""


class ResponseReader:
    """Reads one response with a body of up to `limit_bytes`."""

    __slots__ = ("_body", "_buffer", "_chunks", "_head", "_left", "_limit_bytes", "_size", "answer", "reusable")

    def __init__(self, limit_bytes: int) -> None:
        self.answer: Answer | None = None
        """Once it is whole."""
        self.reusable = False
        """Whether the connection can be used again after this answer."""
        self._limit_bytes = limit_bytes
        self._buffer = b""
        """Of a head that isn't whole yet."""
        self._head: Answer | None = None
        self._chunks: _Chunks | None = None
        self._left: int | None = None
        """Bytes of the body that are still to come; None when only its end will tell."""
        self._body: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> None:
        """Take in what arrived. Raises BadHttp or TooLarge."""
        while self._head is None:
            rest = self._feed_head(data)
            if rest is None:
                return
            data = rest  # what follows an interim 1xx is the real head
        if self.answer is None:
            self._feed_body(data)

    def end(self) -> None:
        """The peer has closed. Raises ConnectionResetError, or BadHttp, when that isn't how this response ends."""
        if self.answer is not None:
            return
        if self._head is None or self._chunks is not None or self._left is not None:
            raise ConnectionResetError("the connection was closed before the answer was whole")
        self._finish()

    def _feed_head(self, data: bytes) -> bytes | None:
        """What follows the head; None while that isn't whole."""
        searched = max(0, len(self._buffer) - 3)
        data = self._buffer + data
        if not _BEGINS.startswith(data[: len(_BEGINS)]):
            raise BadHttp(f"the answer begins {data[:20]!r}, not with HTTP/1.")
        match = _HEAD_END.search(data, searched)
        if (match.end() if match else len(data)) > MOST_HEAD_BYTES:
            raise BadHttp(f"headers of more than {MOST_HEAD_BYTES} bytes")
        if match is None:
            self._buffer = data
            return None
        self._buffer = b""
        self._take_head(data[: match.start()])
        return data[match.end() :]

    def _take_head(self, head: bytes) -> None:
        status = _STATUS_LINE.match(head)
        if status is None:
            raise BadHttp(f"the status line is {head[:40]!r}")
        code = int(status[2])
        if 100 <= code < 200 and code != 101:
            return
        headers = _headers(head[status.end() :])
        self._head = Answer(code, (status[3] or b"").strip().decode("latin-1"), headers)
        self._frame(self._head, persistent=status[1] != b"0")

    def _frame(self, head: Answer, *, persistent: bool) -> None:
        """How long the body is and whether another answer can follow it."""
        headers = head.headers
        options = headers.get("connection", "").lower()
        self.reusable = "close" not in options if persistent else "keep-alive" in options
        length = headers.get("content-length")
        if (coding := headers.get("transfer-encoding")) is not None:
            if coding.lower() != "chunked":
                raise BadHttp(f"Transfer-Encoding {coding[:40]} is not supported")
            self.reusable = self.reusable and length is None
            self._chunks = _Chunks()
        elif head.status in _WITHOUT_BODY:
            self._left = 0
        elif length is not None:
            self._left = _length(length)
            if head.status == 200 and self._left > self._limit_bytes:
                raise TooLarge
        else:
            self.reusable = False

    def _feed_body(self, data: bytes) -> None:
        head = self._head
        assert head is not None
        if head.status != 200:  # nobody reads it; unless it is here already the connection goes with it
            self.reusable = self.reusable and self._left == len(data)
            self._finish()
        elif self._chunks is not None:
            self._keep(self._chunks.feed(data))
            if self._chunks.rest is not None:
                self.reusable = self.reusable and not self._chunks.rest
                self._finish()
        elif self._left is None:
            self._keep(data)
        else:
            if len(data) > self._left:
                data = data[: self._left]
                self.reusable = False  # an answer that nobody asked for
            self._left -= len(data)
            self._keep(data)
            if not self._left:
                self._finish()

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit_bytes:
            raise TooLarge
        self._body.append(data)

    def _finish(self) -> None:
        head = self._head
        assert head is not None
        self.answer = Answer(head.status, head.reason, head.headers, b"".join(self._body))
        self._body = []


class _Chunks:
    """A body in chunks; `rest` is what followed the last one, None before that has come."""

    __slots__ = ("_buffer", "_left", "_line", "_trailer_bytes", "rest")

    def __init__(self) -> None:
        self.rest: bytes | None = None
        self._buffer = b""
        self._left = 0
        """Bytes of the current chunk that are still to come."""
        self._line = "size"
        """The line that comes next: a chunk's `size`, the `end` of one, or a `trailer`."""
        self._trailer_bytes = 0

    def feed(self, data: bytes) -> bytes:
        """The body's bytes among these. Raises BadHttp."""
        data = self._buffer + data
        self._buffer = b""
        at, body = 0, []
        while self.rest is None:
            if self._left:
                piece = data[at : at + self._left]
                body.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
                self._line = "end"
            end = data.find(b"\n", at)
            if end < 0:
                self._buffer = data[at:]
                if len(self._buffer) > _MOST_CHUNK_LINE_BYTES:
                    raise BadHttp("a chunk's line does not end")
                break
            line = data[at:end].rstrip(b"\r")
            at = end + 1
            self._take_line(line)
            if self._line == "":
                self.rest = data[at:]
        return b"".join(body)

    def _take_line(self, line: bytes) -> None:
        if self._line == "end":
            if line:
                raise BadHttp("a chunk is longer than it says")
            self._line = "size"
        elif self._line == "size":
            self._left = _chunk_size(line)
            self._line = "end" if self._left else "trailer"
        else:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > MOST_HEAD_BYTES:
                raise BadHttp(f"trailers of more than {MOST_HEAD_BYTES} bytes")
            self._line = "trailer" if line else ""


def _headers(lines: bytes) -> dict[str, str]:
    text = (_FOLDED.sub(b" ", lines) if b"\n " in lines or b"\n\t" in lines else lines).decode("latin-1")
    headers: dict[str, str] = {}
    for line in text.split("\n"):
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name):
            if line.strip():
                raise BadHttp(f"{line[:40]!r} is no header")
            continue
        name, value = name.lower(), value.strip()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _length(text: str) -> int:
    """Of a Content-Length; the same length several times is one (RFC 9110, section 8.6)."""
    one, *others = {one.strip() for one in text.split(",")} if "," in text else (text,)
    if others or not (one.isascii() and one.isdigit()) or len(one) > 18:
        raise BadHttp(f"Content-Length is {text[:40]!r}")
    return int(one)


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not re.fullmatch(rb"[0-9A-Fa-f]{1,15}", digits):
        raise BadHttp(f"a chunk's size is {digits[:20]!r}")
    return int(digits, 16)
