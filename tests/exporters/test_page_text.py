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

from exporters.families import FAMILIES, counter, gauge, histogram, quantiles
from exporters.metrics_text import render
from exporters.page_text import PageText
from exporters.scraping.target import Target

OPENMETRICS = "application/openmetrics-text; version=1.0.0"

texts = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)
numbers = st.floats() | st.integers(0, 10**12)
exemplars = st.builds(Exemplar, st.just({"trace_id": 'a "b"\\c'}), st.floats(0, 1e9), st.none() | st.floats(0, 1e10))
buckets = st.tuples(
    st.tuples(st.just("0.5"), numbers) | st.tuples(st.just("0.5"), numbers, exemplars),
    st.tuples(st.just("+Inf"), numbers),
)


@st.composite
def families(draw: st.DrawFn) -> Metric:
    row = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    labels = st.lists(texts, min_size=len(row.labels), max_size=len(row.labels))
    if row.kind == "histogram":
        made = histogram(row.name)
        for values in draw(st.lists(labels, max_size=2)):
            made.add_metric(values, draw(buckets), draw(st.none() | numbers))
        return made
    plain = (counter if row.kind == "counter" else gauge if row.kind == "gauge" else quantiles)(row.name)
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
        up, scrapes = gauge("window_ready"), counter("scrapes")
        up.add_metric([target], 1.0)
        scrapes.add_metric([target], 2)
        page.add([up, scrapes])
    lines = [line for line in b"".join(page.pieces()).decode().splitlines() if not line.startswith("# HELP")]
    assert lines == [
        "# TYPE prefixwatch_window_ready gauge",
        'prefixwatch_window_ready{target="a"} 1.0',
        'prefixwatch_window_ready{target="b"} 1.0',
        "# TYPE prefixwatch_scrapes_total counter",
        'prefixwatch_scrapes_total{target="a"} 2.0',
        'prefixwatch_scrapes_total{target="b"} 2.0',
    ]
