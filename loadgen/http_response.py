"""HTTP/1.1 responses, read as the bytes arrive: head, then the body in whichever of the three framings it has."""

from __future__ import annotations

MAX_HEAD_BYTES = 65_536

_NO_BODY = frozenset({204, 304})
_HEX_DIGITS = b"0123456789abcdefABCDEF"


class HttpError(Exception):
    """The bytes are not an HTTP/1.1 response."""


class HttpResponse:
    """One response, fed incrementally. After `complete`, further bytes would belong to the next response."""

    __slots__ = ("_buffer", "_chunked", "_in_chunk_end", "_remaining", "complete", "headers", "keep_alive", "status")

    def __init__(self) -> None:
        self.status: int | None = None
        """None until the whole head has been read."""
        self.headers: dict[str, str] = {}
        """By lower-case name."""
        self.keep_alive = False
        self.complete = False
        self._buffer = b""
        self._chunked = False
        self._in_chunk_end = False
        self._remaining: int | None = None
        """Bytes left of the body, or of the current chunk; None: the body ends with the connection."""

    def feed(self, received: bytes) -> bytes:
        """The body bytes among these. Raises HttpError for bytes that are no HTTP."""
        at_chunk = self._remaining == 0 and self._chunked and not (self._buffer or self._in_chunk_end)
        if at_chunk and (body := _only_chunk(received)):
            return body
        data = self._buffer + received if self._buffer else received
        self._buffer = b""
        if self.status is None:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > MAX_HEAD_BYTES:
                    raise HttpError("response head longer than 64 KiB")
                self._buffer = data
                return b""
            self._read_head(data[:end])
            data = data[end + 4 :]
            if self.status is None:  # an interim 1xx: the real head follows
                return self.feed(data)
        return self._read_chunks(data) if self._chunked else self._read_plain(data)

    @property
    def chunked(self) -> bool:
        """Whether the body comes in chunks, and so may be looked at later: see `may_end_in`."""
        return self._chunked

    def end_of_connection(self) -> bool:
        """The peer closed: whether that is how this response was meant to end."""
        if self.status is not None and not self._chunked and self._remaining is None:
            self.complete = True
        return self.complete

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        parts = first.split(b" ", 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
            raise HttpError(f"not an HTTP/1.1 response: {first[:40]!r}")
        status = int(parts[1])
        if 100 <= status < 200:
            return
        self.status = status
        for line in lines:
            name, _, value = line.partition(b":")
            self.headers[name.decode("latin-1").strip().lower()] = value.decode("latin-1").strip()
        connection = self.headers.get("connection", "").lower()
        self.keep_alive = connection != "close" if parts[0] == b"HTTP/1.1" else connection == "keep-alive"
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        if self._chunked or status in _NO_BODY:
            self._remaining = 0
        elif (length := self.headers.get("content-length")) is not None:
            if not length.isdigit():
                raise HttpError(f"content-length is {length!r}")
            self._remaining = int(length)
        else:
            self.keep_alive = False

    def _read_plain(self, data: bytes) -> bytes:
        if self._remaining is None:
            return data
        body = data[: self._remaining]
        self._remaining -= len(body)
        self.complete = self._remaining == 0
        return body

    def _read_chunks(self, data: bytes) -> bytes:
        body: list[bytes] = []
        position = 0
        while not self.complete:
            if self._remaining:
                piece = data[position : position + self._remaining]
                if not piece:
                    break
                body.append(piece)
                position += len(piece)
                self._remaining -= len(piece)
                self._in_chunk_end = self._remaining == 0
                continue
            end = data.find(b"\r\n", position)
            if end < 0:
                self._buffer = data[position:]
                break
            line = data[position:end]
            position = end + 2
            if self._in_chunk_end:
                self._in_chunk_end = False
            elif self._remaining is None:  # trailers, up to an empty line
                self.complete = not line
            else:
                # After the last chunk, of size 0, only trailers remain: None marks them.
                self._remaining = _chunk_size(line) or None
        return body[0] if len(body) == 1 else b"".join(body)


def may_end_in(received: bytes) -> bool:
    """Whether a chunked response may be complete with these bytes, told by their end: an empty line comes last."""
    return received[-4:] == b"\r\n\r\n" or len(received) < 4


def _only_chunk(received: bytes) -> bytes:
    """The content, if these bytes are one whole chunk, as they mostly are in a stream; else nothing."""
    size, _, rest = received.partition(b"\r\n")
    try:
        whole = len(rest) == int(size, 16) + 2
    except ValueError:
        return b""
    return rest[:-2] if whole and rest[-2:] == b"\r\n" else b""


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].rstrip()
    if not digits or digits.strip(_HEX_DIGITS):
        raise HttpError(f"chunk size is {digits[:20]!r}")
    return int(digits, 16)
