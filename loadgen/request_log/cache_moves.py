"""What was moved between caches for each request, and the figures of a run that follow from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

import numpy as np
from pydantic import Field

from prefixwatch.documents.section import Section
from prefixwatch.loadgen.request_log.break_even import crossing_tokens, fitted
from prefixwatch.loadgen.request_log.records import RequestRecord
from prefixwatch.loadgen.scenario.fleet_section import EventPlan

PHYSICAL_TIER = "gpu"
"""Tokens found here are reused where they are; all others had to be moved first."""
NEAR_SECONDS = 60.0
"""Before a worker is lost and after it is back: what the two windows of a restart are."""
Window = Literal["run", "before", "after"]


@dataclass(slots=True)
class CacheMove:
    """Where the reusable tokens of one prompt were as it came to its worker, and what was done about them.

    hits by tier + declined + failed + lost = reusable
    """

    index: int
    """The request's position in the plan."""
    at_s: float
    hit_tokens: dict[str, int] = field(default_factory=dict)
    """Reused, by the tier in which they were."""
    declined_tokens: int = 0
    """Computed, as that was expected to be as fast as a pull, or its policy wanted no pull."""
    failed_tokens: int = 0
    """Computed after a pull that failed."""
    lost_tokens: int = 0
    """Computed, as they, or the blocks before them, had left the GPU as the request's turn came, the second time."""
    pulled_bytes: dict[str, float] = field(default_factory=dict)
    """By tier; those of failed pulls too."""
    pulled_tokens: int = 0
    pull_s: float | None = None
    """From the request's arrival at its worker to the end of its pull, queues for links included."""
    failed: bool = False
    looks: int = 1
    """2: what was in the GPU at first had left it as the request's turn came, and all was looked for again."""
    computed_tokens: int | None = None
    """Of the prompt, by its worker; None for a prompt that never was."""
    prefill_s: float | None = None
    """From its admission to the batch to its first token."""

    @property
    def reusable_tokens(self) -> int:
        """Prompt tokens whose KV was somewhere within reach."""
        return sum(self.hit_tokens.values()) + self.declined_tokens + self.failed_tokens + self.lost_tokens


@dataclass(slots=True)
class CacheLog:
    """All moves of one run."""

    architecture: str
    moves: list[CacheMove] = field(default_factory=list)
    written_bytes: dict[str, float] = field(default_factory=dict)
    """Written to each tier beyond the GPU."""
    break_even_tokens: dict[str, int | None] = field(default_factory=dict)
    """Of each tier, by the affine price of an idle link and the engine's own prefill; None: never."""


class TierFigures(Section):
    """One place that KV came from."""

    hit_tokens: int
    pulled_bytes: int = Field(default=0, description="of its KV, moved to GPUs; failed pulls count")
    written_bytes: int = Field(default=0, description="of KV, moved there; of the whole run only")
    break_even_model_tokens: int | None = Field(
        default=None, description="shortest prefix that an idle link brings sooner than the engine computes it"
    )
    break_even_measured_tokens: float | None = Field(
        default=None,
        description="where lines through the run's own pulls and prefills cross; null: too few of one length",
    )


class CacheFigures(Section):
    """Reuse by tier under one policy, all repeats together. Tokens unless the name says otherwise."""

    policy: str
    architecture: str
    window: Window = Field(
        description="`run`; or the 60 s before the first worker is killed or drained, and after it is started again"
    )
    requests: int
    prompt_tokens: int
    logical_hit_tokens: int = Field(description="reused, wherever the KV was")
    physical_hit_tokens: int = Field(description="of these, in the GPU of the worker")
    recomputed_tokens: int = Field(
        description="computed although an earlier request of the plan had them computed: what is lost to an unlimited "
        "cache that all share"
    )
    declined_tokens: int = Field(description="of these, within reach and computed all the same: cheaper, or not wanted")
    failed_tokens: int = Field(description="of these, after a failed pull")
    lost_tokens: int = Field(description="of these, gone from the GPU while the request waited")
    pulls: int
    failed_pulls: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    tiers: dict[str, TierFigures]


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """One run's records, and its moves; None: nothing moves, and the engines' own reuse is all."""

    records: Sequence[RequestRecord]
    log: CacheLog | None


