"""The catalogue of faults is complete, and every test that it names exists."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.router.fault_catalogue import CATALOGUE

TESTS = Path(__file__).parents[1]
FAULTS = [f"F-{number}" for number in range(1, 19)]
ROUTER_REPORTS = [
    *("RT01", "RT02", "RT03", "RT04", "RT05", "RT06", "RT09", "RT11", "RT12", "RT14", "RT16", "RT17", "RT18", "RT19"),
    *("RT22", "RT23", "RT24", "RT26", "RT27", "RT30", "RT31", "RT32", "RT36", "RT37", "RT38", "RT39", "RT40", "RT43"),
    "RT44",
]
"""Field reports whose tests include the router."""


@cache
def functions_of(module: str) -> frozenset[str]:
    """The names of a module's test functions; none where there is no such module."""
    path = TESTS / f"{module}.py"
    if not path.is_file():
        return frozenset()
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return frozenset(
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )


def test_every_fault_and_every_report_about_routers_is_there() -> None:
    assert list(CATALOGUE) == [*FAULTS, *ROUTER_REPORTS]


@pytest.mark.parametrize("name", CATALOGUE)
def test_its_tests_exist(name: str) -> None:
    fault = CATALOGUE[name]
    missing = [
        test for test in (*fault.shown, *fault.free) if test.split("::")[1] not in functions_of(test.split("::")[0])
    ]
    assert missing == []


@pytest.mark.parametrize("name", CATALOGUE)
def test_it_is_shown_on_a_policy_or_says_why_not_and_somebody_is_free_of_it(name: str) -> None:
    fault = CATALOGUE[name]
    assert bool(fault.shown) != bool(fault.elsewhere)
    assert fault.free
