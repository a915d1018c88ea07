"""Every published fault that a load generator can show has a test here that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

REPORTS = (
    *(f"LT{n:02d}" for n in (1, 2, 4, 5, 7, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20, 21, 22, 27)),
    *("EM44", "EM46", "EM47", "RT01", "RT26", "RT31", "RT32", "RT40", "SL16", "SL20"),
)


@pytest.fixture(scope="module")
def text() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py") if path != Path(__file__))


@pytest.mark.parametrize("report", REPORTS)
def test_the_report_has_a_test(report: str, text: str) -> None:
    assert report in text
