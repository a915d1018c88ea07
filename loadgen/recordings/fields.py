"""Fields of recorded rows, checked: each function names the line and the field of a value that can't be right."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from prefixwatch.loadgen.recordings.request import Lines

_LONG_FRACTION = re.compile(r"(\.\d{6})\d+")
_MILLISECONDS_FROM = 1e11
"""A Unix time above this is in milliseconds (as seconds it would be after the year 5000)."""


def json_object(lines: Lines, line: str) -> dict[str, Any]:
    """The line as a JSON object. Raises DocumentError."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise lines.error(f"not a JSON object in one line: {error}") from error
    if not isinstance(row, dict):
        raise lines.error("not a JSON object")
    return row


def number(lines: Lines, row: Mapping[str, Any], key: str) -> float:
    """A number from 0 on. Raises DocumentError."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise lines.error(f"{key} must be a number from 0 on, got {value!r}")
    return float(value)


def count(lines: Lines, row: Mapping[str, Any], key: str) -> int:
    """A whole number from 1 on. Raises DocumentError."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise lines.error(f"{key} must be a whole number from 1 on, got {value!r}")
    return value


def positive(value: Any) -> int | None:
    """The value if it is a whole number from 1 on, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def whole(value: Any) -> int | None:
    """A whole number, also as text ("120", "120.0"); None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    if isinstance(value, str) and value.strip().isdigit():
        return int(value)  # nanoseconds since 1970 are more than a float holds exactly
    return int(found) if found.is_integer() else None


def iso_seconds(text: str) -> float:
    """Seconds since 1970, UTC where no zone is given. Azure writes seven digits of a second, Python reads six."""
    moment = datetime.fromisoformat(_LONG_FRACTION.sub(r"\1", text.strip()))
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def first(row: Mapping[str, Any], body: Mapping[str, Any], *keys: str) -> Any:
    """The first of these keys that the row, its body or the body's metadata has."""
    metadata = body.get("metadata") if isinstance(body.get("metadata"), dict) else {}
    assert isinstance(metadata, dict)
    return next((place[key] for key in keys for place in (row, body, metadata) if place.get(key) is not None), None)


def moment(lines: Lines, row: Mapping[str, Any], body: Mapping[str, Any]) -> float | None:
    """When the request came, seconds since 1970; None where the row doesn't say. Raises DocumentError."""
    value = first(row, body, "timestamp", "time", "created_at", "created", "ts")
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return iso_seconds(value)
        except ValueError as error:
            raise lines.error(f"time {value!r} is neither Unix seconds nor ISO 8601") from error
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise lines.error(f"time {value!r} is neither Unix seconds nor ISO 8601")
    return value / 1000 if value > _MILLISECONDS_FROM else float(value)
