"""Whole pages as prometheus_client writes them, in both formats, read by its parsers and by our reader."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import generate_latest as as_text
from prometheus_client.openmetrics.exposition import generate_latest as as_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Exemplar

from benchmarks.fuzz_exposition import Fuzzer
from prefixwatch.exporters.scraping.exposition import ExpositionReader

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

WANTED = ("load", "hits_total", "ttft_seconds_bucket", "ttft_seconds_sum", "ttft_seconds_count", "size_bytes_sum")

label_names = st.sampled_from(["engine", "model_name", "instance", "x_1"])
label_values = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\r"), max_size=10)
label_sets = st.dictionaries(label_names, label_values, max_size=3)
numbers = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-(10**18), 10**18).map(float),
    st.sampled_from([1e308, 5e-324, 0.1 + 0.2, 2.0**53 + 1]),
)
counts = st.integers(0, 10**15)
exemplars = st.none() | st.floats(0, 1e9).map(lambda value: Exemplar({"trace_id": "a # b"}, value))


class Registry:
    """Just enough of a registry for the encoders."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


@st.composite
def pages(draw: st.DrawFn) -> list[Metric]:
    """Families of every kind, wanted and unwanted, with series that differ in their labels."""
    load = GaugeMetricFamily("load", "Help \\ with\nescapes.")
    hits = CounterMetricFamily("hits", "-")
    ttft = HistogramMetricFamily("ttft_seconds", "-")
    size = SummaryMetricFamily("size_bytes", "-")
    other = GaugeMetricFamily("loader", "-")
    for labels in draw(st.lists(label_sets, max_size=5, unique_by=lambda labels: frozenset(labels.items()))):
        load.add_sample("load", labels, draw(numbers))
        other.add_sample("loader", labels, draw(numbers))
        exemplar = draw(exemplars)
        hits.add_sample("hits_total", labels, float(draw(counts)), exemplar=exemplar)
        within, total = draw(counts), draw(counts)
        for bound, count in (("0.5", within), ("+Inf", within + total)):
            ttft.add_sample("ttft_seconds_bucket", {**labels, "le": bound}, float(count), exemplar=exemplar)
        ttft.add_sample("ttft_seconds_count", labels, float(within + total))
        ttft.add_sample("ttft_seconds_sum", labels, draw(st.floats(0, 1e12)))
        size.add_sample("size_bytes_count", labels, float(total))
        size.add_sample("size_bytes_sum", labels, float(within))
    return draw(st.permutations([load, hits, ttft, size, other]))


def ours(text: bytes) -> Samples:
    reading = ExpositionReader(WANTED).read(text)
    assert (reading.malformed_lines, reading.duplicate_lines) == (0, 0)
    return {one.identity(): value for one, value in zip(reading.layout.series, reading.values.tolist(), strict=True)}


def theirs(families: Iterable[Metric]) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if sample.name in WANTED
    }


def same(one: Samples, other: Samples) -> bool:
    return one.keys() == other.keys() and all(
        value == other[key] or (math.isnan(value) and math.isnan(other[key])) for key, value in one.items()
    )


@settings(max_examples=60)
@given(pages())
def test_prometheus_text(families: list[Metric]) -> None:
    text = as_text(Registry(families))
    assert same(ours(text), theirs(parse_text(text.decode())))


@settings(max_examples=60)
@given(pages())
def test_openmetrics_with_exemplars(families: list[Metric]) -> None:
    text = as_openmetrics(Registry(families))  # type: ignore[no-untyped-call]  # as the library has it
    assert same(ours(text), theirs(parse_openmetrics(text.decode())))  # type: ignore[no-untyped-call]  # as the library has it


@settings(max_examples=40)
@given(pages())
def test_windows_line_ends(families: list[Metric]) -> None:
    text = as_text(Registry(families))
    assert same(ours(text.replace(b"\n", b"\r\n")), ours(text))


@settings(max_examples=40)
@given(pages(), st.integers(0, 10**6))
def test_the_order_of_labels_and_of_lines_says_nothing(families: list[Metric], seed: int) -> None:
    text = as_text(Registry(families))
    lines = text.split(b"\n")
    random.Random(seed).shuffle(lines)
    assert same(ours(b"\n".join(lines)), ours(text))
    one, other = ours(b'load{a="1",b="2"} 3\n'), ours(b'load{b="2",a="1"} 3\n')
    assert same(one, other)


@pytest.mark.parametrize("number", ["1e309", "-1e309", "9" * 400, "0.1e-400"])
def test_numbers_beyond_a_double_are_infinite_or_nothing(number: str) -> None:
    (value,) = ours(f"load {number}\n".encode()).values()
    assert value == float(number)


@pytest.mark.parametrize(
    "line",
    [
        b"load{" + b'a="' + b"\\" * 50_000,
        b"load{" + b'a="x",' * 20_000 + b"} 1",
        b"load" + b" " * 100_000 + b"x",
        b"load{" + b" " * 100_000 + b"} 1 2 3",
        b"load 1 # {" + b'"' * 100_000,
        b"load{a=" + b'"' * 100_001 + b"} 1",
    ],
)
def test_a_line_that_is_made_to_cost_costs_little(line: bytes) -> None:
    """No pattern backtracks: 100 KB of a kind take milliseconds, and the good line after them is read."""
    started = time.process_time()
    reading = ExpositionReader(WANTED).read(line + b"\nhits_total 5\n")
    assert time.process_time() - started < 1.0
    assert (
        dict(zip((one.name for one in reading.layout.series), reading.values.tolist(), strict=True))["hits_total"] == 5
    )


def test_a_short_fuzz_run() -> None:
    """A million inputs of the same kind were run once: `python -m benchmarks.fuzz_exposition`."""
    tally = Fuzzer(seed=7).run(1_500)
    assert tally.inputs == 1_500
    assert tally.lines_held > 1_000
    assert tally.malformed_lines > 50
    assert 0 < tally.ingested < tally.inputs
