"""The exposition reader against prometheus_client's own parser, and against anything at all."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from prefixwatch.exporters.scraping.exposition import RESCAN_EVERY, ExpositionReader, looks_like_metrics

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

WANTED = ("load", "hits_total", "ttft_seconds_bucket")

values = st.one_of(
    st.floats(allow_nan=False), st.integers(-(10**15), 10**15), st.sampled_from(["NaN", "+Inf", "-Inf", "Inf", "1e3"])
)
label_texts = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12)
label_sets = st.dictionaries(st.sampled_from(["engine", "model_name", "le", "x_1"]), label_texts, max_size=3)


def line(name: str, labels: dict[str, str], value: object, timestamp: str = "") -> str:
    def quoted(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    inside = ",".join(f'{key}="{quoted(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {value}{timestamp}" if labels else f"{name} {value}{timestamp}"


sample_lines = st.builds(
    line,
    st.sampled_from([*WANTED, "load_created", "unwanted", "loader"]),
    label_sets,
    values,
    st.sampled_from(["", " 1700000000000"]),
)


def read(text: bytes | str, reader: ExpositionReader | None = None) -> Samples:
    reading = (reader or ExpositionReader(WANTED)).read(text if isinstance(text, bytes) else text.encode())
    return {one.identity(): value for one, value in zip(reading.layout.series, reading.values.tolist(), strict=True)}


def by_prometheus_client(text: str) -> Samples:
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in WANTED:
                samples.setdefault((sample.name, frozenset(sample.labels.items())), sample.value)
    return samples


def same(ours: Samples, theirs: Samples) -> bool:
    return ours.keys() == theirs.keys() and all(
        value == theirs[key] or (math.isnan(value) and math.isnan(theirs[key])) for key, value in ours.items()
    )


@settings(deadline=None)
@given(st.lists(sample_lines, max_size=12))
def test_reads_what_prometheus_client_reads(lines: list[str]) -> None:
    """Escapes, timestamps, NaN and infinities, duplicates (the first counts), names that begin like wanted ones."""
    text = "# TYPE load gauge\n" + "".join(f"{one}\n" for one in lines)
    assert same(read(text), by_prometheus_client(text))


@settings(max_examples=80, deadline=None)
@given(st.lists(sample_lines, min_size=1, max_size=8), st.data())
def test_a_second_reading_shows_only_what_a_line_of_the_new_text_says(lines: list[str], data: st.DataObject) -> None:
    """The memo of where lines were must never show an old value, or one of another series."""
    reader = ExpositionReader(WANTED)
    reader.read("\n".join(lines).encode())
    for _ in range(3):
        position = data.draw(st.integers(0, len(lines) - 1))
        edit = data.draw(st.sampled_from(["replace", "insert", "delete", "value", "swap"]))
        if edit == "replace":
            lines[position] = data.draw(sample_lines)
        elif edit == "insert":
            lines.insert(position, data.draw(sample_lines))
        elif edit == "delete" and len(lines) > 1:
            del lines[position]
        elif edit == "value":
            lines[position] = lines[position].rpartition(" ")[0] + f" {data.draw(values)}"
        else:
            lines[position], lines[0] = lines[0], lines[position]
        shown = read("\n".join(lines), reader)
        assert all(any(same({series: value}, read(one)) for one in lines) for series, value in shown.items())


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_never_raises_on_arbitrary_bytes(body: bytes) -> None:
    reader = ExpositionReader(WANTED)
    reader.read(body)
    reader.read(body[::-1])
    reader.read(body)


@settings(deadline=None)
@given(st.lists(st.one_of(sample_lines.map(str.encode), st.binary(max_size=40)), max_size=10))
def test_never_raises_on_a_mixture(lines: list[bytes]) -> None:
    reading = ExpositionReader(WANTED).read(b"\n".join(lines))
    assert len(reading.values) == len(reading.layout.series)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("load 3", 3.0),
        ("load 3\r\n", 3.0),
        ("  load\t3 \n", 3.0),
        ("load{} 3\n", 3.0),
        ('load{ engine = "0" , } 3\n', 3.0),
        ('hits_total{model_name="a"} 3 # {trace_id="x y"} 0.7 1.5e9\n', 3.0),
        ("hits_total 3 # {} 0.7\n", 3.0),
        ('load{model_name="a} 9 # \\" {"} 3 1700000000\n', 3.0),
        ("load +Inf\n", math.inf),
    ],
)
def test_reads_the_forms_that_both_formats_allow(text: str, value: float) -> None:
    assert list(read(text).values()) == [value]


@pytest.mark.parametrize(
    "text",
    [
        "load",
        "load x",
        "load 1_000",
        "load 1 2 3",
        'load{engine="0" 1',
        "load{engine=0} 1",
        'load{engine="0",engine="1"} 1',
        'load{engine="0"}',
        '{"load"} 1',
    ],
)
def test_leaves_out_lines_that_are_not_samples(text: str) -> None:
    reading = ExpositionReader(WANTED).read(f"{text}\nhits_total 5\n".encode())
    assert [(one.name, value) for one, value in zip(reading.layout.series, reading.values, strict=True)] == [
        ("hits_total", 5.0)
    ]


def test_counts_what_it_left_out() -> None:
    reading = ExpositionReader(WANTED).read(b"load 1\nload 2\nhits_total x\nother y z\n")
    assert (reading.values.tolist(), reading.duplicate_lines, reading.malformed_lines) == ([1.0], 1, 1)


def test_an_unchanged_layout_is_the_same_object() -> None:
    reader = ExpositionReader(WANTED)
    first, second = reader.read(b"load 1\nhits_total 2\n"), reader.read(b"load 3\nhits_total 4\n")
    assert second.layout is first.layout
    assert (first.values.tolist(), second.values.tolist()) == ([1.0, 2.0], [3.0, 4.0])


def test_a_new_series_in_place_of_an_unwanted_line_is_found_by_the_next_full_scan() -> None:
    reader = ExpositionReader(WANTED)
    reader.read(b"load 1\n# a comment\n")
    found = [len(reader.read(b"load 1\nhits_total 2\n").values) for _ in range(RESCAN_EVERY + 1)]
    assert (found[0], found[-1]) == (1, 2)


@pytest.mark.parametrize("body", [b"", b"[]", b'[{"load": 1}]', b"<html><body>load</body></html>", b"\x00\xff"])
def test_tells_other_documents_from_metrics(body: bytes) -> None:
    assert not looks_like_metrics(body)
