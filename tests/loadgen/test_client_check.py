from __future__ import annotations

from dataclasses import replace

import pytest

from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.loadgen.sending.calibration import Calibration
from prefixwatch.loadgen.sending.client_check import ClientLoad, check_client

GOOD = ClientLoad(loop_lag_seconds=[0.001] * 100, cpu_share=0.2, in_flight_max=3, stopped=False)


def record(index: int, *, sent_s: float | None = 0.002, error: str = "") -> RequestRecord:
    outcome = Outcome.FAILED if error else Outcome.COMPLETED
    return RequestRecord(
        f"r{index}", "p", 0, index, "measured", "-", "s", 0, "g", "c", 0.0, sent_s=sent_s, outcome=outcome, error=error
    )


def test_a_quiet_client_is_valid_and_says_what_it_saw() -> None:
    report = check_client([record(0), record(1)], GOOD, lag_limit_ms=20)
    assert report["valid"] is True
    assert report["schedule_lag_ms"] == {"p50": 2.0, "p99": 2.0, "max": 2.0}
    assert report["counts"] == {
        "planned": 2, "sent": 2, "completed": 2, "refused": 0, "failed": 0, "timed_out": 0, "cut_off": 0,
        "cancelled": 0, "never_sent": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (replace(GOOD, loop_lag_seconds=[0.03] * 100), "event loop was late, p99 30.0 ms, over 20 ms"),
        (replace(GOOD, calibration=Calibration(38.0, 41.0, 60)), "adds 38.0 ms to every TTFT on its own"),
        (replace(GOOD, cpu_share=0.97), "used 97% of a core"),
        (replace(GOOD, stopped=True), "stopped before its end"),
    ],
)
def test_a_client_that_was_the_bottleneck_invalidates_its_run(load: ClientLoad, reason: str) -> None:
    report = check_client([record(0)], load, lag_limit_ms=20)
    assert report["valid"] is False
    assert reason in report["reasons"][0]


def test_running_out_of_sockets_invalidates_the_run() -> None:
    report = check_client([record(0, error="connect_failed: [Errno 24] Too many open files")], GOOD, lag_limit_ms=20)
    assert report["reasons"] == ["the client ran out of file descriptors: raise the limit (ulimit -n)"]


def test_without_a_sample_a_lag_is_unknown_and_not_zero() -> None:
    report = check_client([record(0, sent_s=None)], replace(GOOD, loop_lag_seconds=[]), lag_limit_ms=20)
    assert (report["schedule_lag_ms"], report["loop_lag_ms"]) == (None, None)
