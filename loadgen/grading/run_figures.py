"""Facts of each run besides its requests: its loop, the client's own part, the engines' counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from prefixwatch.documents.section import Section
from prefixwatch.loadgen.request_log.engine_counters import EngineCounters, disagreement, engine_counters
from prefixwatch.loadgen.request_log.fleet_rows import FleetRow
from prefixwatch.loadgen.request_log.records import Outcome

_REASONS_SHOWN = 3


class RunFigures(Section):
    """One run of a policy, mostly from its run.json."""

    policy: str
    repeat: int
    loop: Literal["open", "closed", "serial"] = "open"
    concurrency: int | None = Field(default=None, description="users of a closed loop")
    answers: str = Field(
        default="planned", description="the earlier answers that later turns of a session carry: planned or generated"
    )
    prompts: Literal["exact", "approximate"] = Field(
        default="exact", description="whether the plan's prompt lengths are exact for the served model's tokenizer"
    )
    retokenization_loss_tokens: int | None = Field(
        default=None,
        description="tokens of generated answers that were tokenized differently when sent back, so that no cache "
        "could reuse them; null where later turns carry planned answers",
    )
    client_floor_p50_ms: float | None = Field(
        default=None, description="TTFT that the client adds by itself, from its calibration before the run"
    )
    client_floor_p99_ms: float | None = None
    loop_lag_p99_ms: float | None = Field(default=None, description="how late the client's event loop came to timers")
    cpu_share: float | None = Field(default=None, description="of one core, by the client")
    in_flight_max: int | None = None
    engine: EngineCounters | None = Field(
        default=None, description="null where the engines aren't scraped, as with a target"
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
        prompts=report.get("prompts", "exact"),
        retokenization_loss_tokens=report.get("retokenization_loss_tokens"),
        client_floor_p50_ms=floor.get("p50"),
        client_floor_p99_ms=floor.get("p99"),
        loop_lag_p99_ms=lag.get("p99"),
        cpu_share=report.get("cpu_share"),
        in_flight_max=report.get("in_flight_max"),
        engine=engine_counters(rows),
    )


APPROXIMATE_NOTE = (
    "approximate prompts: made without the model's tokenizer, so prompt lengths are those that the answers report, and "
    "expected reuse, isolation and warm caches can't be checked"
)
SERIAL_NOTE = (
    "serial replay: each request is sent when the one before has ended, so arrival times are ignored and nothing "
    "queues; only the reuse figures are meaningful"
)


def closed_loop_note(users: int) -> str:
    """The note on every figure of a closed loop."""
    return (
        f"closed loop of {users} users: a server that stalls is sent fewer requests meanwhile, so latencies look "
        "better than users would see"
    )


def run_notes(runs: Sequence[RunFigures], log: pa.Table) -> list[str]:
    """Notes for readers of the runs, as sentences: the kind of loop, and engines whose counters disagree."""
    users = [run.concurrency for run in runs if run.loop == "closed" and run.concurrency is not None]
    notes = [closed_loop_note(count) for count in dict.fromkeys(users)]
    if any(run.loop == "serial" for run in runs):
        notes.append(SERIAL_NOTE)
    if any(run.prompts == "approximate" for run in runs):
        notes.append(APPROXIMATE_NOTE)
    for policy in dict.fromkeys(run.policy for run in runs):
        own = [run for run in runs if run.policy == policy and run.engine is not None]
        rows = log.filter(pc.equal(log["policy"], policy))
        found = [note for run in own if (note := _engine_note(run, rows))]
        if found:
            notes.append(f"{policy}, {len(found)} of {len(own)} runs: {found[0]}")
    return notes


def refusal_notes(policy: str, log: pa.Table) -> list[str]:
    """Why this policy's measured requests were refused, the most frequent reasons first, as one sentence; none where
    nobody said why."""
    own = log.filter(pc.and_(pc.equal(log["policy"], policy), pc.equal(log["phase"], "measured")))
    refused = own.filter(pc.equal(own["outcome"], Outcome.REFUSED.value))
    why = Counter(text for text in refused["error"].to_pylist() if text)
    if not why:
        return []
    shown = "; ".join(f"{count} × {text}" for text, count in why.most_common(_REASONS_SHOWN))
    return [f"{policy}: {len(refused)} of {len(own)} requests were refused: {shown}"]


def _engine_note(run: RunFigures, log: pa.Table) -> str | None:
    assert run.engine is not None
    if run.engine.reason:
        return f"no hit ratio from the engines' own counters: {run.engine.reason}"
    return disagreement(run.engine, log.filter(pc.equal(log["repeat"], run.repeat)))
