"""What caches are worth, how near reuse is, and whether routers count as engines do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.exporters.caches.in_flight import in_flight_leaks, least_excess, router_in_flight
from prefixwatch.exporters.caches.kv_events import KvEventCounts
from prefixwatch.exporters.caches.source import CacheSource
from prefixwatch.exporters.caches.value import (
    break_even_tokens,
    effective_cache_value_tokens,
)
from prefixwatch.exporters.caches.worker_targets import WorkerTargets
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.probes.prefill_baseline import Line, PrefillBaselines
from prefixwatch.exporters.requests.request import Identity, Place, Request
from prefixwatch.exporters.requests.routing import RequestLocality
from prefixwatch.exporters.scraping.histogram import Histogram
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.kvcache.request_record import RequestRecord

MakeTarget = Callable[..., Target]


def engine(running: float, waiting: float = 0) -> str:
    return f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\nvllm:kv_cache_usage_perc 0.5\n"


def router(**in_flight: float) -> str:
    lines = [f'prefixwatch_router_in_flight{{worker="{worker}"}} {n}\n' for worker, n in in_flight.items()]
    return "prefixwatch_router_requests_total 1\n" + "".join(lines)


def test_a_caches_value_is_its_tokens_times_their_hit_ratio() -> None:
    assert effective_cache_value_tokens(1000, 16, 0.25) == 4000
    assert effective_cache_value_tokens(1000, 16, None) is None
    assert effective_cache_value_tokens(None, 16, 0.5) is None
    assert effective_cache_value_tokens(0, 16, 0.5) == 0


TIMES = Histogram((0.01, 0.02, 0.1, math.inf), (0, 100, 100, 100), 2.0)
"""100 transfers of 10 to 20 ms, 2 s together; the quickest twentieth took up to 10.5 ms."""


def test_moving_pays_where_the_lines_cross() -> None:
    """c = 10.5 ms; the other 0.95 s moved 950 MB, so 1 kB a token is 1 µs; prefill is 0.5 ms and 3 µs a token."""
    tokens = break_even_tokens(TIMES, 950e6, 1000, Line(0.0005, 3e-6))
    assert tokens == pytest.approx((0.0105 - 0.0005) / (3e-6 - 1e-6))


@pytest.mark.parametrize(
    ("moved_bytes", "line", "tokens"),
    [
        (950e6, Line(0.0005, 1e-6), None),  # computing a token is as quick as moving it
        (950e6, Line(0.5, 3e-6), 0.0),  # a prefill's own overhead is larger than the transfer's
        (0.0, Line(0.0005, 3e-6), None),
    ],
)
def test_moving_may_never_pay_or_always(moved_bytes: float, line: Line, tokens: float | None) -> None:
    assert break_even_tokens(TIMES, moved_bytes, 1000, line) == tokens


def test_without_transfers_there_is_no_break_even() -> None:
    assert break_even_tokens(Histogram((1.0, math.inf), (0, 0), 0.0), 1.0, 1000, Line(0.0, 1e-6)) is None


def test_a_leak_is_what_never_goes_away(make_target: MakeTarget) -> None:
    """vllm-project/production-stack#1072 (RT22): of 100 requests 60 broke off; a router that forgets to count them down
    believes them in flight for ever."""
    leaking = make_target("r", *(router(a=n + 60, b=n) for n in (4, 0, 2, 1)))
    targets = [
        make_target("a", *(engine(n) for n in (3, 0, 2, 1))),
        make_target("b", *(engine(n) for n in (5, 1, 2, 1))),
    ]
    assert in_flight_leaks([leaking, *targets], 5.0) == {"a": 60.0, "b": 0.0}
    assert router_in_flight([leaking, *targets]) == {"a": 61.0, "b": 1.0}


def test_requests_that_wait_in_the_engine_are_no_leak(make_target: MakeTarget) -> None:
    targets = [make_target("r", *[router(a=40)] * 3), make_target("a", *[engine(8, waiting=32)] * 3)]
    assert in_flight_leaks(targets, 5.0) == {"a": 0.0}


def test_several_routers_beliefs_add_up(make_target: MakeTarget) -> None:
    routers = [make_target(name, *[router(a=10)] * 3) for name in ("r1", "r2")]
    assert in_flight_leaks([*routers, make_target("a", *[engine(13)] * 3)], 5.0) == {"a": 7.0}


def test_an_engine_that_runs_more_than_the_router_counts_is_no_leak_but_shows(make_target: MakeTarget) -> None:
    """llm-d/llm-d-router#2295 (RT24): the router counts 588 where the engine runs 1029; both counts are exported."""
    targets = [make_target("r", *[router(a=588)] * 3), make_target("a", *[engine(1029)] * 3)]
    assert in_flight_leaks(targets, 5.0) == {"a": 0.0}
    source = cache_source(targets)
    page = render(targets, "", [source])[0].decode()
    assert 'prefixwatch_router_in_flight_requests{target="a"} 588.0' in page
    assert 'prefixwatch_requests_running{target="a"} 1029.0' in page


