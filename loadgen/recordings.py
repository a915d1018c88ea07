"""Reads recorded traffic of any known format; the file's first line tells which."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from documents import DocumentError
from loadgen.recorded import Lines, RecordedRequest, Recording
from loadgen.recorded_formats import FORMATS, RecordedFormat


def read_recording(path: Path, name: str | None = None, limit: int | None = None) -> Recording:
    """The (first `limit`) requests of a recording. Raises DocumentError naming file, line and remedy."""
    if name is not None and name not in FORMATS:
        raise DocumentError(f"{path}: unknown format '{name}': choose one of {', '.join(FORMATS)}, or leave it out")
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            numbered = Lines(path, lines)
            form = FORMATS[name] if name is not None else _detect(path, numbered)
            found = _limited(form.read(numbered), limit)
    except OSError as error:
        raise DocumentError(f"{path}: can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path}: not a text in UTF-8 ({error.reason}): give a trace, a log or a table") from error
    if not found:
        raise DocumentError(f"{path}: holds no request: expected {form.expects}")
    return Recording(path, form.name, _from_zero(found), form.block_tokens)


def read_arrivals(path: Path, name: str | None = None, limit: int | None = None) -> list[float]:
    """When the requests of a recording came, seconds from the first. Raises DocumentError."""
    requests = read_recording(path, name, limit).requests
    without = next((request for request in requests if request.arrival_s is None), None)
    if without is not None:
        raise DocumentError(f"{without.where}: has no time: arrivals of kind trace need one in every line")
    return [request.arrival_s for request in requests if request.arrival_s is not None]


def _detect(path: Path, lines: Lines) -> RecordedFormat:
    """The format that the file's first line shows. Raises DocumentError."""
    first = lines.peek()
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
    known = "; ".join(f"{form.name}: {form.expects}" for form in FORMATS.values())
    raise DocumentError(f"{path}:{max(lines.number, 1)}: no known kind of recording. Expected one of {known}")


def _limited(requests: Iterable[RecordedRequest], limit: int | None) -> list[RecordedRequest]:
    found: list[RecordedRequest] = []
    for request in requests:
        if limit is not None and len(found) >= limit:
            break
        found.append(request)
    return found


def _from_zero(requests: list[RecordedRequest]) -> list[RecordedRequest]:
    """By time, the first at 0; those without a time stay in the file's order, after the others."""
    times = [request.arrival_s for request in requests if request.arrival_s is not None]
    first = min(times, default=0.0)
    moved = [
        request if request.arrival_s is None else replace(request, arrival_s=request.arrival_s - first)
        for request in requests
    ]
    return sorted(moved, key=lambda request: float("inf") if request.arrival_s is None else request.arrival_s)
