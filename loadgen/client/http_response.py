"""HTTP/1.1 responses, read as the bytes arrive, by llhttp, the parser of Node.js.

llhttp refuses what other readers of the same bytes could understand otherwise: two lengths, a length that isn't a
number, chunks longer than they say.
"""

from __future__ import annotations

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

MAX_HEAD_BYTES = 65_536

_NO_BODY = frozenset({204, 304})


class HttpError(Exception):
    """The bytes are not an HTTP/1.1 response."""


class HttpResponse:
    """One response, fed incrementally. Bytes after its end make the connection unusable for another request."""

    __slots__ = ("_body", "_fed", "_parser", "chunked", "complete", "headers", "keep_alive", "status")

    def __init__(self) -> None:
        self.status: int | None = None
        """None until the whole head has been read."""
        self.headers: dict[str, str] = {}
        """By lower-case name."""
        self.keep_alive = False
        """Whether the connection can serve another request, once this response is complete."""
        self.complete = False
        self.chunked = False
        """Whether the body comes in chunks, and so may be parsed later: see `may_end_in`."""
        self._body = b""
        self._fed = 0
        self._parser = HttpResponseParser(self)

    def feed(self, received: bytes) -> bytes:
        """The body bytes among these. Raises HttpError for bytes that aren't HTTP."""
        self._body = b""
        try:
            self._parser.feed_data(received)
        except HttpError:
            raise
        except (HttpParserError, HttpParserUpgrade) as error:
            cause = error.__context__
            if isinstance(cause, HttpError):
                raise cause from None
            raise HttpError(f"not an HTTP/1.1 response: {error}") from error
        if self.status is None:
            self._fed += len(received)
            if self._fed > MAX_HEAD_BYTES:
                raise HttpError("response head longer than 64 KiB")
        return self._body

    def end_of_connection(self) -> bool:
        """The peer closed the connection: whether this response was meant to end that way."""
        by_length = self.chunked or "content-length" in self.headers or self.status in _NO_BODY
        if self.status is not None and not by_length:
            self.complete = True
        return self.complete

    # What follows is called by the parser.

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.complete:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:  # an interim response: the real one follows
            self.headers.clear()
            return
        coding = self.headers.get("transfer-encoding")
        if coding is not None and coding.strip().lower() != "chunked":
            raise HttpError(f"transfer-encoding is {coding!r}: only chunked was asked for")
        self.status, self.chunked = status, coding is not None
        self.keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if not self.complete:
            self._body = self._body + body if self._body else body

    def on_message_complete(self) -> None:
        if self.status is not None:
            self.complete = True


def may_end_in(received: bytes) -> bool:
    """Whether a chunked response may be complete with these bytes: an empty line comes last."""
    return received[-4:] == b"\r\n\r\n" or len(received) < 4
