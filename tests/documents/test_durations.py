"""One reading of durations for configuration, SLOs, rules, runbooks and dashboards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from prefixwatch.documents.durations import CLOCK, NOMINAL, Duration, promql, seconds


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("15s", 15.0),
        ("1h30m", 5400.0),
        ("500ms", 0.5),
        ("1m500ms", 60.5),
        ("1.5s", 1.5),
        ("4w", 2_419_200.0),
        ("100ms", 0.1),
    ],
)
def test_a_duration_in_seconds(text: str, length: float) -> None:
    assert seconds(text) == length


@pytest.mark.parametrize(
    ("text", "length"), [("30d", 2_592_000), ("1M", 2_592_000), ("1Q", 7_862_400), ("1Y", 31_536_000)]
)
def test_openslo_counts_months_quarters_and_years_at_nominal_lengths(text: str, length: int) -> None:
    assert seconds(text, NOMINAL) == length


@pytest.mark.parametrize("text", ["", "5", "s", "soon", "5 m", "1M", "-5m", "5mm", "1e3s", "٣s", "5m\n"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration such as 30s or 1m30s"):
        seconds(text)


def test_a_long_text_is_cut_in_the_message() -> None:
    for length, shown in ((40, "x" * 40), (41, "x" * 40 + "…"), (10_000, "x" * 40 + "…")):
        with pytest.raises(ValueError, match="is not a duration") as caught:
            seconds("x" * length)
        assert str(caught.value).startswith(f"'{shown}' is not")


@given(st.integers(1, 400 * 86_400 * 1000))
def test_what_promql_writes_is_read_back_to_the_millisecond(milliseconds: int) -> None:
    assert round(seconds(promql(milliseconds / 1000)) * 1000) == milliseconds


@pytest.mark.parametrize(
    ("length", "text"), [(5400, "1h30m"), (0.05, "50ms"), (1.5, "1s500ms"), (0, "0s"), (604_800, "7d"), (0.0004, "0s")]
)
def test_promql_writes_the_largest_units_first(length: float, text: str) -> None:
    assert promql(length) == text


@given(st.sampled_from(sorted(CLOCK)), st.integers(1, 999))
def test_a_setting_takes_a_text_or_seconds(unit: str, count: int) -> None:
    adapter = TypeAdapter[float](Duration)
    assert adapter.validate_python(f" {count}{unit} ") == adapter.validate_python(count * CLOCK[unit])
    assert adapter.validate_python(str(count)) == count


@pytest.mark.parametrize("given_", ["0s", 0, -1, float("inf"), float("nan"), None, [1], "soon"])
def test_a_setting_is_a_positive_length(given_: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter[float](Duration).validate_python(given_)
