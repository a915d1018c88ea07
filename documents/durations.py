"""Lengths of time as Prometheus, OpenSLO and people write them: `30s`, `1m30s`, `500ms`, `30d`, `1Q`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

CLOCK: Mapping[str, float] = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
"""Prometheus' units, in seconds."""
NOMINAL: Mapping[str, float] = {**CLOCK, "M": 30 * 86_400, "Q": 91 * 86_400, "Y": 365 * 86_400}
"""OpenSLO's units. Months, quarters and years vary; burn rates are scaled to these lengths."""

_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[smhdwMQY])")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_LONGEST_TEXT = 40


def seconds(text: str, units: Mapping[str, float] = CLOCK) -> float:
    """`1m30s` → 90.0. Raises ValueError for a text that isn't a duration in these units."""
    parts = _PART.findall(text)
    if "".join(number + unit for number, unit in parts) != text or not parts or any(u not in units for _, u in parts):
        shown = text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"
        raise ValueError(f"'{shown}' is not a duration such as 30s or 1m30s")
    return sum(float(number) * units[unit] for number, unit in parts)


def promql(length_seconds: float) -> str:
    """The shortest way Prometheus writes a duration, exact to the millisecond: 5400 → `1h30m`."""
    left, parts = round(length_seconds * 1000), []
    for unit in ("d", "h", "m", "s", "ms"):
        count, left = divmod(left, round(CLOCK[unit] * 1000))
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def _seconds_of(given: object) -> object:
    """A text → seconds; a number is seconds already, and anything else is left to the validator."""
    if not isinstance(given, str):
        return given
    text = given.strip()
    return float(text) if _NUMBER.fullmatch(text) else seconds(text)


READS_DURATIONS = BeforeValidator(_seconds_of)
Duration = Annotated[float, READS_DURATIONS, Field(gt=0, allow_inf_nan=False)]
"""Seconds, as a number or in Prometheus' notation: 30, 30s, 1m30s."""
