"""Server-sent events, parsed as the bytes arrive.

Follows the event-stream format of the WHATWG HTML standard: an empty line ends an event, a line ends with LF, CRLF or
CR, several `data:` lines join with a newline, a line that starts with a colon is a comment, one byte order mark may
open the stream. Bytes stay bytes until an event is complete, so a character that a read cuts in two is never damaged.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""The most that is kept of one event. A whole answer with its log probabilities is smaller."""
_CR = ord("\r")
_DATA_BYTES = 6
"""What a `data:` line adds to its content, at least."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BEGINNINGS = (b"data:", b"event:", b"id:", b"retry:", b":")


def looks_like_events(begun: bytes) -> bool | None:
    """Whether a body that begins so is an event stream, whatever its header says; None while that is open. JSON isn't
    taken for one."""
    begun = begun.removeprefix(_BYTE_ORDER_MARK).lstrip(b"\r\n")
    if begun.startswith(_BEGINNINGS):
        return True
    return None if any(start.startswith(begun) for start in (_BYTE_ORDER_MARK, *_BEGINNINGS)) else False


class SseParser:
    """An incremental parser. The same bytes give the same events however they were cut, in linear time."""

    __slots__ = ("_at_start", "_between", "_data", "_data_bytes", "_line", "_skip_lf", "too_long")

    def __init__(self) -> None:
        self._line = bytearray()
        """The beginning of a line whose end hasn't arrived."""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._skip_lf = False
        self._at_start = True
        self._between = False
        """The last byte ended an event, and isn't half of a CRLF."""
        self.too_long = False
        """An event exceeded MAX_EVENT_BYTES; nothing is read any more."""

    def feed(self, received: bytes) -> list[bytes]:
        """The data of each event that these bytes complete, in order. Events without a data line are left out."""
        if self._between:
            line, _, rest = received.partition(b"\n")
            if rest == b"\n" and line[:6] == b"data: " and _CR not in line:
                return [line[6:]]  # one whole event of one line: nearly every read of a chat stream
        if self.too_long:
            return []
        if self._skip_lf and received:
            received = received[1:] if received[:1] == b"\n" else received
            self._skip_lf = False
        if _CR in received:
            # A CR at the very end may be half of a CRLF. It ends its line now, and an LF that follows is dropped.
            self._skip_lf = received[-1] == _CR
            received = received.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = received.split(b"\n")
        rest = lines.pop()
        if self._line and lines:
            self._line += lines[0]
            lines[0] = bytes(self._line)
            self._line.clear()
        if self._at_start and lines:
            self._at_start = False
            lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
        events = self._events(lines)
        self._line += rest
        if self._line or self._data:
            self._between = False
            self._check_size()
        else:
            self._between = not (self._skip_lf or self._at_start)
        return events

    def end(self) -> list[bytes]:
        """The event that lacked only its empty line when the stream ended, if there is one."""
        return self.feed(b"\n\n") if self.incomplete else []

    @property
    def incomplete(self) -> bool:
        """Whether an event has begun and not ended."""
        return bool(self._line or self._data)

    def _events(self, lines: list[bytes]) -> list[bytes]:
        events: list[bytes] = []
        data, counted = self._data, len(self._data)
        for line in lines:
            if line[:6] == b"data: ":
                data.append(line[6:])
            elif line[:5] == b"data:":
                data.append(line[5:])
            elif line == b"data":
                data.append(b"")
            elif not line and data:
                events.append(data[0] if len(data) == 1 else b"\n".join(data))
                data.clear()
                counted = self._data_bytes = 0
        if data:
            self._data_bytes += sum(len(line) + _DATA_BYTES for line in data[counted:])
        return events

    def _check_size(self) -> None:
        self.too_long = len(self._line) + self._data_bytes > MAX_EVENT_BYTES
        if self.too_long:
            self._line.clear()
            self._data.clear()
