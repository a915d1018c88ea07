"""What there is to say of each run beside its requests: its loop, what the client added, what engines counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field

from loadgen.engine_counters import EngineCounters, disagreement, engine_counters
from loadgen.fleet_rows import FleetRow


class RunFigures(BaseModel):
    """One run of a policy, mostly from its run.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: str
    repeat: int
    loop: Literal["open", "closed"] = "open"
    concurrency: int | None = Field(default=None, description="users of a closed loop")
    answers: str = Field(default="planned", description="what later turns of a session carry as earlier answers")
    retokenization_loss_tokens: int | None = Field(
        default=None,
        description="tokens of generated answers that came back as other tokens, which no cache could reuse; null "
        "where later turns carry planned answers",
    )
    client_floor_p50_ms: float | None = Field(
        default=None, description="what the client adds to a TTFT with no server to wait for, from its own calibration"
    )
    client_floor_p99_ms: float | None = None
    loop_lag_p99_ms: float | None = Field(default=None, description="how late the client's event loop came to timers")
    cpu_share: float | None = Field(default=None, description="of one core, by the client")
    in_flight_max: int | None = None
    engine: EngineCounters | None = Field(
        default=None, description="null where the engines aren't read, as of a target"
    )


def figures_of_runs(reports: Sequence[Mapping[str, Any]], fleet: Sequence[FleetRow]) -> list[RunFigures]:
    """Of run.json's contents, in their order, with what the fleet said during each."""
    rows: dict[tuple[str, int], list[FleetRow]] = {}
    for row in fleet:
        rows.setdefault((row.policy, row.repeat), []).append(row)
    return [_figures(report, rows.get((report["policy"], report.get("repeat", 0)), [])) for report in reports]


def _figures(report: Mapping[str, Any], rows: Sequence[FleetRow]) -> RunFigures:
    floor, lag = report.get("client_floor_ms") or {}, report.get("loop_lag_ms") or {}
    return RunFigures(
        policy=report["policy"],
        repeat=report.get("repeat", 0),
        loop=report.get("loop", "open"),
        concurrency=report.get("concurrency"),
        answers=report.get("answers", "planned"),
        retokenization_loss_tokens=report.get("retokenization_loss_tokens"),
        client_floor_p50_ms=floor.get("p50"),
        client_floor_p99_ms=floor.get("p99"),
        loop_lag_p99_ms=lag.get("p99"),
        cpu_share=report.get("cpu_share"),
        in_flight_max=report.get("in_flight_max"),
        engine=engine_counters(rows),
    )


def closed_loop_note(users: int) -> str:
    """What has to be said of every figure of a closed loop."""
    return (
        f"closed loop of {users} users: a server that stalls is sent less meanwhile, so latencies look better than "
        "users would find them"
    )


def run_notes(runs: Sequence[RunFigures], log: pa.Table) -> list[str]:
    """What a reader should know of the runs, in sentences: the kind of loop, and engines that count otherwise."""
    users = [run.concurrency for run in runs if run.loop == "closed" and run.concurrency is not None]
    notes = [closed_loop_note(count) for count in dict.fromkeys(users)]
    for policy in dict.fromkeys(run.policy for run in runs):
        own = [run for run in runs if run.policy == policy and run.engine is not None]
        rows = log.filter(pc.equal(log["policy"], policy))
        found = [note for run in own if (note := _engine_note(run, rows))]
        if found:
            notes.append(f"{policy}, {len(found)} of {len(own)} runs: {found[0]}")
    return notes


def _engine_note(run: RunFigures, log: pa.Table) -> str | None:
    assert run.engine is not None
    if run.engine.reason:
        return f"no hit ratio from the engines' own counters: {run.engine.reason}"
    return disagreement(run.engine, log.filter(pc.equal(log["repeat"], run.repeat)))