def test_a_leak_is_not_told_from_too_few_scrapes_or_of_a_worker_that_is_down(make_target: MakeTarget) -> None:
    three = make_target("r", *[router(a=9)] * 3)
    assert in_flight_leaks([three, make_target("a", engine(1), engine(1))], 5.0) == {}
    assert in_flight_leaks([three, make_target("a", *[engine(1)] * 3, "refused")], 5.0) == {}
    assert in_flight_leaks([three], 5.0) == {}


@given(
    st.lists(st.tuples(st.floats(0, 60), st.integers(0, 50)), max_size=8),
    st.lists(st.tuples(st.floats(0, 60), st.integers(0, 50)), max_size=8),
)
def test_no_moment_shows_less_than_the_least_excess(
    believed: list[tuple[float, int]], real: list[tuple[float, int]]
) -> None:
    excess = least_excess([believed], real, 5.0)
    pairs = [(b, r) for at, r in real for when, b in believed if abs(when - at) <= 5.0]
    if excess is not None:
        assert min(b - r for b, r in pairs) <= excess <= max(b - r for b, r in pairs)
    else:
        assert sum(any(abs(when - at) <= 5.0 for when, _ in believed) for at, _ in real) < 3


@pytest.mark.parametrize("worker", ["a", "http://10.0.0.1:8000", "10.0.0.1:8000", "http://10.0.0.1:8000/v1"])
def test_a_worker_is_found_by_name_and_address(make_target: MakeTarget, worker: str) -> None:
    one, other = make_target("a", engine(1)), make_target("b", engine(1))
    one.config = one.config.model_copy(update={"url": "http://10.0.0.1:8000/metrics"})
    assert WorkerTargets([one, other]).find(worker) is one
    assert WorkerTargets([other]).find(worker) is None


def test_two_targets_behind_one_address_are_not_told_apart_by_it(make_target: MakeTarget) -> None:
    targets = [make_target("a", engine(1)), make_target("b", engine(1))]
    assert WorkerTargets(targets).find("http://localhost") is None
    assert WorkerTargets(targets).find("b") is targets[1]


PLACES = {"a": Place("z1", "n1"), "b": Place("z1", "n2"), "c": Place("z2", "n3"), "d": Place()}


def seen(at: float, worker: str, cached: int | None = 100, session: str = "s", **record: Any) -> Request:
    told = RequestRecord(at, record.pop("outcome", "completed"), worker=worker, session=session, **record)
    return Request(told, at, Identity("m"), "default", "none", told.outcome, "hit", "whole_prompt", cached)


MARKS_OF = {"a": (1,), "b": (2,)}


def ratios(*requests: Request, now: float = 100.0) -> Mapping[str, float]:
    locality = RequestLocality(200.0, 10, PLACES.__getitem__)
    for request in requests:
        locality.record(request)
    return {name: round(value, 3) for name, value in locality.ratios(now).items()}


