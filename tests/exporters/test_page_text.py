"""The text of a page against prometheus_client's own encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Exemplar, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from prefixwatch.exporters.metrics_page.families import FAMILIES
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.metrics_page.rows import histograms, rows
from prefixwatch.exporters.metrics_page.text import PageText
from prefixwatch.exporters.scraping.target import Target

OPENMETRICS = "application/openmetrics-text; version=1.0.0"

texts = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=8)
numbers = st.floats() | st.integers(0, 10**12)
exemplars = st.builds(Exemplar, st.just({"trace_id": 'a "b"\\c'}), st.floats(0, 1e9), st.none() | st.floats(0, 1e10))
buckets = st.tuples(
    st.tuples(st.just("0.5"), numbers) | st.tuples(st.just("0.5"), numbers, exemplars),
    st.tuples(st.just("+Inf"), numbers),
)


@st.composite
def families(draw: st.DrawFn) -> Metric:
    row = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    labels = st.lists(texts, min_size=len(row.given), max_size=len(row.given))
    if row.kind == "histogram":
        made = histograms(row.name)
        for values in draw(st.lists(labels, max_size=2)):
            made.add_metric(values, draw(buckets), draw(st.none() | numbers))
        return made
    plain = rows(row.name)
    for values in draw(st.lists(labels, max_size=3)):
        plain.add_metric(values, draw(numbers))
    plain.documentation = draw(texts)
    return plain


class Given(Collector):
    def __init__(self, given_families: Sequence[Metric]) -> None:
        self._families = given_families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def by_prometheus_client(some: Sequence[Metric], accept: str) -> tuple[bytes, str]:
    registry = CollectorRegistry(auto_describe=False)
    registry._collector_to_names[Given(some)] = []  # what is registered may have each name only once
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


def text_of(some: Sequence[Metric], accept: str) -> tuple[bytes, str]:
    page = PageText(accept)
    page.add(some)
    return b"".join(page.pieces()), page.content_type


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
@given(st.lists(families(), max_size=4, unique_by=lambda family: family.name))
def test_is_what_prometheus_client_writes(accept: str, some: list[Metric]) -> None:
    assert text_of(some, accept) == by_prometheus_client(some, accept)


def test_a_label_without_a_value_is_left_out() -> None:
    """Absent and empty are the same label to Prometheus, and a fleet's page is a third shorter."""
    up = rows("target_up", [(["a", "vllm", ""], 1.0), (["b", "", ""], 0.0)])
    lines = text_of([up], "")[0].decode().splitlines()[2:]
    assert lines == ['prefixwatch_target_up{system="vllm",target="a"} 1.0', 'prefixwatch_target_up{target="b"} 0.0']


def test_families_about_targets_say_what_their_target_is() -> None:
    """A sample's own model is more exact than its target's."""
    page = PageText("", {"a": {"model": "m", "pool": "p"}})
    waits = histograms("kv_block_lifetime_seconds")
    waits.add_metric(["a"], [("1.0", 1), ("+Inf", 2)], None)
    page.add(
        [
            waits,
            rows("preemptions", [(["a", "own"], 1), (["a", ""], 2), (["b", ""], 3)]),
            rows("scrape_age_seconds", [(["a"], 4)]),
        ]
    )
    lines = [line for line in b"".join(page.pieces()).decode().splitlines() if not line.startswith("#")]
    assert lines == [
        'prefixwatch_kv_block_lifetime_seconds_bucket{le="1.0",model="m",pool="p",target="a"} 1.0',
        'prefixwatch_kv_block_lifetime_seconds_bucket{le="+Inf",model="m",pool="p",target="a"} 2.0',
        'prefixwatch_preemptions_total{model="own",pool="p",target="a"} 1.0',
        'prefixwatch_preemptions_total{model="m",pool="p",target="a"} 2.0',
        'prefixwatch_preemptions_total{target="b"} 3.0',
        'prefixwatch_scrape_age_seconds{target="a"} 4.0',
    ]


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_the_process_own_metrics_are_written_alike(accept: str) -> None:
    some = list(ProcessCollector(registry=None).collect())
    assert text_of(some, accept) == by_prometheus_client(some, accept)


def test_a_page_of_many_targets_has_each_family_once(make_target: Callable[..., Target]) -> None:
    targets = [make_target(f"engine-{number}", "vllm:prefix_cache_queries_total 1\n") for number in range(120)]
    text = render(targets)[0].decode()
    heads = [line for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(heads) == len(set(heads))
    up = next(family for family in text_string_to_metric_families(text) if family.name == "prefixwatch_target_up")
    assert [sample.labels["target"] for sample in up.samples] == [target.name for target in targets]


def test_parts_of_a_family_are_put_together() -> None:
    page = PageText()
    for target in ("a", "b"):
        up, scrapes = rows("window_seconds"), rows("scrapes")
        up.add_metric([target], 1.0)
        scrapes.add_metric([target], 2)
        page.add([up, scrapes])
    lines = [line for line in b"".join(page.pieces()).decode().splitlines() if not line.startswith("# HELP")]
    assert lines == [
        "# TYPE prefixwatch_window_seconds gauge",
        'prefixwatch_window_seconds{target="a"} 1.0',
        'prefixwatch_window_seconds{target="b"} 1.0',
        "# TYPE prefixwatch_scrapes_total counter",
        'prefixwatch_scrapes_total{target="a"} 2.0',
        'prefixwatch_scrapes_total{target="b"} 2.0',
    ]
