"""What targets that are gone had counted, however many come and go."""

from __future__ import annotations

from collections.abc import Callable

from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.fleet.derivation import counted_by
from prefixwatch.exporters.fleet.retired_targets import RetiredTargets
from prefixwatch.exporters.scraping.signals import SignalStore

Feed = Callable[..., SignalStore]

PAGE = (
    'prefixwatch_router_requests_total{outcome="completed",class="chat"} 3\n'
    'prefixwatch_router_in_flight{worker="w"} 0\n'
)


def completed(retired: RetiredTargets) -> float:
    return counted_by(retired.holders(), "routed_requests", "outcome")[("completed",)]


def test_a_thousand_that_went_are_two_hundred_and_a_sum(feed: Feed) -> None:
    retired = RetiredTargets(label_limit=100)
    for number in range(1000):
        retired.take(feed(PAGE, system="prefixwatch-router"), f"http://r{number}/metrics")
    assert len(retired.holders()) == 201
    assert completed(retired) == 3000.0


def test_one_that_comes_back_is_no_more_among_those_gone(feed: Feed) -> None:
    retired, router = RetiredTargets(label_limit=100), shipped_catalogue().get("prefixwatch-router")
    store = feed(PAGE, system="prefixwatch-router")
    retired.take(store, "http://r/metrics")
    assert retired.back("http://other/metrics", router) is None
    assert retired.back("http://r/metrics", router) is store
    assert retired.holders() == []


def test_two_that_went_from_one_address_are_both_counted(feed: Feed) -> None:
    """The same page under two names."""
    retired = RetiredTargets(label_limit=100)
    for _ in range(2):
        retired.take(feed(PAGE, system="prefixwatch-router"), "http://r/metrics")
    assert completed(retired) == 6.0


def test_counts_that_the_catalogue_reads_otherwise_now_are_dropped(feed: Feed) -> None:
    """The page tells them anew, so they would count twice."""
    retired, router = RetiredTargets(label_limit=100), shipped_catalogue().get("prefixwatch-router")
    retired.take(feed(PAGE, system="prefixwatch-router"), "http://r/metrics")
    assert retired.back("http://r/metrics", router.model_copy(update={"title": "read otherwise"})) is None
    assert retired.holders() == []


def test_nothing_fresh_is_left_of_what_went(feed: Feed) -> None:
    retired, store = RetiredTargets(label_limit=100), feed(PAGE, PAGE, system="prefixwatch-router")
    retired.take(store, "http://r/metrics")
    assert (store.increase, store.gauges, store.total("routed_requests")) == (None, {}, 3.0)
