"""Reads recorded traffic of any known format: the one table of readers, and the one way in."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import IO

from prefixwatch.documents import DocumentError
from prefixwatch.loadgen.recordings.formats import FORMATS, RecordedFormat
from prefixwatch.loadgen.recordings.partial_blocks import BlockRow, check_predecessors, consistent_ids
from prefixwatch.loadgen.recordings.request import Lines, RecordedRequest, Recording
from prefixwatch.loadgen.recordings.traces import UNITS
from prefixwatch.loadgen.scenario.section import LONGEST_TOKENS

GZIP_MAGIC = b"\x1f\x8b"
LONGEST_SECONDS = 10 * 366 * 86_400.0
"""Of a recording, from its first request."""


def read_recording(
    path: Path,
    name: str | None = None,
    limit: int | None = None,
    *,
    time_unit: str | None = None,
    block_tokens: int | None = None,
) -> Recording:
    """The (first `limit`) requests of a recording. Raises DocumentError naming file, line and remedy.

    `name`, `time_unit` (s, ms, us, ns) and `block_tokens` (tokens per block id of a trace) are detected if None.
    """
    if name is not None and name not in FORMATS:
        raise DocumentError(f"{path}: unknown format '{name}': choose one of {', '.join(FORMATS)}, or leave it out")
    if time_unit is not None and time_unit not in UNITS:
        raise DocumentError(f"{path}: unknown time unit '{time_unit}': choose one of {', '.join(UNITS)}")
    try:
        with _text(path) as lines:
            numbered = Lines(path, _one_per_line(path, lines), time_unit=time_unit, block_tokens=block_tokens)
            form = FORMATS[name] if name is not None else _detect(path, numbered)
            found = _limited(form.read(numbered), limit)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DocumentError(f"{path}: can't be read: {reason}") from error
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path}: not a text in UTF-8 ({error.reason}): give a trace, a log or a table") from error
    if not found:
        raise DocumentError(f"{path}: holds no request: expected {form.expects}")
    found, note = _with_consistent_ids(_with_times(found), numbered.block_tokens)
    notes = (*numbered.notes, *([note] if note else []))
    found = _from_zero(found)
    _check_sizes(found)
    return Recording(path, form.name, found, numbered.block_tokens, notes)


def read_arrivals(path: Path, name: str | None = None, limit: int | None = None) -> list[float]:
    """When the requests of a recording came, seconds from the first. Raises DocumentError."""
    requests = read_recording(path, name, limit).requests
    without = next((request for request in requests if request.arrival_s is None), None)
    if without is not None:
        raise DocumentError(f"{without.where}: has no time: arrivals of kind trace need one in every line")
    return [request.arrival_s for request in requests if request.arrival_s is not None]


def _text(path: Path) -> IO[str]:
    """The file as text, unpacked if it is gzip's. Raises OSError."""
    with path.open("rb") as file:
        packed = file.read(2) == GZIP_MAGIC
    return (
        gzip.open(path, "rt", encoding="utf-8-sig", newline="")
        if packed
        else path.open(encoding="utf-8-sig", newline="")
    )


def _one_per_line(path: Path, lines: IO[str]) -> Iterable[str]:
    """The lines; of a JSON array its items, a line each, and an indented JSON object as one. Raises DocumentError."""
    first = lines.read(1)
    while first.isspace():
        first = lines.read(1)
    if first == "{":
        return _objects(first + lines.readline(), lines)
    if first != "[" or (start := lines.readline()).lstrip()[:1] not in ("{", "[", "]", ""):
        return chain([first + (lines.readline() if first != "[" else start)], lines)  # a log line may begin with [
    try:
        return [json.dumps(item, ensure_ascii=False) for item in json.loads(first + start + lines.read())]
    except ValueError as error:
        raise DocumentError(f"{path}: begins as a JSON array and isn't one: {error}") from error


def _objects(first: str, lines: IO[str]) -> Iterable[str]:
    """JSON lines; where the first line is the begin of an indented object, the whole file as one line."""
    if first.strip() in ("{", '{"data": [', '{"resourceSpans": [') or first.rstrip().endswith(("{", "[")):
        whole = first + lines.read()
        try:
            return [json.dumps(json.loads(whole), ensure_ascii=False)]
        except ValueError:
            return whole.splitlines(keepends=True)
    return chain([first], lines)


