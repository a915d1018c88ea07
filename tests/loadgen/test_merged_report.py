"""One run.json of several processes' reports."""

from __future__ import annotations

from typing import Any

from prefixwatch.loadgen.sending.distributed import merged_report


def report(**more: Any) -> dict[str, Any]:
    return {
        "concurrency": None, "retokenization_loss_tokens": None, "client_floor_ms": {"p50": 0.1, "p99": 0.2},
        "loop_lag_ms": {"p50": 0.0, "p99": 1.0, "max": 2.0}, "cpu_share": 0.1, "in_flight_max": 3, "reasons": [],
        **more,
    }  # fmt: skip


def test_what_can_be_added_is_and_of_lateness_the_worst_counts() -> None:
    merged = merged_report(
        [
            report(concurrency=3, retokenization_loss_tokens=5, cpu_share=0.4),
            report(concurrency=2, retokenization_loss_tokens=7, client_floor_ms={"p50": 0.05, "p99": 9.0}),
        ],
        ["w0", "w1"],
        [],
    )

    assert (merged["concurrency"], merged["retokenization_loss_tokens"], merged["in_flight_max"]) == (5, 12, 6)
    assert (merged["client_floor_ms"], merged["cpu_share"]) == ({"p50": 0.1, "p99": 9.0}, 0.4)
    assert (merged["processes"], merged["valid"]) == (2, True)


def test_what_nobody_measured_stays_unknown() -> None:
    merged = merged_report([report(client_floor_ms=None, loop_lag_ms=None)] * 2, ["w0", "w1"], [])

    assert (merged["concurrency"], merged["retokenization_loss_tokens"]) == (None, None)
    assert (merged["client_floor_ms"], merged["loop_lag_ms"]) == (None, None)


def test_a_spoiled_process_spoils_the_run_and_is_named() -> None:
    merged = merged_report([report(), report(reasons=["the client was late"])], ["w0", "w1"], [])

    assert (merged["valid"], merged["reasons"]) == (False, ["worker w1: the client was late"])
