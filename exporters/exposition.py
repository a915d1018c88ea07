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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

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


@dataclass(frozen=True, slots=True)
class Series:
    """One time series: the sample's name as written (`…_bucket` included) and its labels."""

    name: str
    labels: Mapping[str, str]

    def identity(self) -> tuple[str, frozenset[tuple[str, str]]]:
        return self.name, frozenset(self.labels.items())


@dataclass(frozen=True, slots=True)
class Layout:
    """The wanted series of one text, in its order. Two readings of the same layout share this very object."""

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


@dataclass(slots=True)
class _Memo:
    """Where the wanted lines were in the last text."""

    line_count: int
    pick: Callable[[list[bytes]], Sequence[bytes]]
    """Takes the wanted lines out of all lines."""
    keys: list[bytes]
    lines: list[bytes]
    reading: Reading
    values: list[float]
    age: int = 0


class ExpositionReader:
    """Reads the samples of one target whose names are in `wanted`. Never raises, whatever the bytes are."""

    def __init__(self, wanted: Iterable[str]) -> None:
        self._wanted = frozenset(name.encode() for name in wanted)
        self._memo: _Memo | None = None

    def read(self, body: bytes) -> Reading:
        lines = body.split(b"\n")
        memo = self._memo
        if memo is not None and memo.line_count == len(lines) and memo.age < RESCAN_EVERY and _reread(memo, lines):
            memo.age += 1
            known = memo.reading
            return Reading(known.layout, np.array(memo.values), known.malformed_lines, known.duplicate_lines)
        return self._scan(lines)

    def _scan(self, lines: list[bytes]) -> Reading:
        positions, keys, kept = [], [], []
        series: dict[tuple[str, frozenset[tuple[str, str]]], Series] = {}
        values: list[float] = []
        malformed = duplicates = 0
        wanted = self._wanted
        for position, line in enumerate(lines):
            opening = line.split(b"{", 1)[0].split(None, 1)
            if not opening or opening[0] not in wanted:
                continue
            parsed = _parse(line)
            if parsed is None:
                malformed += 1
                continue
            one, value_at, value = parsed
            identity = one.identity()
            if identity in series:
                duplicates += 1
                continue
            series[identity] = one
            positions.append(position)
            keys.append(line[:value_at])
            kept.append(line)
            values.append(value)
        layout = Layout(tuple(series.values()))
        if self._memo is not None and self._memo.reading.layout == layout:
            layout = self._memo.reading.layout
        reading = Reading(layout, np.array(values, dtype=np.float64), malformed, duplicates)
        self._memo = _Memo(len(lines), _picker(positions), keys, kept, reading, values)
        return reading


def _picker(positions: list[int]) -> Callable[[list[bytes]], Sequence[bytes]]:
    """`operator.itemgetter`, which is the fastest, answers with a sequence only for two items or more."""
    if len(positions) >= 2:
        return itemgetter(*positions)
    return lambda lines: [lines[position] for position in positions]


def _reread(memo: _Memo, lines: list[bytes]) -> bool:
    """Bring the memo's values up to date; False when a line isn't the series that was there before."""
    values, known, keys = memo.values, memo.lines, memo.keys
    for slot, (line, before) in enumerate(zip(memo.pick(lines), known, strict=True)):
        if line == before:
            continue
        rest = line.removeprefix(keys[slot])
        if len(rest) == len(line):
            return False
        try:
            value: float | None = float(rest) if b"_" not in rest else _value(rest)
        except ValueError:
            value = _value(rest)
        if value is None:
            return False
        values[slot] = value
        known[slot] = line
    return True


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
