"""Whether the load generator itself spoiled a run, from what only its process knows.

A run whose client was the bottleneck says nothing about the server; it is declared invalid, not annotated. What
the request log alone shows (lateness against the objectives, token counts, warm caches) is judged
there, in `loadgen.grading.validity`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.loadgen.sending.calibration import Calibration

MAX_CPU_SHARE = 0.9
"""Of one core: beyond it, reads queue behind each other and stamps come late."""


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """What the client's process went through during the measured phase."""

    loop_lag_seconds: Sequence[float]
    """How late the event loop came to timers that were due; a stamp may be as late."""
    cpu_share: float
    """CPU seconds of this process a second, all its threads."""
    in_flight_max: int
    stopped: bool
    calibration: Calibration | None = None
    """What it adds to a TTFT with no server to wait for; None when the run ended before it was measured."""


def check_client(records: Sequence[RequestRecord], load: ClientLoad, *, lag_limit_ms: float) -> dict[str, Any]:
    """The client's part of `run.json`, with `valid` and the `reasons` why not."""
    loop_lag = _spread_ms(load.loop_lag_seconds)
    reasons = []
    if load.stopped:
        reasons.append("the run was stopped before its end")
    if loop_lag is not None and loop_lag["p99"] > lag_limit_ms:
        reasons.append(
            f"the client's event loop was late, p99 {loop_lag['p99']:.1f} ms, over {lag_limit_ms:g} ms: "
            f"lower the rate or free the machine"
        )
    floor = load.calibration
    if floor is not None and floor.floor_p50_ms > lag_limit_ms:
        reasons.append(
            f"the client adds {floor.floor_p50_ms:.1f} ms to every TTFT on its own, over {lag_limit_ms:g} ms: free the "
            f"machine, or take it out of power saving"
        )
    if load.cpu_share > MAX_CPU_SHARE:
        reasons.append(f"the client used {load.cpu_share:.0%} of a core and measured itself: lower the rate")
    if any("Too many open files" in record.error for record in records):
        reasons.append("the client ran out of file descriptors: raise the limit (ulimit -n)")
    return {
        "counts": count_outcomes(records),
        "schedule_lag_ms": schedule_lag_ms(records),
        "client_floor_ms": None
        if floor is None
        else {"p50": round(floor.floor_p50_ms, 3), "p99": round(floor.floor_p99_ms, 3)},
        "loop_lag_ms": loop_lag,
        "cpu_share": round(load.cpu_share, 4),
        "in_flight_max": load.in_flight_max,
        "valid": not reasons,
        "reasons": reasons,
    }


def schedule_lag_ms(records: Sequence[RequestRecord]) -> dict[str, float] | None:
    """How late measured requests were sent."""
    return _spread_ms([lag for r in records if r.phase == "measured" and (lag := r.client_lag_s)])


def count_outcomes(records: Sequence[RequestRecord]) -> dict[str, int]:
    """Requests planned, sent and by outcome, all phases."""
    counts = {"planned": len(records), "sent": sum(r.sent_s is not None for r in records)}
    return counts | {outcome.value: sum(r.outcome is outcome for r in records) for outcome in Outcome}


def _spread_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """p50, p99 and maximum in milliseconds; None without a sample."""
    if not seconds:
        return None
    p50, p99 = np.quantile(seconds, (0.5, 0.99))
    spread = {"p50": p50, "p99": p99, "max": max(seconds)}
    return {name: round(float(value) * 1000.0, 3) for name, value in spread.items()}
