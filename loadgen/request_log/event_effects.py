"""The effect of each event of a fleet: reuse, latency, sessions moved, copies of a prefix, requests lost, by policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from prefixwatch.documents.section import Section
from prefixwatch.loadgen.request_log.columns import measured_rows
from prefixwatch.loadgen.request_log.records import Outcome
from prefixwatch.loadgen.scenario.fleet_section import EventPlan, PlannedEvent
from prefixwatch.slo.objective import Bools, Floats

NEAR_SECONDS = 60.0
"""Before and after an event: what its effect is judged by, if no other event is nearer."""
BACK_RATIO = 0.95
"""Of the hit ratio before: from here on the reuse is back."""
_WINDOW_REQUESTS = (20, 500)
"""Requests of one window in which the hit ratio is looked at, at least and at most."""
_WINDOWS = 20
_MIN_REQUESTS = 20


class EventEffect(Section):
    """What one event did under one policy, all repeats together. An unknown value is null."""

    policy: str
    event: str
    at_s: float = Field(description="on the request log's clock")
    hit_ratio_before: float | None = Field(description="hit tokens / prompt tokens in the 60 s before")
    hit_ratio_lowest: float | None = Field(description="in the worst window of 20 to 500 requests in the 60 s after")
    seconds_to_recover: float | None = Field(
        description="until a window has 95 % of the hit ratio before, 0 if none had less; null: not before the next "
        "event or the end"
    )
    ttft_p95_before_ms: float | None
    ttft_p95_after_ms: float | None = Field(description="in the 60 s after")
    sessions: int = Field(description="sessions with a completed request before the event and another one after it")
    moved_share: float | None = Field(
        description="of these sessions: last request after the event on another worker than the last one before"
    )
    fair_share: float | None = Field(
        description="what a consistent hash moves: the share of the fleet that left, joined or can't be reached; null "
        "for other events"
    )
    copies_before: float | None = Field(description="workers that served each shared prefix, mean over the prefixes")
    copies_after: float | None
    lost_before_first_token: int = Field(description="requests that failed without a token, to the next event")
    lost_streaming: int = Field(description="answers that had begun and broke off")


def event_effects(log: pa.Table, policies: Sequence[str], plan: EventPlan | None) -> list[EventEffect]:
    """The effects of all titled events under each policy; `log` is the whole request log."""
    if plan is None or not plan.events:
        return []
    titled = [event for event in plan.events if event.title]
    times = [event.at_s for event in titled]
    shares = list(_fair_shares(plan))
    found = []
    for policy in policies:
        rows = _Rows.of(measured_rows(log.filter(pc.equal(log["policy"], policy))))
        for place, event in enumerate(titled):
            start = max((t for t in times if t < event.at_s), default=-inf)
            end = min((t for t in times if t > event.at_s), default=inf)
            effect = _effect(policy, event, rows, (start, end))
            found.append(effect.model_copy(update={"fair_share": shares[place]}))
    return found


@dataclass(frozen=True, slots=True)
class _Rows:
    repeat: Floats
    scheduled: Floats
    first: Floats
    end: Floats
    cached: Floats
    prompt: Floats
    worker: list[str]
    session: list[str]
    group: list[str]
    completed: Bools

    @classmethod
    def of(cls, table: pa.Table) -> _Rows:
        table = table.take(pc.sort_indices(table, [("scheduled_s", "ascending")]))

        def floats(name: str) -> Floats:
            return np.asarray(pc.cast(table[name], pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)

        return cls(
            repeat=floats("repeat"),
            scheduled=floats("scheduled_s"),
            first=floats("first_token_s"),
            end=floats("end_s"),
            cached=floats("cached_tokens"),
            prompt=floats("prompt_tokens"),
            worker=table["worker"].to_pylist(),
            session=table["session"].to_pylist(),
            group=table["group"].to_pylist(),
            completed=np.asarray(
                pc.equal(table["outcome"], Outcome.COMPLETED.value).to_numpy(zero_copy_only=False), dtype=np.bool_
            ),
        )


def _effect(policy: str, event: PlannedEvent, rows: _Rows, neighbours: tuple[float, float]) -> EventEffect:
    at, (start, end) = event.at_s, neighbours
    before = (rows.scheduled >= max(start, at - NEAR_SECONDS)) & (rows.scheduled < at)
    near = (rows.scheduled >= at) & (rows.scheduled < min(end, at + NEAR_SECONDS))
    until_next = (rows.scheduled >= at) & (rows.scheduled < end)
    settled = (rows.scheduled >= start) & (rows.end <= at) & rows.completed
    hits = _hit_ratio(rows, before)
    lowest, back = _recovery(rows, until_next, at, hits)
    last, then = _workers(rows, settled), _workers(rows, until_next & rows.completed)
    both = [session for session in last if session in then]
    moved = sum(last[session] != then[session] for session in both)
    lost = ~rows.completed & (rows.end >= at) & (rows.end < end)
    return EventEffect(
        policy=policy,
        event=event.title,
        at_s=at,
        hit_ratio_before=hits,
        hit_ratio_lowest=lowest,
        seconds_to_recover=back,
        ttft_p95_before_ms=_ttft_p95_ms(rows, before),
        ttft_p95_after_ms=_ttft_p95_ms(rows, near),
        sessions=len(both),
        moved_share=moved / len(both) if both else None,
        fair_share=None,
        copies_before=_copies(rows, before & rows.completed),
        copies_after=_copies(rows, near & rows.completed),
        lost_before_first_token=int((lost & np.isnan(rows.first)).sum()),
        lost_streaming=int((lost & ~np.isnan(rows.first)).sum()),
    )


def _hit_ratio(rows: _Rows, chosen: Bools) -> float | None:
    known = chosen & ~np.isnan(rows.cached) & ~np.isnan(rows.prompt)
    prompt = float(rows.prompt[known].sum())
    return float(rows.cached[known].sum()) / prompt if known.sum() >= _MIN_REQUESTS and prompt else None


def _recovery(rows: _Rows, chosen: Bools, at: float, before: float | None) -> tuple[float | None, float | None]:
    """The lowest hit ratio of the first minute's windows, and the seconds until one has nearly the old ratio."""
    known = chosen & ~np.isnan(rows.cached) & ~np.isnan(rows.prompt)
    times, cached, prompt = rows.scheduled[known], rows.cached[known], rows.prompt[known]
    size = int(np.clip(len(times) // _WINDOWS, *_WINDOW_REQUESTS))
    if before is None or len(times) < size:
        return None, None
    ratios = _sums(cached, size) / np.maximum(_sums(prompt, size), 1)
    ends = times[size - 1 :] - at
    near = ratios[ends <= max(NEAR_SECONDS, float(ends[0]))]
    worst = int(near.argmin())
    if near[worst] >= BACK_RATIO * before:
        return float(near[worst]), 0.0
    back = np.flatnonzero(ratios[worst:] >= BACK_RATIO * before)
    return float(near[worst]), float(ends[worst + back[0]]) if len(back) else None


def _sums(values: Floats, size: int) -> Floats:
    """Of each `size` values in a row."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(total[size:] - total[:-size], dtype=np.float64)


def _ttft_p95_ms(rows: _Rows, chosen: Bools) -> float | None:
    waits = (rows.first - rows.scheduled)[chosen]
    waits = waits[~np.isnan(waits)]
    return float(np.percentile(waits, 95)) * 1e3 if len(waits) >= _MIN_REQUESTS else None


def _workers(rows: _Rows, chosen: Bools) -> dict[tuple[float, str], str]:
    """The last of these workers of each session, in each repeat."""
    return {
        (rows.repeat[k], rows.session[k]): rows.worker[k] for k in np.flatnonzero(chosen).tolist() if rows.worker[k]
    }


def _copies(rows: _Rows, chosen: Bools) -> float | None:
    found: dict[tuple[float, str], set[str]] = {}
    for k in np.flatnonzero(chosen).tolist():
        if rows.worker[k]:
            found.setdefault((rows.repeat[k], rows.group[k]), set()).add(rows.worker[k])
    return sum(map(len, found.values())) / len(found) if found else None


def _fair_shares(plan: EventPlan) -> Iterator[float | None]:
    """The share of the fleet that each titled event takes away or brings."""
    alive = plan.workers
    events = list(plan.events)
    for place, event in enumerate(events):
        if event.action in ("kill", "drain"):
            yield 1 / alive
            alive -= 1
        elif event.action == "start" and event.title:
            joining = 1
            while (following := place + joining) < len(events) and _joins_with(events[following], event):
                joining += 1
            alive += joining
            yield joining / alive
        elif event.title:
            yield 1 / alive if event.action == "partition" else None


def _joins_with(event: PlannedEvent, first: PlannedEvent) -> bool:
    return event.action == "start" and not event.title and event.at_s == first.at_s
