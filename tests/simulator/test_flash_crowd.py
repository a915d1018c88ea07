"""A flash crowd of cold prompts: with the degradation chain it doesn't reach the requests that hit."""

from __future__ import annotations

import pytest

from benchmarks.flash_crowd import CHAIN, Setting, ratio, run, traffic
from prefixwatch.simulator.traffic.trace import SimulatedRequest

SETTING = Setting()


@pytest.fixture(scope="module")
def requests() -> list[SimulatedRequest]:
    return traffic(SETTING)


def test_hits_stay_within_a_tenth_of_quiet_and_the_class_is_back_to_normal_afterwards(
    requests: list[SimulatedRequest],
) -> None:
    chained = run(SETTING, requests, "cache_aware", CHAIN)
    assert ratio(SETTING, chained) <= 1.10
    assert chained.transitions[-1].state == "normal"
    assert chained.transitions[0].at >= SETTING.begins


def test_without_the_chain_the_same_crowd_makes_the_hits_wait(requests: list[SimulatedRequest]) -> None:
    assert ratio(SETTING, run(SETTING, requests, "cache_aware", None)) > 5
