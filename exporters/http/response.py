"""HTTP/1.1 responses, read as the bytes arrive and within limits. No bytes are trusted; nothing here does I/O.

Parsing is llhttp's, by way of httptools. What is added here are the limits, and that only a 200 has a body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import httptools

MOST_HEAD_BYTES = 65_536
"""Of a head, and of all other bytes that are not body: trailers and the lines of chunks, between two pieces of body."""

_NO_LENGTH = -1
_INTERIM = range(100, 200)


class BadHttp(Exception):
    """What came is not an HTTP/1.1 response."""


class TooLarge(Exception):
    """A body of more bytes than allowed."""


class Answer(NamedTuple):
    """A response. Header names are in lower case, repeated ones joined with a comma.

    Only the body of a 200 is read: the others' are empty.
    """

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes = b""


class ResponseReader:
    """Reads one response with a body of up to `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self.answer: Answer | None = None
        """Once it is complete."""
        self.reusable = False
        """Whether the connection can be used again after this answer."""
        self._limit_bytes = limit_bytes
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        """None once the answer is complete: the parser refers back to its reader, and a cycle keeps a page's bytes
        until the next garbage collection."""
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True)
        self._problem: Exception | None = None
        self._status = 0
        self._reason = b""
        self._headers: dict[str, str] = {}
        self._headed = self._ended = False
        self._framing_bytes = 0
        """Bytes since the last piece of body that belong to no body."""
        self._body: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> None:
        """Read what arrived. Raises BadHttp or TooLarge."""
        parser = self._parser
        if parser is None:
            self.reusable = False  # an answer that nobody asked for
            return
        self._framing_bytes += len(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._problem = BadHttp("the server switched to another protocol")
        except httptools.HttpParserError as error:
            if self.answer is None:
                self._problem = self._problem or BadHttp(f"{error} at {data[:40]!r}")
            self.reusable = False
        if self._problem is None and self.answer is None and self._framing_bytes > MOST_HEAD_BYTES:
            self._problem = BadHttp(f"headers, trailers or chunk lines of more than {MOST_HEAD_BYTES} bytes")
        if self._problem is not None and self.answer is None:
            raise self._problem
        if self._headed and self.answer is None and self._status != 200:
            self._finish()  # nobody reads its body, so the connection ends here unless the body has arrived
        if self.answer is not None:
            self._parser = None

    def end(self) -> None:
        """The peer has closed. Raises ConnectionResetError when that isn't how this response ends."""
        if self.answer is not None:
            return
        if not self._headed or {"content-length", "transfer-encoding"} & self._headers.keys():
            raise ConnectionResetError("the connection was closed before the answer was complete")
        self._finish()

    def on_message_begin(self) -> None:
        if self.answer is not None:
            self.reusable = False  # an answer that nobody asked for
        else:
            self._reason, self._headers, self._headed = b"", {}, False

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._headed or self.answer is not None:
            return  # a trailer
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        assert self._parser is not None  # it is what calls
        status = self._parser.get_status_code()
        if self.answer is not None or status in _INTERIM:
            return
        self._status = status
        self._headed = True
        coding = self._headers.get("transfer-encoding", "chunked")
        if coding.lower() != "chunked":
            self._problem = BadHttp(f"Transfer-Encoding {coding[:40]} is not supported")
        length = int(self._headers.get("content-length", _NO_LENGTH))
        if status == 200 and length > self._limit_bytes:
            self._problem = TooLarge()

    def on_body(self, data: bytes) -> None:
        if self.answer is not None:
            return
        self._framing_bytes = 0
        self._size += len(data)
        if self._size > self._limit_bytes and self._status == 200:
            self._problem = TooLarge()
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        if self.answer is None and self._headed and self._problem is None:
            assert self._parser is not None  # it is what calls
            self._finish()
            self.reusable = self._parser.should_keep_alive()

    def _finish(self) -> None:
        body = b"".join(self._body) if self._status == 200 else b""
        self.answer = Answer(self._status, self._reason.decode("latin-1").strip(), self._headers, body)
