"""Durations as people write them."""

from __future__ import annotations

import re

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def seconds_of(given: object) -> object:
    """`30s`, `1m30s`, `500ms` → seconds; a number is seconds already, and anything else is left to the validator.

    Raises ValueError for a text that is no duration.
    """
    if not isinstance(given, str):
        return given
    text = given.strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if not text or _PART.sub("", text):
        raise ValueError(f"'{given}' is not a duration such as 30s or 1m30s")
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