def cache_figures(runs: Mapping[str, Sequence[LoggedRun]], events: EventPlan | None) -> list[CacheFigures]:
    """The figures of each policy's runs: of all measured requests, and around a restart where `events` has one."""
    windows: dict[Window, tuple[float, float]] = {"run": (-inf, inf), **restart_windows(events)}
    return [_figures(policy, own, window, limits) for policy, own in runs.items() for window, limits in windows.items()]


def restart_windows(events: EventPlan | None) -> dict[Window, tuple[float, float]]:
    """`before` and `after` of the first worker that goes and comes back; empty where none does."""
    planned = [] if events is None else list(events.events)
    for place, gone in enumerate(planned):
        if gone.action in ("kill", "drain"):
            back = [each for each in planned[place:] if each.action == "start" and each.worker == gone.worker]
            if back:
                at_s = back[0].at_s
                return {"before": (gone.at_s - NEAR_SECONDS, gone.at_s), "after": (at_s, at_s + NEAR_SECONDS)}
    return {}


def _figures(policy: str, runs: Sequence[LoggedRun], window: Window, limits: tuple[float, float]) -> CacheFigures:
    rows = [
        (record, moves)
        for run in runs
        for record, moves in _with_moves(run)
        if record.phase == "measured" and limits[0] <= record.scheduled_s < limits[1]
    ]
    records, moves = [record for record, _ in rows], [move for _, own in rows for move in own]
    answered = [record for record in records if record.cached_tokens is not None]
    waits_ms = [record.ttft_s * 1e3 for record in records if record.ttft_s is not None]
    tiers = _tiers(runs, moves, answered, whole=window == "run")
    return CacheFigures(
        policy=policy,
        architecture=next((run.log.architecture for run in runs if run.log is not None), "sticky"),
        window=window,
        requests=len(records),
        prompt_tokens=sum(record.planned_prompt_tokens for record in answered),
        logical_hit_tokens=sum(tier.hit_tokens for tier in tiers.values()),
        physical_hit_tokens=tiers[PHYSICAL_TIER].hit_tokens,
        recomputed_tokens=sum(
            max(0, record.planned_shared_tokens - (record.cached_tokens or 0)) for record in answered
        ),
        declined_tokens=sum(move.declined_tokens for move in moves),
        failed_tokens=sum(move.failed_tokens for move in moves),
        lost_tokens=sum(move.lost_tokens for move in moves),
        pulls=sum(move.pull_s is not None for move in moves),
        failed_pulls=sum(move.failed for move in moves),
        ttft_p50_ms=float(np.percentile(waits_ms, 50)) if waits_ms else None,
        ttft_p95_ms=float(np.percentile(waits_ms, 95)) if waits_ms else None,
        tiers=tiers,
    )


def _with_moves(run: LoggedRun) -> Iterable[tuple[RequestRecord, list[CacheMove]]]:
    own: dict[int, list[CacheMove]] = {}
    for move in run.log.moves if run.log is not None else ():
        own.setdefault(move.index, []).append(move)
    for record in run.records:
        yield record, own.get(record.index, [])


def _tiers(
    runs: Sequence[LoggedRun], moves: Sequence[CacheMove], answered: Sequence[RequestRecord], *, whole: bool
) -> dict[str, TierFigures]:
    logs = [run.log for run in runs if run.log is not None]
    if not logs:
        return {PHYSICAL_TIER: TierFigures(hit_tokens=sum(record.cached_tokens or 0 for record in answered))}
    hits: Counter[str] = Counter()
    pulled: Counter[str] = Counter()
    written: Counter[str] = Counter()
    for move in moves:
        hits.update(move.hit_tokens)
        pulled.update({tier: round(size) for tier, size in move.pulled_bytes.items()})
    for log in logs if whole else ():
        written.update({tier: round(size) for tier, size in log.written_bytes.items()})
    prefill = fitted([(m.computed_tokens, m.prefill_s) for m in moves if m.computed_tokens and m.prefill_s])
    found = {PHYSICAL_TIER: TierFigures(hit_tokens=hits[PHYSICAL_TIER])}
    for tier, modelled in logs[0].break_even_tokens.items():
        alone = [move for move in moves if set(move.pulled_bytes) == {tier} and not move.failed and move.looks == 1]
        pull = fitted([(move.pulled_tokens, move.pull_s) for move in alone if move.pull_s is not None])
        found[tier] = TierFigures(
            hit_tokens=hits[tier],
            pulled_bytes=pulled[tier],
            written_bytes=written[tier],
            break_even_model_tokens=modelled,
            break_even_measured_tokens=crossing_tokens(pull, prefill),
        )
    return found
