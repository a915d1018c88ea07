"""Server-sent events, read as the bytes arrive.

Follows the event-stream format of the WHATWG HTML standard as far as chat streams use it: events end with an
empty line, lines end with LF, CRLF or CR, several `data:` lines join with a newline, a line that starts with
a colon is a comment. Bytes stay bytes until an event is whole, so a character cut in two by a read stays whole.
"""

from __future__ import annotations

DONE = b"[DONE]"
"""The data of the event that ends an OpenAI stream."""
_CR = ord("\r")


class SseParser:
    """An incremental parser: the same bytes give the same events however they were split."""

    __slots__ = ("_data", "_pending", "_skip_lf")

    def __init__(self) -> None:
        self._pending = b""
        self._data: list[bytes] = []
        self._skip_lf = False

    def feed(self, received: bytes) -> list[bytes]:
        """The data of each event that these bytes complete, in order; events without data are left out."""
        line, _, rest = received.partition(b"\n")
        if rest == b"\n" and line[:6] == b"data: " and _CR not in line and not (self.incomplete or self._skip_lf):
            return [line[6:]]  # one whole event of one line, as it mostly is in a chat stream
        buffer = self._pending + received if self._pending else received
        if self._skip_lf and buffer:
            buffer = buffer[1:] if buffer[:1] == b"\n" else buffer
            self._skip_lf = False
        if buffer.find(b"\r") >= 0:
            # A CR at the very end may be half of a CRLF: it ends its line now, the LF to come is dropped.
            self._skip_lf = buffer[-1:] == b"\r"
            buffer = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = buffer.split(b"\n")
        self._pending = lines.pop()
        events: list[bytes] = []
        for line in lines:
            if line[:5] == b"data:":
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line == b"data":
                self._data.append(b"")
            elif not line and self._data:
                events.append(b"\n".join(self._data) if len(self._data) > 1 else self._data[0])
                self._data.clear()
        return events

    @property
    def incomplete(self) -> bool:
        """Whether an event has begun and not ended: at the end of a stream, the sign that it was cut."""
        return bool(self._pending or self._data)
