"""Warm-up and drift, on series whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from prefixwatch.loadgen.grading.steady_state import mser, notes, steady_state
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.request_log.records import RequestRecord

TIMES = np.arange(600, dtype=np.float64) * 0.1


def test_a_settled_run_has_no_warm_up_worth_a_word_and_no_drift() -> None:
    found = [steady_state(TIMES, np.random.default_rng(seed).lognormal(-2, 0.5, len(TIMES))) for seed in range(100)]

    assert sum(state is not None and state.drifting for state in found) == 0
    assert np.mean([state is not None and state.warm_up_ratio > 0.1 for state in found]) <= 0.15


def test_cold_caches_at_the_start_are_warm_up() -> None:
    waits = np.random.default_rng(1).lognormal(-2, 0.2, len(TIMES))
    waits[:100] += 2.0

    state = steady_state(TIMES, waits)

    assert state is not None
    assert state.warm_up_seconds == pytest.approx(10.0, abs=0.6)
    assert not state.drifting


def test_a_queue_that_grows_without_end_is_drift() -> None:
    """Arrivals at 1.2 times the capacity of a single server: waits grow linearly (Lindley's recursion)."""
    rng = np.random.default_rng(2)
    waits, now = np.zeros(len(TIMES)), 0.0
    for i, (gap, service) in enumerate(zip(rng.exponential(0.1, 600), rng.exponential(0.12, 600), strict=True)):
        waits[i] = now = max(0.0, now - gap) + service

    state = steady_state(TIMES, waits)

    assert state is not None
    assert state.drifting


def test_at_most_half_of_a_run_is_called_warm_up() -> None:
    assert mser(np.linspace(10.0, 1.0, 100)) <= 50


def test_too_few_requests_say_nothing() -> None:
    assert steady_state(TIMES[:99], np.ones(99)) is None


def test_a_note_names_policy_and_remedy() -> None:
    def record(i: int) -> RequestRecord:
        wait = 2.0 if i < 60 else 0.1 + 0.01 * (i % 7)
        return RequestRecord(
            id=str(i), policy="score", repeat=3, index=i, phase="measured", tenant="-", session="s", turn=0,
            group="g", request_class="c", scheduled_s=i * 0.1, sent_s=i * 0.1, first_token_s=i * 0.1 + wait,
        )  # fmt: skip

    (note,) = notes("score", Columns.of([record(i) for i in range(300)]))

    assert note.startswith("score: up to the first 6 s of 1 of 1 repeats look like warm-up")
    assert "warm_up_seconds" in note
