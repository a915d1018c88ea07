"""Advice on the size of the fleet: the governor never oscillates, losses are what only one worker holds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from prefixwatch.exporters.caches.prefix_traffic import PrefixTraffic
from prefixwatch.exporters.caches.prefixes import PrefixSource
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.requests.request import Identity, Request
from prefixwatch.exporters.scaling.config import ScalingSettings
from prefixwatch.exporters.scaling.governor import Limits, Rule, State, advance
from prefixwatch.exporters.scaling.source import NO_EVENTS, NO_TARGET, NOT_SCRAPED, ScalingSource
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.kvcache.blocks import as_tokens, block_hashes
from prefixwatch.kvcache.events.table_feed import TableFeed
from prefixwatch.kvcache.request_record import RequestRecord

MakeTarget = Callable[..., Target]
LIMITS = Limits(target_load=10.0, low_ratio=0.8, up_seconds=30, down_seconds=300)


def run(loads: Sequence[float], start: int, limits: Limits = LIMITS, every: float = 15.0) -> list[int]:
    """The desired numbers under these loads, of a fleet that follows at once."""
    state, desired = State(start), []
    for k, load in enumerate(loads):
        state = advance(state, limits, k * every, state.desired, load)
        desired.append(state.desired)
    return desired


def turns(desired: Sequence[int]) -> int:
    steps = [1 if b > a else -1 for a, b in pairwise(desired) if a != b]
    return sum(a != b for a, b in pairwise(steps))


def test_a_load_above_the_target_adds_all_that_it_needs_at_once() -> None:
    assert run([35.0] * 3, 2) == [2, 2, 4]


def test_a_low_load_removes_one_worker_per_period() -> None:
    assert [run([10.0] * 61, 4)[k] for k in (19, 20, 39, 40, 60)] == [4, 3, 3, 2, 2]


def test_a_worker_whose_cache_is_worth_more_stays_and_the_rule_says_so() -> None:
    state = State(4)
    for k in range(40):
        state = advance(state, LIMITS, 15.0 * k, 4, 5.0, gate=Rule.CACHE_WORTH_MORE)
    assert (state.desired, state.rule) == (4, Rule.CACHE_WORTH_MORE)


def test_workers_that_are_starting_are_not_asked_for_twice_and_a_change_from_outside_is_taken_up_later() -> None:
    state = State(2)
    for k in range(10):
        state = advance(state, LIMITS, 15.0 * k, 2, 35.0)
    assert state.desired == 4
    for k in range(10, 80):
        state = advance(state, LIMITS, 15.0 * k, 3, 29.0)
    assert state.desired == 3


def test_the_bounds_hold() -> None:
    limits = Limits(10.0, up_seconds=0, down_seconds=0, min_workers=2, max_workers=5)
    assert run([1000.0] * 3, 3, limits)[-1] == 5
    assert run([0.0] * 20, 5, limits)[-1] == 2


loads = st.lists(st.floats(0, 400), min_size=2, max_size=400)
limits = st.builds(
    Limits,
    target_load=st.floats(1, 50),
    low_ratio=st.floats(0.3, 0.95),
    up_seconds=st.floats(0, 120),
    down_seconds=st.floats(60, 900),
)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=400), st.floats(1, 400), limits, st.integers(1, 60))
@settings(max_examples=150)
def test_a_load_that_stays_within_the_band_never_makes_the_fleet_turn(
    shape: list[float], low: float, own: Limits, start: int
) -> None:
    high = low / own.low_ratio * (1 - 1e-9)
    assert turns(run([low + share * (high - low) for share in shape], start, own)) == 0


@given(loads, limits, st.integers(1, 60))
@settings(max_examples=150)
def test_no_load_makes_it_turn_or_shrink_more_often_than_the_pauses_allow(
    signal: list[float], own: Limits, start: int
) -> None:
    desired, seconds = run(signal, start, own), 15.0 * len(signal)
    removals = sum(b < a for a, b in pairwise(desired))
    assert removals <= seconds / own.down_seconds
    assert turns(desired) <= 2 * (seconds / own.down_seconds) + 1


@given(loads, limits, st.integers(1, 60), st.floats(0, 400))
@settings(max_examples=100)
def test_a_steady_load_is_reached_and_then_nothing_changes(
    signal: list[float], own: Limits, start: int, steady: float
) -> None:
    desired = run([*signal[:20], *[steady] * 500], start, own, every=1.01 * own.down_seconds)[-1]
    assert desired >= math.ceil(steady / own.target_load - 1e-9) or desired == 1
    assert desired == 1 or steady > own.low_ratio * own.target_load * (desired - 1)


def test_a_wrong_setting_names_the_remedy() -> None:
    with pytest.raises(ValidationError, match="max_workers is 1, below min_workers 2: raise it"):
        ScalingSettings(min_workers=2, max_workers=1)


SYSTEM, OTHER = [7] * 48, [9] * 64


def blocks(tokens: list[int]) -> list[int]:
    found: list[int] = block_hashes(as_tokens(tokens)).tolist()
    return found


def stores(source: PrefixSource, worker: str, *prompts: list[int]) -> None:
    feed = TableFeed(worker, source.table)
    for sequence, tokens in enumerate(prompts):
        event = {"type": "BlockStored", "block_hashes": blocks(tokens), "parent_block_hash": None,
                 "token_ids": tokens, "block_size": 16, "medium": "GPU"}  # fmt: skip
        feed.apply(sequence, msgspec.msgpack.encode([1.7e9, [event], 0]), 0.0)


def found_cached(traffic: PrefixTraffic, prompt: list[int]) -> None:
    record = RequestRecord(0.0, "completed", prompt_block=blocks(prompt)[-1], reused_block=blocks(prompt)[-1])
    now = time.monotonic()
    traffic.record(Request(record, now, Identity("m"), "default", "none", "completed", "hit", "", None))


def engine(running: float) -> str:
    return f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.5\n"


async def two_workers(make_target: MakeTarget, *, per_token: float | None, **configured: object) -> ScalingSource:
    """a and b hold SYSTEM; only b holds OTHER (used) and one that nobody asks for."""
    traffic = PrefixTraffic()
    found_cached(traffic, SYSTEM)
    found_cached(traffic, OTHER)
    prefixes = PrefixSource(secret="key", traffic=traffic.counts)
    stores(prefixes, "a", SYSTEM)
    stores(prefixes, "b", SYSTEM, OTHER, [3] * 32)
    await prefixes.refresh()
    targets = [make_target("a", *[engine(3)] * 3), make_target("b", *[engine(1)] * 3)]
    chosen = ScalingSettings.model_validate({"target_load_requests": 10, **configured})
    return ScalingSource(chosen, lambda: targets, prefixes, lambda model: per_token, gpus_per_worker=2.0)


async def test_what_only_one_worker_holds_and_requests_use_is_what_would_be_lost(make_target: MakeTarget) -> None:
    source = await two_workers(make_target, per_token=0.001)

    [group] = source.advice(0.0)["groups"]

    first, second = group["drain_order"]
    assert (first["worker"], first["lost_hit_tokens"], first["deletion_cost"]) == ("a", 0, 0)
    assert (second["worker"], second["lost_hit_tokens"], second["basis"]) == ("b", 64, "traffic")
    assert second["lost_gpu_seconds"] == pytest.approx(64 * 0.001 * 2)
    assert second["cached_tokens"] == 48 + 64 + 32
    by_tokens = {one["held_tokens"]: (one["lost_tokens"], one["worker"]) for one in second["absorbed_by"]}
    assert by_tokens == {64: (64, "a"), 48: (0, "a"), 32: (0, "a")}


async def test_the_cheapest_worker_goes_after_the_load_was_low_for_long(make_target: MakeTarget) -> None:
    source = await two_workers(make_target, per_token=0.001)
    assert source.advice(0.0)["groups"][0]["advice"] == {"action": "none", "workers": 0, "rule": "hold"}
    [group] = source.advice(300.0)["groups"]
    assert group["advice"] == {"action": "remove", "workers": 1, "rule": "load_low", "remove": ["a"]}
    page = render([], "", [source])[0].decode()
    assert "prefixwatch_scaling_desired_workers 1.0" in page
    assert 'prefixwatch_worker_loss_hit_tokens{target="b"} 64.0' in page
    assert 'prefixwatch_worker_loss_gpu_seconds{target="b"} 0.128' in page


async def test_a_target_load_in_the_question_is_answered_at_once_and_changes_nothing(make_target: MakeTarget) -> None:
    source = await two_workers(make_target, per_token=0.001)
    [group] = source.advice(0.0, target_load=1.5)["groups"]
    assert group["advice"] == {"action": "add", "workers": 1, "rule": "load_high"}
    assert source.advice(0.0)["groups"][0]["desired_workers"] == 2


async def test_without_a_target_there_is_no_advice_but_the_losses_are_known(make_target: MakeTarget) -> None:
    source = await two_workers(make_target, per_token=None, target_load_requests=None)
    [group] = source.advice(0.0)["groups"]
    assert (group["advice"], group["why"]) == (None, NO_TARGET)
    assert group["drain_order"][1]["absent"] == {
        "lost_gpu_seconds": "the time of a prefill isn't known: set exporter.probes, or scrape prefixwatch's router"
    }
    assert "scaling_desired_workers" not in render([], "", [source])[0].decode()


async def test_a_cache_that_nobody_knows_is_never_advised_away(make_target: MakeTarget) -> None:
    targets = [make_target(name, *[engine(0)] * 3) for name in "ab"]
    chosen = ScalingSettings(target_load_requests=10)
    source = ScalingSource(chosen, lambda: targets, PrefixSource(), lambda model: 0.001)
    source.advice(0.0)
    [group] = source.advice(300.0)["groups"]
    assert group["advice"] == {"action": "none", "workers": 0, "rule": "loss_unknown"}
    assert (group["removal_withheld"], group["unheard_workers"]) == (NO_EVENTS, ["a", "b"])


async def test_workers_that_can_not_be_scraped_are_not_idle(make_target: MakeTarget) -> None:
    """Half of the load vanishes with them: neither that nor their number is a reason to shrink."""
    source = await two_workers(make_target, per_token=0.001)
    targets = source._targets()
    assert source.advice(0.0)["groups"][0]["desired_workers"] == 2
    targets[1].fail("timeout", "no answer")
    for seconds in range(15, 2000, 15):
        [group] = source.advice(float(seconds))["groups"]
        assert group["desired_workers"] == 2, seconds
    assert (group["advice"]["rule"], group["removal_withheld"]) == ("load_unknown", NOT_SCRAPED)
    targets[0].loads.add(2000.0, {"": 45.0})
    source.advice(2000.0)
    assert source.advice(2030.0)["groups"][0]["desired_workers"] > 2, "a load that is known and too high still counts"


async def test_a_tiny_target_in_the_question_is_answered(make_target: MakeTarget) -> None:
    source = await two_workers(make_target, per_token=0.001)
    [group] = source.advice(0.0, target_load=5e-324)["groups"]
    assert group["desired_workers"] == 1_000_000


async def test_a_worker_whose_process_is_gone_does_not_keep_all_others(make_target: MakeTarget) -> None:
    """One that was removed as advised, but is still listed: nothing listens there, so its load is known to be none."""
    source = await two_workers(make_target, per_token=0.001)
    source.advice(0.0)
    source._targets()[1].fail("refused", "connection refused")
    for seconds in range(15, 301, 15):
        [group] = source.advice(float(seconds))["groups"]
        assert group["desired_workers"] == (1 if seconds >= 300 else 2), seconds
    assert group["advice"]["rule"] == "load_low"
    for seconds in range(315, 3000, 15):
        [group] = source.advice(float(seconds))["groups"]
        assert group["desired_workers"] == 1, seconds
