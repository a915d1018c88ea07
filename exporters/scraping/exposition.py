"""Reads only the wanted samples out of Prometheus text or OpenMetrics bytes, and remembers where they were.

An engine's exposition keeps its shape between scrapes: the same lines in the same places, other numbers. The
first reading finds the wanted lines; the next ones look at just those lines, check that each still starts with
its known series and read the number after it. A changed line count, a line that isn't the known one, or every
`RESCAN_EVERY`th reading falls back to the full scan, so a series that comes, goes or moves is never missed for
long. Lines that nobody wants are never parsed.

Quoted metric names (`{"a.b", …}`) are not read: no catalogued system has one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

RESCAN_EVERY = 60
MAX_LABELS_BYTES = 16_384
"""A series whose name and labels are longer is skipped as malformed."""

Values = npt.NDArray[np.float64]

_LABEL = re.compile(rb'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(,|(?=\}))')
_SPACE = re.compile(rb"[ \t]*")
_ESCAPE = re.compile(rb"\\(.)", re.DOTALL)
_ESCAPED = {b"n": b"\n", b'"': b'"', b"\\": b"\\"}
_SAMPLE_LINE = re.compile(
    rb"^[ \t]*[a-zA-Z_:][a-zA-Z0-9_:]*(?:[ \t]*\{[^\n]*\})?[ \t]+[+-]?(?:[0-9.]|inf|nan)", re.M | re.I
)
_NAME_AT_LINE_START = re.compile(rb"^[ \t]*([a-zA-Z_:][a-zA-Z0-9_:]*)", re.M)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Series:
    """One time series: the sample's name as written (`…_bucket` included) and its labels."""

    name: str
    labels: Mapping[str, str]
    _identity: tuple[str, frozenset[tuple[str, str]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_identity", (self.name, frozenset(self.labels.items())))

    def identity(self) -> tuple[str, frozenset[tuple[str, str]]]:
        return self._identity


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Layout:
    """The wanted series of one text, in its order. Readings of the same layout share this very object."""

    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """The wanted samples: `values[i]` belongs to `layout.series[i]`."""

    layout: Layout
    values: Values
    malformed_lines: int = 0
    """Lines that begin like a wanted sample but can't be read; they are left out."""
    duplicate_lines: int = 0
    """Repetitions of a series; the first one counts."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Opening:
    """How a line begins, up to its value, and the series that it is of. Compared by identity: there is one a key."""

    key: bytes
    series: Series


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Places:
    """Which lines of a text are wanted."""

    pick: Callable[[list[bytes]], Sequence[bytes]]
    """Takes them out of all lines."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Frame:
    """Where the wanted lines are in a text, and how each begins. Texts of one shape share one frame."""

    layout: Layout
    places: _Places
    openings: tuple[_Opening, ...]
    keys: tuple[bytes, ...]
    lengths: tuple[int, ...]
    """Of the keys."""


@dataclass(slots=True)
class _Memo:
    """What the last full scan of a target's text found."""

    frame: _Frame
    line_count: int
    malformed_lines: int
    duplicate_lines: int
    age: int = 0


class _Shared:
    """One object for what is equal: a thousand engines of one kind have one page's shape between them.

    Everything here goes when the last target that uses it does.
    """

    def __init__(self) -> None:
        self._openings: WeakValueDictionary[bytes, _Opening] = WeakValueDictionary()
        self._places: WeakValueDictionary[tuple[int, ...], _Places] = WeakValueDictionary()
        self._frames: WeakValueDictionary[tuple[int, tuple[_Opening, ...]], _Frame] = WeakValueDictionary()

    def known(self, key: bytes) -> _Opening | None:
        return self._openings.get(key)

    def opening(self, key: bytes, series: Series) -> _Opening:
        return self._openings.setdefault(key, _Opening(key, series))

    def frame(self, positions: tuple[int, ...], openings: tuple[_Opening, ...]) -> _Frame:
        places = self._places.setdefault(positions, _Places(_picker(positions)))
        shape = id(places), openings  # a frame keeps its places, so their id stays theirs
        frame = self._frames.get(shape)
        if frame is None:
            keys = tuple(opening.key for opening in openings)
            layout = Layout(tuple(opening.series for opening in openings))
            frame = self._frames[shape] = _Frame(layout, places, openings, keys, tuple(map(len, keys)))
        return frame


_shared = _Shared()


class ExpositionReader:
    """Reads the samples of one target whose names are in `wanted`. Never raises, whatever the bytes are.

    It stops when it has more than `most_samples`; a series with a label value beyond `label_value_bytes` is malformed.
    """

    def __init__(
        self, wanted: Iterable[str], most_samples: int = sys.maxsize, label_value_bytes: int = MAX_LABELS_BYTES
    ) -> None:
        self._wanted = frozenset(name.encode() for name in wanted)
        self._most_samples = most_samples
        self._label_value_bytes = label_value_bytes
        self._memo: _Memo | None = None

    def read(self, body: bytes) -> Reading:
        lines = body.split(b"\n")
        memo = self._memo
        if memo is not None and memo.line_count == len(lines) and memo.age < RESCAN_EVERY:
            values = _reread(memo.frame, lines)
            if values is not None:
                memo.age += 1
                return Reading(memo.frame.layout, np.array(values), memo.malformed_lines, memo.duplicate_lines)
        return self._scan(lines)

    def _scan(self, lines: list[bytes]) -> Reading:
        positions: list[int] = []
        openings: dict[tuple[str, frozenset[tuple[str, str]]], _Opening] = {}
        values: list[float] = []
        malformed = duplicates = 0
        wanted = self._wanted
        for position, line in enumerate(lines):
            opening = line.split(b"{", 1)[0].split(None, 1)
            if not opening or opening[0] not in wanted:
                continue
            if len(positions) > self._most_samples:
                break
            parsed = _parse_again(line) or _parse(line)
            if parsed is None or self._is_too_long(parsed[0]):
                malformed += 1
                continue
            series, value_at, value = parsed
            if series.identity() in openings:
                duplicates += 1
                continue
            openings[series.identity()] = _shared.opening(line[:value_at], series)
            positions.append(position)
            values.append(value)
        frame = _shared.frame(tuple(positions), tuple(openings.values()))
        self._memo = _Memo(frame, len(lines), malformed, duplicates)
        return Reading(frame.layout, np.array(values, dtype=np.float64), malformed, duplicates)

    def _is_too_long(self, series: Series) -> bool:
        return any(len(value) > self._label_value_bytes for value in series.labels.values())


def _picker(positions: Sequence[int]) -> Callable[[list[bytes]], Sequence[bytes]]:
    """`operator.itemgetter`, which is the fastest, answers with a sequence only for two items or more."""
    if len(positions) >= 2:
        return itemgetter(*positions)
    return lambda lines: [lines[position] for position in positions]


def _reread(frame: _Frame, lines: list[bytes]) -> list[float] | None:
    """The values in the known places; None when a line isn't the series that was there before."""
    values: list[float] = []
    for line, key, length in zip(frame.places.pick(lines), frame.keys, frame.lengths, strict=True):
        if not line.startswith(key):
            return None
        rest = line[length:]
        try:
            value: float | None = float(rest) if b"_" not in rest else _value(rest)
        except ValueError:
            value = _value(rest)
        if value is None:
            return None
        values.append(value)
    return values


def _parse_again(line: bytes) -> tuple[Series, int, float] | None:
    """As `_parse`, of a line whose series was seen before, at any target, and that ends with its value."""
    value_at = line.rfind(b" ") + 1
    opening = _shared.known(line[:value_at])
    value = _value(line[value_at:]) if opening else None
    return None if opening is None or value is None else (opening.series, value_at, value)


def _parse(line: bytes) -> tuple[Series, int, float] | None:
    """The series of a sample line, where its value begins, and the value; None when it isn't a valid line."""
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
    return Series(match.group(1).decode("ascii"), labels), value_at, value


def _parse_labels(line: bytes, at: int, labels: dict[str, str]) -> int | None:
    """Fill `labels` from the text after `{`; the position after `}`, or None when malformed."""
    more = True
    while more:
        match = _LABEL.match(line, at)
        if match is None:
            break
        name = match.group(1).decode("ascii")
        if name in labels:
            return None
        labels[name] = _unescape(match.group(2))
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
