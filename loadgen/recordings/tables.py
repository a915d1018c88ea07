"""Readers of CSV tables of times and lengths: Azure's LLM inference traces and BurstGPT."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping

from prefixwatch.loadgen.recordings.fields import iso_seconds, whole
from prefixwatch.loadgen.recordings.request import Lines, RecordedRequest


def azure(lines: Lines) -> Iterator[RecordedRequest]:
    """`TIMESTAMP`, `ContextTokens`, `GeneratedTokens` (Azure LLM inference traces 2023 and 2024)."""
    for row in _table(lines):
        try:
            arrival_s = iso_seconds(row["TIMESTAMP"])
        except ValueError as error:
            raise lines.error(f"TIMESTAMP {row['TIMESTAMP']!r} is not a date and time") from error
        output = _cell(lines, row, "GeneratedTokens", least=0)
        yield RecordedRequest(
            lines.where, arrival_s, _cell(lines, row, "ContextTokens"), max(1, output), failed=output == 0
        )


def burstgpt(lines: Lines) -> Iterator[RecordedRequest]:
    """`Timestamp` (s), `Request tokens`, `Response tokens` (BurstGPT)."""
    for row in _table(lines):
        output = _cell(lines, row, "Response tokens", least=0)
        try:
            arrival_s = float(row["Timestamp"])
        except ValueError as error:
            raise lines.error(f"Timestamp {row['Timestamp']!r} is not a number of seconds") from error
        yield RecordedRequest(
            where=lines.where,
            arrival_s=arrival_s,
            prompt_tokens=_cell(lines, row, "Request tokens"),
            output_tokens=max(1, output),
            session=(row.get("Session ID") or "").strip(),
            failed=output == 0,
        )


def _table(lines: Lines) -> Iterator[dict[str, str]]:
    reader = csv.DictReader(iter(lines))
    for row in reader:
        if None in row or None in row.values():
            raise lines.error(f"has another number of columns than the header: {', '.join(reader.fieldnames or ())}")
        yield row


def _cell(lines: Lines, row: Mapping[str, str], key: str, least: int = 1) -> int:
    value = whole(row.get(key))
    if value is None or value < least:
        raise lines.error(f"{key} must be a whole number from {least} on, got {row.get(key)!r}: is the header right?")
    return value
