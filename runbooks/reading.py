"""How to read the answer of a diagnosis step: conditions on one number, as data."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable

ABSENT = "absent"
OTHERWISE = "otherwise"
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
}
_TERM = re.compile(r"(<=|>=|==|<|>)\s*(-?\d+(?:\.\d+)?(?:e-?\d+)?)")


def check_condition(condition: str) -> str:
    """The condition itself. Raises ValueError unless it is `absent`, `otherwise` or such as `>= 0.6 and < 0.8`."""
    if condition not in (ABSENT, OTHERWISE):
        _terms(condition)
    return condition


def holds(condition: str, value: float | None) -> bool:
    """Whether a condition is true of a value; None and NaN are absent, of which nothing else is true."""
    if value is None or math.isnan(value):
        return condition == ABSENT
    if condition in (ABSENT, OTHERWISE):
        return condition == OTHERWISE
    return all(_OPERATORS[name](value, limit) for name, limit in _terms(condition))


def _terms(condition: str) -> list[tuple[str, float]]:
    found = []
    for term in condition.split(" and "):
        match = _TERM.fullmatch(term.strip())
        if match is None:
            raise ValueError(
                f"'{condition}' is not a condition: write '{ABSENT}', '{OTHERWISE}' or comparisons: '>= 0.6 and < 0.8'"
            )
        found.append((match[1], float(match[2])))
    return found
