"""Which prefix lost its requests, which workers joined or left, and how many sessions that moved."""

from __future__ import annotations

from typing import Any

from prometheus_client.core import Metric

from prefixwatch.exporters.caches.named_prefixes import NamedPrefixes, PrefixShare
from prefixwatch.exporters.requests.pool_changes import PoolChanges
from prefixwatch.exporters.requests.request import Identity, Request
from prefixwatch.kvcache.request_record import RequestRecord


def values(metrics: Any) -> dict[str, dict[tuple[str, ...], float]]:
    families: list[Metric] = list(metrics)
    return {
        family.name.removeprefix("prefixwatch_"): {tuple(s.labels.values()): s.value for s in family.samples}
        for family in families
        if family.samples
    }


def served(at: float, worker: str, session: str = "", outcome: str = "completed") -> Request:
    record = RequestRecord(at, outcome, worker=worker, session=session)
    return Request(record, at, Identity("m"), "default", "none", outcome, "hit", "whole_prompt", 0)


def pool(*requests: Request) -> PoolChanges:
    changes = PoolChanges(most_sessions=1000, window_seconds=300.0)
    for request in requests:
        changes.record(request)
    return changes


def steady(begin: float, end: float, workers: str) -> list[Request]:
    """A request a second, the workers in turn."""
    return [served(float(at), workers[at % len(workers)]) for at in range(int(begin), int(end))]


def test_a_changed_opening_takes_a_prefix_its_requests_while_a_rivals_stay() -> None:
    named = NamedPrefixes()
    named.look(4, {"bot": PrefixShare(97, 95), "faq": PrefixShare(100, 90)}, 200)
    named.look(5, {"bot": PrefixShare(0, 0), "faq": PrefixShare(60, 30)}, 100)
    assert values(named.metrics()) == {
        "named_prefix_request_share_ratio": {
            ("bot", "before"): 0.485,
            ("faq", "before"): 0.5,
            ("bot", "now"): 0.0,
            ("faq", "now"): 0.6,
        },
        "named_prefix_hit_share_ratio": {
            ("bot", "before"): 95 / 97,
            ("faq", "before"): 0.9,
            ("faq", "now"): 0.5,
        },
    }


def test_a_span_with_few_requests_and_one_that_nobody_saw_prove_nothing() -> None:
    named = NamedPrefixes()
    named.look(4, {"bot": PrefixShare(10, 10)}, 19)
    assert values(named.metrics()) == {}
    named.look(4, {"bot": PrefixShare(20, 10)}, 40)
    named.look(6, {"bot": PrefixShare(30, 30)}, 60)
    assert values(named.metrics())["named_prefix_request_share_ratio"] == {("bot", "now"): 0.5}


def test_workers_that_join_and_leave_are_counted_once_others_have_gone_on() -> None:
    before = steady(0, 400, "abc")
    assert values(pool(*before).metrics(400.0))["workers_changed"] == {("joined",): 0, ("left",): 0}
    joined = pool(*before, *steady(400, 430, "abcd"))
    assert values(joined.metrics(430.0))["workers_changed"] == {("joined",): 1, ("left",): 0}
    left = pool(*before, *steady(400, 460, "ab"))
    assert values(left.metrics(460.0))["workers_changed"] == {("joined",): 0, ("left",): 1}


def test_nobody_has_joined_before_the_exporter_has_watched_for_a_window() -> None:
    assert "workers_changed" not in values(pool(*steady(0, 200, "abc")).metrics(200.0))


def test_a_quiet_hour_makes_nobody_leave_and_a_worker_that_is_back_has_joined() -> None:
    before = steady(0, 400, "abc")
    assert values(pool(*before).metrics(4000.0))["workers_changed"][("left",)] == 0
    back = pool(*before, *steady(400, 470, "ab"), served(470.0, "c"))
    assert values(back.metrics(471.0))["workers_changed"] == {("joined",): 1, ("left",): 0}


def test_sessions_that_moved_are_a_share_of_those_that_came_again() -> None:
    first = [served(float(k), "a", f"s{k}") for k in range(25)]
    again = [served(30.0 + k, "b" if k < 5 else "a", f"s{k}") for k in range(20)]
    assert values(pool(*first, *again).metrics(60.0))["sessions_moved_ratio"] == {(): 0.25}
    assert "sessions_moved_ratio" not in values(pool(*first, *again[:19]).metrics(60.0))
    assert "sessions_moved_ratio" not in values(pool(*first, *again).metrics(1000.0))