def test_reuse_at_once_is_near_in_time_whatever_the_clock_says() -> None:
    one, other = (MARKS_OF[name] for name in "ab")
    assert ratios(
        seen(0, "a", 0, "s", marks=one),
        seen(1, "a", 0, "t", marks=other),
        seen(90, "a", 300, "t"),  # the next request, 89 s later; t has half of the 4 requests
        seen(91, "b", 100, "s"),  # after 3 requests, and has the other half
    ) == {"temporal": 0.375, "norm": 0.375}


def test_hit_tokens_of_the_same_first_blocks_are_of_one_prefix() -> None:
    long, longer = tuple(range(1, 9)), tuple(range(1, 13))  # alike in the first 8 blocks
    found = ratios(
        seen(1, "a", 300, "", marks=long), seen(2, "a", 300, "", marks=longer), seen(3, "a", 200, "", marks=(9,))
    )
    assert found["spatial"] == 0.625


def test_identity_is_of_users_who_had_another_session() -> None:
    found = ratios(
        seen(0, "a", 100, "s1", user="u"),
        seen(1, "a", 500, "s1", user="u"),  # the same session: no other one
        seen(2, "a", 300, "s2", user="u"),
        seen(3, "a", 900, "s3"),  # nobody's
    )
    assert found["identity"] == 0.75


def test_placements_are_near_where_they_stay_in_the_zone() -> None:
    held = {"held_tokens": 64}
    found = ratios(
        seen(1, "b", session="", held_by="a", **held),
        seen(2, "a", session="", held_by="a", **held),
        seen(3, "c", 16, session="", held_by="a", **held),
        seen(4, "d", 0, session="", held_by="a", **held),
        seen(5, "d", session="", held_by="d", **held),
        seen(6, "c", session="", held_by="", held_tokens=0),
    )
    assert found == {"topological": 0.65, "norm": 0.65}


def test_what_is_older_than_the_window_or_failed_is_left_out() -> None:
    assert ratios(seen(0, "a", held_by="a", held_tokens=10), now=300.0) == {}
    assert ratios(seen(0, "a", held_by="a", held_tokens=10, outcome="failed")) == {}


class Events:
    def counts(self) -> KvEventCounts:
        return KvEventCounts(0, 0, 1000, 0, 0.0, block_size_tokens=16)

    def why_unknown(self) -> str:
        return ""


def cache_source(targets: list[Target], ratios: Mapping[str, float] | None = None) -> CacheSource:
    return CacheSource(lambda: targets, lambda _: ratios or {}, lambda *_: {}, PrefillBaselines(), interval_seconds=5.0)


def test_all_is_exported_together_and_what_is_absent_says_why(make_target: MakeTarget) -> None:
    counters = "vllm:prefix_cache_hits_total {}\nvllm:prefix_cache_queries_total {}\n"
    target = make_target("a", *(engine(1) + counters.format(50 * k, 200 * k) for k in range(3)))
    target.kv_events = Events()
    source = cache_source([target], {"identity": 0.5})
    page = render([target], "", [source])[0].decode()
    for line in (
        'prefixwatch_effective_cache_value_tokens{target="a"} 4000.0',
        'prefixwatch_locality_ratio{dimension="identity"} 0.5',
    ):
        assert line in page
    assert "break_even" not in page
    absent = source.document(0.0)["absent"]
    assert "router.degradation is off" in absent["warm_pool_utilization_ratio"]
    assert "set kv_bytes_per_token" in absent["kv_transfer_break_even_tokens"]
    assert "by request records" in absent["locality_ratio.temporal"]
    assert "locality_ratio.identity" not in absent


def test_a_target_without_events_has_no_value(make_target: MakeTarget) -> None:
    source = cache_source([make_target("a", engine(1))])
    assert "effective_cache_value" not in render([], "", [source])[0].decode()
    assert "needs KV events" in source.document(0.0)["absent"]["effective_cache_value_tokens"]
