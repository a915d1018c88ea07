"""Conditions of readings."""

from __future__ import annotations

import pytest

from prefixwatch.runbooks.reading import check_condition, holds


@pytest.mark.parametrize(
    ("condition", "value", "expected"),
    [
        ("< 0.6", 0.59, True),
        ("< 0.6", 0.6, False),
        (">= 0.2 and < 0.5", 0.2, True),
        (">= 0.2 and < 0.5", 0.5, False),
        ("== 0", 0.0, True),
        ("otherwise", 7.0, True),
        ("otherwise", None, False),
        ("absent", None, True),
        ("absent", float("nan"), True),
        ("absent", 0.0, False),
        ("> 1", float("nan"), False),
    ],
)
def test_conditions(condition: str, value: float | None, expected: bool) -> None:
    assert holds(condition, value) is expected


@pytest.mark.parametrize("condition", ["high", "> ten", "0.5", "> 1 or < 0"])
def test_what_is_no_condition_is_refused_with_an_example(condition: str) -> None:
    with pytest.raises(ValueError, match=r"'>= 0\.6 and < 0\.8'"):
        check_condition(condition)
