"""One run.json of several processes that sent one plan together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from loadgen.client_check import count_outcomes, schedule_lag_ms
from loadgen.records import RequestRecord


def merged_report(
    reports: Sequence[dict[str, Any]], workers: Sequence[str], records: Sequence[RequestRecord]
) -> dict[str, Any]:
    """One run.json of several: what can be added is, of lateness and CPU it is the worst process that counts."""
    users = [report["concurrency"] for report in reports if report["concurrency"] is not None]
    lost = [report["retokenization_loss_tokens"] for report in reports]
    reasons = [
        f"worker {worker}: {reason}"
        for worker, report in zip(workers, reports, strict=True)
        for reason in report["reasons"]
    ]
    return {
        **reports[0],
        "processes": len(reports),
        "counts": count_outcomes(records),
        "schedule_lag_ms": schedule_lag_ms(records),
        "concurrency": sum(users) if users else None,
        "retokenization_loss_tokens": None if None in lost else sum(lost),
        "client_floor_ms": _worst(report["client_floor_ms"] for report in reports),
        "loop_lag_ms": _worst(report["loop_lag_ms"] for report in reports),
        "cpu_share": max(report["cpu_share"] for report in reports),
        "in_flight_max": sum(report["in_flight_max"] for report in reports),
        "valid": not reasons,
        "reasons": reasons,
    }


def _worst(spreads: Iterable[dict[str, float] | None]) -> dict[str, float] | None:
    """The highest of each figure; None where no process has any."""
    known = [spread for spread in spreads if spread is not None]
    return {name: max(spread[name] for spread in known) for name in known[0]} if known else None
