"""Reads only the wanted samples out of Prometheus text or OpenMetrics bytes, and remembers where they were.

An engine's exposition keeps its shape between scrapes: the same lines in the same places, other numbers. The
first reading finds the wanted lines; the next ones look at just those lines, check that each still starts with
its known series and read the numbers after them. A changed line count, a line that isn't the known one, or every
`RESCAN_EVERY`th reading falls back to the full scan, so a series that comes, goes or moves is never missed for
long. Lines that nobody wants are never parsed.

Quoted metric names (`{"a.b", …}`) are not read: no catalogued system has one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import numpy.typing as npt

RESCAN_EVERY = 60
MAX_LABELS_BYTES = 16_384
"""A series whose name and labels are longer is skipped as malformed."""
_MAX_LINE_BYTES = 2 * MAX_LABELS_BYTES
"""With its value and an exemplar. A longer line isn't parsed at all: its labels would take a hundred times its size."""

Values = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_LINE_BREAK = 10
_NUMBERS = msgspec.json.Decoder(list[float])
_LABEL = re.compile(rb'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(,|(?=\}))')
_SPACE = re.compile(rb"[ \t]*")
_ESCAPE = re.compile(rb"\\(.)", re.DOTALL)
_ESCAPED = {b"n": b"\n", b'"': b'"', b"\\": b"\\"}
_SAMPLE_LINE = re.compile(
    rb"^[ \t]*[a-zA-Z_:][a-zA-Z0-9_:]*(?:[ \t]*\{[^\n]*\})?[ \t]+[+-]?(?:[0-9.]|inf|nan)", re.M | re.I
)
_NAME_AT_LINE_START = re.compile(rb"^[ \t]*([a-zA-Z_:][a-zA-Z0-9_:]*)", re.M)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Series:
    """One time series: the sample's name as written (`…_bucket` included) and its labels."""

    name: str
    labels: Mapping[str, str]
    key: bytes
    """How its line begins, up to the value: another spelling of the same series is another object."""
    _identity: tuple[str, frozenset[tuple[str, str]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_identity", (self.name, frozenset(self.labels.items())))

    def identity(self) -> tuple[str, frozenset[tuple[str, str]]]:
        return self._identity


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Layout:
    """The wanted series of one text, in its order. Readings of the same layout share this very object."""

    series: tuple[Series, ...]


class Reading(NamedTuple):
    """The wanted samples: `values[i]` belongs to `layout.series[i]`."""

    layout: Layout
    values: Values
    line_breaks: int
    """Of the whole text."""
    malformed_lines: int = 0
    """Lines that begin like a wanted sample but can't be read; they are left out."""
    duplicate_lines: int = 0
    """Repetitions of a series; the first one counts."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Places:
    """Which lines of a text are wanted."""

    lines: Indices
    next_lines: Indices


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Frame:
    """Where the wanted lines are in a text, and how each begins. Texts of one shape share one frame."""

    layout: Layout
    places: _Places
    keys: tuple[bytes, ...]
    lengths: Indices
    """Of the keys."""


@dataclass(slots=True)
class _Memo:
    """What the last full scan of a target's text found."""

    frame: _Frame
    line_breaks: int
    malformed_lines: int
    duplicate_lines: int
    age: int = 0


class _Shared:
    """One object for what is equal: a thousand engines of one kind have one page's shape between them.

    Everything here goes when the last target that uses it does.
    """

    def __init__(self) -> None:
        self._series: WeakValueDictionary[bytes, Series] = WeakValueDictionary()
        self._places: WeakValueDictionary[tuple[int, ...], _Places] = WeakValueDictionary()
        self._frames: WeakValueDictionary[tuple[int, tuple[Series, ...]], _Frame] = WeakValueDictionary()

    def known(self, key: bytes) -> Series | None:
        return self._series.get(key)

    def one(self, series: Series) -> Series:
        return self._series.setdefault(series.key, series)

    def frame(self, positions: tuple[int, ...], series: tuple[Series, ...]) -> _Frame:
        lines = np.array(positions, dtype=np.intp)
        places = self._places.setdefault(positions, _Places(lines, lines + 1))
        shape = id(places), series  # a frame keeps its places, so their id stays theirs
        frame = self._frames.get(shape)
        if frame is None:
            keys = tuple(one.key for one in series)
            lengths = np.array([len(key) for key in keys], dtype=np.intp)
            frame = self._frames[shape] = _Frame(Layout(series), places, keys, lengths)
        return frame


_shared = _Shared()


class ExpositionReader:
    """Reads the samples of one target whose names are in `wanted`. Never raises, whatever the bytes are.

    It stops when it has more than `most_samples`; a series with a label value beyond `label_value_bytes` is malformed.
    """

    def __init__(
        self, wanted: Iterable[str], most_samples: int = sys.maxsize, label_value_bytes: int = MAX_LABELS_BYTES
    ) -> None:
        self._wanted = _as_bytes(frozenset(wanted))
        self._most_samples = most_samples
        self._label_value_bytes = label_value_bytes
        self._memo: _Memo | None = None

    def read(self, body: bytes) -> Reading:
        memo = self._memo
        if memo is not None and memo.age < RESCAN_EVERY:
            values = _reread(memo, body)
            if values is not None:
                memo.age += 1
                return Reading(memo.frame.layout, values, memo.line_breaks, memo.malformed_lines, memo.duplicate_lines)
        return self._scan(body.split(b"\n"))

    def _scan(self, lines: list[bytes]) -> Reading:
        positions: list[int] = []
        found: dict[tuple[str, frozenset[tuple[str, str]]], Series] = {}
        values: list[float] = []
        malformed = duplicates = 0
        wanted = self._wanted
        for position, line in enumerate(lines):
            if line.startswith(b"#"):
                continue
            opening = line.split(b"{", 1)[0].split(None, 1)
            if not opening or opening[0] not in wanted:
                continue
            if len(positions) > self._most_samples:
                break
            parsed = (_parse_again(line) or _parse(line)) if len(line) <= _MAX_LINE_BYTES else None
            if parsed is None or (len(line) > self._label_value_bytes and self._is_too_long(parsed[0])):
                malformed += 1
                continue
            series, value = parsed
            identity = series.identity()
            if identity in found:
                duplicates += 1
                continue
            found[identity] = series
            positions.append(position)
            values.append(value)
        frame = _shared.frame(tuple(positions), tuple(found.values()))
        self._memo = _Memo(frame, len(lines) - 1, malformed, duplicates)
        return Reading(frame.layout, np.array(values, dtype=np.float64), len(lines) - 1, malformed, duplicates)

    def _is_too_long(self, series: Series) -> bool:
        return any(len(value) > self._label_value_bytes for value in series.labels.values())


@lru_cache
def _as_bytes(names: frozenset[str]) -> frozenset[bytes]:
    """The same object for all targets of one system."""
    return frozenset(name.encode() for name in names)


def line_breaks(body: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(body, dtype=np.uint8) == _LINE_BREAK))


def _reread(memo: _Memo, body: bytes) -> Values | None:
    """The values in the known places; None when a line isn't the series that was there before."""
    text = np.frombuffer(body, dtype=np.uint8)
    breaks = (text == _LINE_BREAK).nonzero()[0]
    frame = memo.frame
    if len(breaks) != memo.line_breaks or not frame.keys:
        return None
    bounds = np.empty(len(breaks) + 2, dtype=np.intp)
    bounds[0], bounds[1:-1], bounds[-1] = -1, breaks, len(body)
    starts = bounds[frame.places.lines] + 1
    if not all(map(body.startswith, frame.keys, starts.tolist())):
        return None
    return _values(_between(text, starts + frame.lengths, bounds[frame.places.next_lines]), len(frame.keys))


def _between(text: npt.NDArray[np.uint8], starts: Indices, stops: Indices) -> bytes:
    """These parts of lines, all up to the line's end, as lines of their own."""
    sizes = stops - starts + 1
    ends = sizes.cumsum()
    places = np.arange(ends[-1])
    places += (starts + sizes - ends).repeat(sizes)
    places[-1] = 0  # the text's last line may have no end
    parts = text[places]
    parts[-1] = _LINE_BREAK
    return parts.tobytes()


def _values(rests: bytes, count: int) -> Values | None:
    """The values of `count` samples from what follows their series, a line each; None when one has none.

    Almost always they are numbers as JSON has them, and one array of them is read in a tenth of the time.
    """
    try:
        numbers = _NUMBERS.decode(b"[%b]" % rests[:-1].replace(b"\n", b","))
    except msgspec.DecodeError:
        numbers = []
    if len(numbers) == count:
        return np.array(numbers)
    values = [_value(rest) for rest in rests.split(b"\n")[:-1]]
    return None if None in values else np.array(values, dtype=np.float64)


def _parse_again(line: bytes) -> tuple[Series, float] | None:
    """As `_parse`, of a line whose series was seen before, at any target, and that ends with its value."""
    value_at = line.rfind(b" ") + 1
    series = _shared.known(line[:value_at])
    value = _value(line[value_at:]) if series else None
    return None if series is None or value is None else (series, value)


def _parse(line: bytes) -> tuple[Series, float] | None:
    """The series of a sample line and its value; None when it isn't a valid line."""
    match = _NAME_AT_LINE_START.match(line)
    if match is None:
        return None
    labels: dict[str, str] = {}
    at = _skip_space(line, match.end())
    if line[at : at + 1] == b"{":
        end = _parse_labels(line, at + 1, labels)
        if end is None or end > MAX_LABELS_BYTES:
            return None
        at = end
    elif at == match.end():
        return None
    value_at = _skip_space(line, at)
    value = _value(line[value_at:])
    if value is None:
        return None
    return _shared.one(Series(match.group(1).decode("ascii"), labels, line[:value_at])), value


def _parse_labels(line: bytes, at: int, labels: dict[str, str]) -> int | None:
    """Fill `labels` from the text after `{`; the position after `}`, or None when malformed."""
    more = True
    while more:
        match = _LABEL.match(line, at)
        if match is None:
            break
        name = sys.intern(match.group(1).decode("ascii"))
        if name in labels:
            return None
        labels[name] = sys.intern(_unescape(match.group(2)))  # most are the same at every target
        at, more = match.end(), match.group(3) == b","
    at = _skip_space(line, at)
    return at + 1 if line[at : at + 1] == b"}" else None


def _unescape(value: bytes) -> str:
    if b"\\" in value:
        value = _ESCAPE.sub(lambda match: _ESCAPED.get(match.group(1), match.group(0)), value)
    return value.decode("utf-8", "replace")


def _skip_space(line: bytes, at: int) -> int:
    match = _SPACE.match(line, at)
    return match.end() if match else at


def _value(rest: bytes) -> float | None:
    """The sample's value from what follows the series: a value, perhaps a timestamp, perhaps an exemplar."""
    try:
        value = float(rest)
    except ValueError:
        return _value_among_others(rest)
    return None if b"_" in rest else value


def _value_among_others(rest: bytes) -> float | None:
    words = rest.split(b"#", 1)[0].split()
    if not 1 <= len(words) <= 2 or b"_" in rest.split(b"#", 1)[0]:
        return None
    try:
        value, *_timestamp = [float(word) for word in words]
    except ValueError:
        return None
    return value


def metric_names(body: bytes) -> frozenset[str]:
    """The names that begin a line: what a system is recognised by."""
    return frozenset(name.decode("ascii") for name in _NAME_AT_LINE_START.findall(body))


def looks_like_metrics(body: bytes) -> bool:
    """Whether at least one line has the form of a sample; HTML pages and JSON lists have none."""
    return _SAMPLE_LINE.search(body) is not None
