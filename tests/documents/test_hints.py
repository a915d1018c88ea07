"""A mistyped name gets the nearest known one, or all of them."""

from __future__ import annotations

import pytest

from prefixwatch.documents.hints import did_you_mean


@pytest.mark.parametrize(
    ("given", "known", "hint"),
    [
        ("prot", ["port", "host"], "did you mean 'port'?"),
        ("rate", ["format", "rate_per_second"], "did you mean 'rate_per_second'?"),
        ("prefixhitlow", ["PrefixHitRateLow"], "did you mean 'PrefixHitRateLow'?"),
        ("zzz", ["port", "host"], "use one of port, host"),
        ("", ["port"], "use one of port"),
        ("x", [], "there are none"),
    ],
)
def test_the_hint(given: str, known: list[str], hint: str) -> None:
    assert did_you_mean(given, known) == hint


def test_the_caller_can_say_what_to_do_when_nothing_is_close() -> None:
    assert did_you_mean("zzz", ["port"], "load the file") == "load the file"


def test_a_long_list_is_cut() -> None:
    assert did_you_mean("zzz", [f"name{i}" for i in range(100)]).endswith("name39, …")
    assert did_you_mean("zzz", [f"name{i}" for i in range(41)]).endswith("name39, …")
    assert did_you_mean("zzz", [f"name{i}" for i in range(40)]).endswith("name38, name39")