def _with_times(requests: list[RecordedRequest]) -> list[RecordedRequest]:
    """Later turns without a time of their own come due at the earliest after the turn before and their delay."""
    last: dict[str, float] = {}
    found = []
    for request in requests:
        arrival = request.arrival_s
        if request.delay_s is not None and request.session in last:
            arrival = max(arrival or 0.0, last[request.session] + request.delay_s)
        if arrival is not None and request.session:
            last[request.session] = arrival
        found.append(request if arrival == request.arrival_s else replace(request, arrival_s=arrival))
    return found


def _detect(path: Path, lines: Lines) -> RecordedFormat:
    """The format that the file's first line shows; of a log, its first line of a known kind. Raises DocumentError."""
    first = lines.peek()
    if not first:
        raise DocumentError(f"{path}: is empty: give a trace, a log or a table")
    keys: Sequence[str] = ()
    if first.lstrip().startswith("{"):
        try:
            keys = list(json.loads(first))
        except ValueError as error:
            raise DocumentError(f"{path}:{lines.number}: not a JSON object in one line: {error}") from error
    else:
        keys = [key.strip() for key in first.split(",")]
    for form in FORMATS.values():
        if any(needed <= set(keys) for needed in form.marks):
            return form
    if (form_of_log := _detect_log(path)) is not None:
        return form_of_log
    known = "; ".join(f"{form.name}: {form.expects}" for form in FORMATS.values())
    raise DocumentError(f"{path}:{max(lines.number, 1)}: no known kind of recording. Expected one of {known}")


def _detect_log(path: Path) -> RecordedFormat | None:
    """An engine's log begins with other lines."""
    logs = [form for form in FORMATS.values() if form.text_mark is not None]
    with _text(path) as lines:
        for line in lines:
            for form in logs:
                if form.text_mark is not None and form.text_mark.search(line):
                    return form
    return None


def _limited(requests: Iterable[RecordedRequest], limit: int | None) -> list[RecordedRequest]:
    found: list[RecordedRequest] = []
    for request in requests:
        if limit is not None and len(found) >= limit:
            break
        found.append(request)
    return found


def _check_sizes(requests: Iterable[RecordedRequest]) -> None:
    """Raise DocumentError for a length or a time that no recording can have."""
    for request in requests:
        for what, tokens in (("prompt", request.prompt_tokens), ("answer", request.output_tokens)):
            if tokens is not None and tokens > LONGEST_TOKENS:
                raise DocumentError(
                    f"{request.where}: its {what} has {tokens:,} tokens, more than {LONGEST_TOKENS:,}: correct it"
                )
        for what, seconds in (("comes", request.arrival_s), ("waits", request.delay_s)):
            if seconds is not None and not seconds <= LONGEST_SECONDS:
                raise DocumentError(
                    f"{request.where}: {what} {seconds:.3g} s after the one before or the first, more than ten years: "
                    "correct the time, or give its unit with --time-unit"
                )


def _with_consistent_ids(
    requests: list[RecordedRequest], block_tokens: int | None
) -> tuple[list[RecordedRequest], str | None]:
    """Requests whose equal block ids stand for blocks of equal length; see `consistent_ids`."""
    if block_tokens is None:
        return requests, None
    if without := next((request for request in requests if request.block_ids is None), None):
        raise DocumentError(f"{without.where}: has a text, and other lines have token ids: give a log of one kind")
    rows = [BlockRow(request.where, request.block_ids or (), request.prompt_tokens or 0) for request in requests]
    check_predecessors(rows)
    ids, note = consistent_ids(rows, block_tokens)
    if note is None:
        return requests, None
    return [replace(request, block_ids=tuple(own)) for request, own in zip(requests, ids, strict=True)], note


def _from_zero(requests: list[RecordedRequest]) -> list[RecordedRequest]:
    """By time, the first at 0; those without a time stay in the file's order, after the others."""
    times = [request.arrival_s for request in requests if request.arrival_s is not None]
    first = min(times, default=0.0)
    moved = [
        request if request.arrival_s is None else replace(request, arrival_s=request.arrival_s - first)
        for request in requests
    ]
    return sorted(moved, key=lambda request: float("inf") if request.arrival_s is None else request.arrival_s)
