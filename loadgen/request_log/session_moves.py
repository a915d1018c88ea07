"""The sessions of each worker that left: how they were moved, how long it took, and what their next turn cost.

Only sessions that came back are seen, for the move is in the record of their next request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from prefixwatch.documents.section import Section
from prefixwatch.loadgen.request_log.columns import measured_rows
from prefixwatch.loadgen.request_log.records import RequestRecord, record_from
from prefixwatch.loadgen.scenario.fleet_section import EventPlan, PlannedEvent

_LEAVING = {"drain": ("drain", "scale_in"), "kill": ("death",)}
"""The triggers that count as each event's."""
SOFT, HARD, UNDISTURBED = "soft", "hard", "undisturbed"


class NextTurns(Section):
    """The time to first token of the next turns of some sessions. An unknown value is null."""

    turns: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    predicted_p50_ms: float | None = Field(
        default=None, description="what the chosen way was expected to take; null for undisturbed sessions"
    )


class MoveEffect(Section):
    """What one worker's departure did to its sessions under one policy, all repeats together."""

    policy: str
    event: str
    at_s: float = Field(description="on the request log's clock")
    moved: int = Field(description="sessions that were moved and came back")
    soft: int = Field(description="of these, those whose blocks were sent")
    hard: int = Field(description="of these, those that computed them again")
    why: dict[str, int] = Field(description="the same by what decided")
    seconds_to_drain: float | None = Field(
        description="until the worker's last request and last transfer had ended, the mean of the repeats; null for a "
        "killed one"
    )
    next_turns: dict[str, NextTurns] = Field(
        description="soft, hard, and undisturbed: sessions of other workers, their first turn after the event"
    )


def move_effects(log: pa.Table, policies: Sequence[str], plan: EventPlan | None) -> list[MoveEffect]:
    """The effects of every drain and kill whose sessions were moved on purpose; none where no session was."""
    if plan is None or not any(one.action in _LEAVING for one in plan.events):
        return []
    found = []
    for policy in policies:
        rows = measured_rows(log.filter(pc.equal(log["policy"], policy)))
        if not pc.any(pc.not_equal(rows["move"], "")).as_py():
            continue
        records = sorted(map(record_from, rows.to_pylist()), key=lambda record: (record.repeat, record.scheduled_s))
        times = sorted({event.at_s for event in plan.events})
        for event in plan.events:
            if event.action in _LEAVING:
                end = min((at for at in times if at > event.at_s), default=inf)
                found.append(_effect(policy, event, records, end))
    return found


def _effect(policy: str, event: PlannedEvent, records: Sequence[RequestRecord], end: float) -> MoveEffect:
    worker: dict[tuple[int, str], str] = {}
    first: dict[tuple[int, str], RequestRecord] = {}
    for record in records:
        key = record.repeat, record.session
        if record.scheduled_s < event.at_s:
            worker[key] = record.worker
        elif record.scheduled_s < end and key in worker:
            first.setdefault(key, record)
    triggers = _LEAVING[event.action]
    moved = {key: record for key, record in first.items() if record.move_trigger in triggers}
    left = {worker[key] for key in moved}
    kinds = {
        SOFT: [record for record in moved.values() if record.move == SOFT],
        HARD: [record for record in moved.values() if record.move == HARD],
        UNDISTURBED: [record for key, record in first.items() if not record.move and worker[key] not in left],
    }
    return MoveEffect(
        policy=policy,
        event=event.title,
        at_s=event.at_s,
        moved=len(moved),
        soft=len(kinds[SOFT]),
        hard=len(kinds[HARD]),
        why=dict(Counter(record.move_why for record in moved.values())),
        seconds_to_drain=None if event.action == "kill" else _seconds_to_drain(event.at_s, records, left, moved),
        next_turns={name: _next_turns(name, own) for name, own in kinds.items() if own},
    )


def _seconds_to_drain(
    at_s: float,
    records: Sequence[RequestRecord],
    left: set[str],
    moved: dict[tuple[int, str], RequestRecord],
) -> float | None:
    """The later of the last answer and the last transfer, by repeat."""
    ends: dict[int, float] = {}
    for (repeat, _), record in moved.items():
        ends[repeat] = max(ends.get(repeat, at_s), at_s + (record.move_transfer_s or 0.0))
    for record in records:
        if record.worker in left and record.scheduled_s < at_s and record.end_s is not None and record.repeat in ends:
            ends[record.repeat] = max(ends[record.repeat], record.end_s)
    return float(np.mean([end - at_s for end in ends.values()])) if ends else None


def _next_turns(kind: str, records: Sequence[RequestRecord]) -> NextTurns:
    ttfts = [record.ttft_s for record in records if record.ttft_s is not None]
    prices = [record.move_soft_s if kind == SOFT else record.move_hard_s for record in records]
    known = [price for price in prices if price is not None]
    return NextTurns(
        turns=len(records),
        ttft_p50_ms=_ms(ttfts, 50),
        ttft_p95_ms=_ms(ttfts, 95),
        predicted_p50_ms=_ms(known, 50),
    )


def _ms(seconds: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(seconds, percent)) * 1e3 if seconds else None
