"""Unknown is not zero, not best, not fine: whatever input is missing, the figures that rest on it say so."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from prefixwatch.exporters.fleet.derivation import derive_fleet
from prefixwatch.exporters.fleet.status import status
from prefixwatch.kvcache.request_record import RequestRecord
from tests.exporters.requests import done, figures, ledger_of

FULL = [
    done(
        cached_tokens=(0, 400, 992)[k % 3], own_tokens=992, session=f"s{k % 5}", tenant="acme", salted=True,
        ttft_seconds=0.2 + 0.01 * (k % 7), tpot_seconds=0.02, predicted_tokens=400, held_tokens=500, held_by="w1",
    )
    for k in range(90)
]  # fmt: skip
INPUTS = {
    "prompt_tokens": None, "cached_tokens": None, "output_tokens": None, "ttft_seconds": None, "tpot_seconds": None,
    "e2e_seconds": None, "own_tokens": None, "session": "", "predicted_tokens": None, "held_tokens": None,
    "block_size": None, "worker": "", "salted": None, "tenant": "", "model": "",
}  # fmt: skip


def block(records: list[RequestRecord]) -> dict[str, float]:
    """The known figures of the block, of all models."""
    document = status([], derive_fleet([]), ledger_of(records).window(100.0), 60.0)
    rows = [row for figures in document["models"].values() for row in figures]
    assert all(bool(row["why"]) == (row["value"] is None) for row in rows)
    return {row["name"]: row["value"] for row in rows if row["value"] is not None}


@given(st.sampled_from(sorted(INPUTS)), st.sets(st.integers(0, len(FULL) - 1)) | st.just(set(range(len(FULL)))))
def test_a_missing_input_makes_no_figure_0_or_best(field: str, dropped: set[int]) -> None:
    """Of any of the requests, or of all: what is left is the figure of those that have it, or no figure."""
    given_up: dict[str, Any] = {field: INPUTS[field]}
    records = [structs.replace(one, **given_up) if k in dropped else one for k, one in enumerate(FULL)]
    before, after = block(FULL), block(records)
    for name, value in after.items():
        if name == "isolation_audited_ratio":
            assert value <= before[name]
        elif value == 0.0:
            assert before.get(name) == 0.0
        elif name == "goodput_ratio":
            assert value == before[name]
    ratios = {name: value for name, value in after.items() if name.startswith("ttft")}
    fastest, slowest = 0.2, 0.26
    for name, seconds in ratios.items():
        assert "minus" in name or fastest - 1e-9 <= seconds <= slowest + 1e-9


@given(st.sampled_from(sorted(INPUTS)))
def test_what_all_requests_lack_is_in_no_family(field: str) -> None:
    """No count, sum or gauge falls to 0 where it was above: it is absent, or as before."""
    given_up: dict[str, Any] = {field: INPUTS[field]}
    before, after = figures(ledger_of(FULL)), figures(ledger_of([structs.replace(one, **given_up) for one in FULL]))
    may_be_0 = {
        *("goodput_tokens_total", "slo_requests_total", "requests_total", "unmeasured_requests_total"),  # begin at 0
        "isolation_audited_ratio",  # nothing was audited: that is the finding
    }
    for name, series in after.items():
        if name in may_be_0 or name.endswith("_bucket"):
            continue
        for labels, value in series.items():
            assert value != 0.0 or before.get(name, {}).get(labels, 0.0) == 0.0, (name, labels)


def test_completed_requests_that_lack_a_figure_are_counted_beside_it() -> None:
    whole = ledger_of(
        [done(session="s"), done(session="s", ttft_seconds=None, tpot_seconds=None), done(cached_tokens=None)]
    )
    assert {figure: count for (figure,), count in figures(whole)["unmeasured_requests_total"].items()} == {
        "prompt_tokens": 0, "cached_tokens": 1, "output_tokens": 0, "ttft": 1, "tpot": 1, "session": 1, "goodput": 1,
    }  # fmt: skip
    assert whole.document(100.0)["unmeasured_ratio"]["ttft"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([done(ttft_seconds=None)], "no streamed answer yet: an answer that is not streamed has no first token"),
        ([done(cached_tokens=None)], "no request yet whose engine reported cached tokens"),
        (
            [done(cached_tokens=None), done(ttft_seconds=None)],
            "no streamed answer yet whose engine reported cached tokens",
        ),
        ([], "no request has reported it yet"),
    ],
)
def test_the_reason_is_the_true_one(records: list[RequestRecord], reason: str) -> None:
    """40 answers with cached tokens, none streamed, were told to set --enable-prompt-tokens-details."""
    ledger = ledger_of(records)
    ledger.expect("router")
    assert ledger.document(100.0)["absent"]["ttft_by_length_seconds"].startswith(reason)


def test_requests_without_times_are_no_goodput() -> None:
    assert "goodput_ratio" not in block([done(ttft_seconds=None, tpot_seconds=None)] * 30)
    mixed = [done(ttft_seconds=None, tpot_seconds=None)] * 30 + [done(ttft_seconds=9.0)] * 10
    assert block(mixed)["goodput_ratio"] == 0.0
