"""Without request records goodput is the interval that the engines' single shares allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.fleet.derivation import derive_fleet
from prefixwatch.exporters.fleet.goodput_bounds import goodput_bounds
from prefixwatch.exporters.fleet.status import status
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.slo.build import load_request_objectives
from prefixwatch.slo.objective import RequestField

MakeTarget = Callable[..., Target]
OBJECTIVES = load_request_objectives(["goodput"])
TTFT, TPOT = (
    next(c.value for c in OBJECTIVES[0].conditions if c.field is field)
    for field in (RequestField.TTFT_SECONDS, RequestField.TPOT_SECONDS)
)
FAMILIES = {"vllm:time_to_first_token_seconds": TTFT, "vllm:request_time_per_output_token_seconds": TPOT}

Answer = tuple[bool, bool, bool]
"""Whether it met the TTFT, the TPOT, and was completed."""


def page(answers: Sequence[Answer], families: Sequence[str] = tuple(FAMILIES)) -> str:
    labels = 'model_name="m",engine="0"'
    lines = [f"vllm:num_requests_running{{{labels}}} 1\n"]
    for reason, ended in (("stop", True), ("error", False)):
        count = sum(one[2] is ended for one in answers)
        lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {count}\n')
    for place, family in enumerate(FAMILIES):
        if family in families:
            good = sum(one[place] for one in answers)
            lines.append(f'{family}_bucket{{{labels},le="{FAMILIES[family]}"}} {good}\n')
            lines.append(f'{family}_bucket{{{labels},le="+Inf"}} {len(answers)}\n')
            lines.append(f"{family}_sum{{{labels}}} 1\n{family}_count{{{labels}}} {len(answers)}\n")
    return "".join(lines)


def engine(*texts: str) -> Target:
    config = TargetConfig(name="e", url="http://e:8000/metrics")
    made = Target(config, ExporterConfig(targets=(config,)), shipped_catalogue())
    for step, text in enumerate(texts):
        made.ingest(Scrape(0.01, text.encode()), 5.0 * step)
    return made


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=20, max_size=60))
def test_the_true_share_is_within_the_bounds(answers: list[Answer]) -> None:
    made = engine(page([]), page(answers))
    assert made.store is not None
    found = goodput_bounds([made.store], OBJECTIVES)
    assert found is not None
    assert found.unknown == ()
    assert found.low - 1e-9 <= sum(map(all, answers)) / len(answers) <= found.high + 1e-9


@pytest.mark.parametrize(
    ("families", "low", "high", "unknown"),
    [(tuple(FAMILIES), 0.7, 0.8, 0), (tuple(FAMILIES)[:1], 0.0, 0.8, 1), ((), 0.0, 1.0, 2)],
)
def test_a_share_that_no_engine_gives_is_not_taken_for_all(
    families: tuple[str, ...], low: float, high: float, unknown: int
) -> None:
    """80 % meet the TTFT, 90 % the TPOT, all are completed."""
    answers = [(k >= 20, k < 90, True) for k in range(100)]
    made = engine(page([], families), page(answers, families))
    assert made.store is not None
    found = goodput_bounds([made.store], OBJECTIVES)
    assert found is not None
    assert found.low == pytest.approx(low)
    assert found.high == pytest.approx(high)
    assert len(found.unknown) == unknown


def test_status_gives_the_interval_and_what_would_give_the_value() -> None:
    answers = [(k >= 20, k < 90, True) for k in range(100)]
    targets = [engine(page([]), page(answers))]
    document = status(targets, derive_fleet(targets), {}, 60.0, OBJECTIVES)
    row = next(row for row in document["models"]["m"] if row["name"] == "goodput_ratio")
    assert row["value"] is None
    assert row["bounds"] == (pytest.approx(0.7), pytest.approx(0.8))
    assert row["why"] == (
        "70.0% to 80.0% by the engines' own counts; exactly: "
        "no request records: scrape prefixwatch's router, or send GenAI spans"
    )


def test_without_any_share_there_is_no_interval() -> None:
    targets = [engine(page([]), page([]))]
    document = status(targets, derive_fleet(targets), {}, 60.0, OBJECTIVES)
    row = next(row for row in document["models"]["m"] if row["name"] == "goodput_ratio")
    assert (row["value"], row["bounds"]) == (None, None)
