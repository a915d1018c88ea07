"""Reader of AIPerf's inputs: single turns, sessions of turns, and the payloads of inputs.json.

GuideLLM's rows (`prompt` and `output_tokens_count`) are read as API requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prefixwatch.loadgen.recordings.api_logs import request_of
from prefixwatch.loadgen.recordings.fields import json_object, number, positive
from prefixwatch.loadgen.recordings.request import Lines, RecordedRequest
from prefixwatch.loadgen.recordings.traces import UNITS, session_rows

WITHOUT_ANSWERS = (
    "The file has no answers: later turns carry what the user said before, and reuse of answers isn't counted."
)


def aiperf(lines: Lines) -> Iterator[RecordedRequest]:
    """`text` or `texts` per row; `turns` per session; or `data` with each session's `payloads`."""
    for line in lines:
        row = json_object(lines, line)
        if isinstance(row.get("data"), list):
            yield from _payloads(lines, row["data"])
        elif isinstance(row.get("turns"), list):
            yield from _turns(lines, row)
        else:
            yield _request(lines, row, [{"role": "user", "content": _text(lines, row)}], str(row.get("session_id", "")))


def sessions(lines: Lines) -> Iterator[RecordedRequest]:
    """Rows with `turns`: of texts (AIPerf) or of lengths."""
    turns = _first_turns(lines)
    yield from aiperf(lines) if any("text" in turn or "texts" in turn for turn in turns) else session_rows(lines)


def _first_turns(lines: Lines) -> list[Mapping[str, Any]]:
    line = lines.peek()
    turns = json_object(lines, line).get("turns") if line else []
    return [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []


def _turns(lines: Lines, row: Mapping[str, Any]) -> Iterator[RecordedRequest]:
    session, said = str(row.get("session_id") or lines.where), list[dict[str, Any]]()
    for turn in row["turns"]:
        if not isinstance(turn, dict):
            raise lines.error("turns must be a list of maps with text")
        said.append({"role": str(turn.get("role") or "user"), "content": _text(lines, turn)})
        if said[-1]["role"] == "user":
            first = sum(message["role"] == "user" for message in said) == 1
            yield _request(lines, turn, list(said), session, first=first)
            if not first:
                lines.note(WITHOUT_ANSWERS)


def _payloads(lines: Lines, data: list[Any]) -> Iterator[RecordedRequest]:
    for entry in data:
        if not isinstance(entry, dict) or not isinstance(entry.get("payloads"), list):
            raise lines.error("data must be a list of maps with session_id and payloads")
        for payload in entry["payloads"]:
            yield request_of(lines, {"session_id": entry.get("session_id")}, payload)


def _request(
    lines: Lines, row: Mapping[str, Any], messages: list[dict[str, Any]], session: str, *, first: bool = True
) -> RecordedRequest:
    per_second = UNITS[lines.time_unit or "ms"]
    arrival = number(lines, row, "timestamp") / per_second if "timestamp" in row else None
    delay = number(lines, row, "delay") / per_second if "delay" in row else None
    return RecordedRequest(
        where=lines.where,
        arrival_s=arrival,
        prompt_tokens=None,
        output_tokens=positive(row.get("output_length")),
        messages=tuple(messages),
        session=session,
        delay_s=delay if first or arrival is not None else delay or 0.0,
    )


def _text(lines: Lines, row: Mapping[str, Any]) -> str:
    texts = row.get("texts", [row.get("text")])
    parts = [part.get("contents", [None])[0] if isinstance(part, dict) else part for part in texts]
    if not parts or not all(isinstance(part, str) for part in parts):
        raise lines.error("text must be a text, and texts a list of them")
    return "\n".join(parts)
