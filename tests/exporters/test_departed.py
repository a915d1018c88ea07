"""What targets that are gone had counted, however many come and go."""

from __future__ import annotations

from collections.abc import Callable

from exporters.catalogue import shipped_catalogue
from exporters.departed import Departed
from exporters.fleet import counted_by
from exporters.scraping.signals import SignalStore

Feed = Callable[..., SignalStore]

PAGE = (
    'prefixwatch_router_requests_total{outcome="completed",class="chat"} 3\n'
    'prefixwatch_router_in_flight{worker="w"} 0\n'
)


def completed(departed: Departed) -> float:
    return counted_by(departed.holders(), "routed_requests", "outcome")[("completed",)]


def test_a_thousand_that_went_are_two_hundred_and_a_sum(feed: Feed) -> None:
    departed = Departed(label_limit=100)
    for number in range(1000):
        departed.take(feed(PAGE, system="prefixwatch-router"), f"http://r{number}/metrics")
    assert len(departed.holders()) == 201
    assert completed(departed) == 3000.0


def test_one_that_comes_back_is_no_more_among_those_gone(feed: Feed) -> None:
    departed, router = Departed(label_limit=100), shipped_catalogue().get("prefixwatch-router")
    store = feed(PAGE, system="prefixwatch-router")
    departed.take(store, "http://r/metrics")
    assert departed.back("http://other/metrics", router) is None
    assert departed.back("http://r/metrics", router) is store
    assert departed.holders() == []


def test_two_that_went_from_one_address_are_both_counted(feed: Feed) -> None:
    """The same page under two names."""
    departed = Departed(label_limit=100)
    for _ in range(2):
        departed.take(feed(PAGE, system="prefixwatch-router"), "http://r/metrics")
    assert completed(departed) == 6.0


def test_counts_that_the_catalogue_reads_otherwise_now_are_dropped(feed: Feed) -> None:
    """The page tells them anew, so they would count twice."""
    departed, router = Departed(label_limit=100), shipped_catalogue().get("prefixwatch-router")
    departed.take(feed(PAGE, system="prefixwatch-router"), "http://r/metrics")
    assert departed.back("http://r/metrics", router.model_copy(update={"title": "read otherwise"})) is None
    assert departed.holders() == []


def test_nothing_fresh_is_left_of_what_went(feed: Feed) -> None:
    departed, store = Departed(label_limit=100), feed(PAGE, PAGE, system="prefixwatch-router")
    departed.take(store, "http://r/metrics")
    assert (store.increase, store.gauges, store.total("routed_requests")) == (None, {}, 3.0)
