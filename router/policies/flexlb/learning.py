"""FlexLB with its learning predictor: as `flexlb_formula`, with prefill times learned worker by worker.

T_prefill is a LearningPredictor (`prefill_predictor`), one a worker. It starts nearly blind to the cache (4,096 tokens:
320.5 ms uncached, 318.5 ms cached) and Adam's fixed step moves it slowly: after 200 batches it credits a hit with a few
ms of what it saves, after thousands with about half. Kept as its authors wrote it; `flexlb_formula` with `calibration`
is the fair comparison. A prediction isn't clamped at 0.

A batch's label is its execution time, as FlexLB takes the engine's `execution_time_ms`. Engines here give that as a
total over requests, so the batches that were prefilled between two reports share what it grew by:

    label_b = m_b · (E / n) / (Σ |b| m_b / Σ |b|)

    m_b   time from b's dispatch, or from when the worker was through with the batch before, to its last member's first
          token: with the engine's queue in it
    E, n  seconds and number of prefills in the engine's report, from first step to first token
    |b|   members; each member's execution is the batch's

An engine that doesn't report it: the label is m_b. A batch with a failed member teaches nothing.

With `weights`, a JSON file, each worker begins with the weights in it (a worker that it doesn't have: with those that
learned from most batches), and it is written when the router or the simulation ends. Without the file everything begins
with FlexLB's own weights.

Defaults: as flexlb_formula, without `calibration`; weights none.

Source: alibaba/rtp-llm `rtp_llm/flexlb`, CostBasedPrefillStrategy with the LearningPredictor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prefixwatch.router.policies.flexlb.formula import FlexLbFormula, FlexLbOptions
from prefixwatch.router.policies.flexlb.prefill_predictor import LearningPredictor, Prefill, PrefillPredictor
from prefixwatch.router.policy import Decision, Fleet, LoadReport, RouteRequest

MOST_WAITING = 256
"""Batches that wait for a report; without one for so long they teach by their own time."""


@dataclass(frozen=True, slots=True)
class FlexLbLearningOptions(FlexLbOptions):
    weights: str = ""


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    """What the file holds of a worker."""

    weights: list[float]
    batches: int = 0


class ExecutionTimes:
    """A LearningPredictor that is taught execution times, as far as the engine reports them."""

    def __init__(self, kept: _Kept | None = None) -> None:
        self._learning = LearningPredictor(kept.weights) if kept else LearningPredictor()
        self.batches = kept.batches if kept else 0
        self._waiting: list[tuple[list[Prefill], float]] = []
        self._reported: tuple[float, float] | None = None
        """Seconds and number of prefills in the last report that had them."""

    @property
    def weights(self) -> list[float]:
        return self._learning.weights

    def predict_ms(self, batch: Sequence[Prefill]) -> float:
        return self._learning.predict_ms(batch)

    def learn(self, batch: Sequence[Prefill], measured_ms: float) -> None:
        if self._reported is None:
            self._teach(batch, measured_ms)
            return
        self._waiting.append((list(batch), measured_ms))
        if len(self._waiting) > MOST_WAITING:
            self._teach(*self._waiting.pop(0))

    def hear(self, report: LoadReport | None) -> None:
        """What the engine says of its prefills; a report seen before changes nothing."""
        if report is None or report.prefill_seconds_total is None or report.prefills_total is None:
            return
        now = report.prefill_seconds_total, report.prefills_total
        before, self._reported = self._reported, now
        if before is None or now[1] < before[1]:  # the first one, or of a new process
            self._waiting.clear()
            return
        requests = now[1] - before[1]
        if not self._waiting or not requests:
            return
        members = sum(len(batch) for batch, _ in self._waiting)
        mean_ms = sum(len(batch) * ms for batch, ms in self._waiting) / members
        factor = 1e3 * (now[0] - before[0]) / requests / mean_ms if mean_ms > 0 else 1.0
        for batch, ms in self._waiting:
            self._teach(batch, ms * factor)
        self._waiting.clear()

    def _teach(self, batch: Sequence[Prefill], ms: float) -> None:
        self.batches += 1
        self._learning.learn(batch, ms)


class FlexLbLearning(FlexLbFormula):
    """Least predicted prefill, in-flight and batching time, prefill times learned on line."""

    name = "flexlb_learning"
    source = "FlexLB (alibaba/rtp-llm), learning predictor"
    Options = FlexLbLearningOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        self._kept: dict[str, _Kept] = {}
        self._predictors: dict[str, ExecutionTimes] = {}
        super().__init__(seed=seed, **options)
        if self.options.weights:
            self._kept = _read(Path(self.options.weights))

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        for worker in fleet.workers:
            self._book(worker.name)
            self._predictors[worker.name].hear(worker.report)
        return super().choose(request, fleet)

    def on_worker_removed(self, worker: str) -> None:
        super().on_worker_removed(worker)
        self._predictors.pop(worker, None)

    def on_close(self) -> None:
        if not self.options.weights:
            return
        learned = {name: _Kept(own.weights, own.batches) for name, own in self._predictors.items()}
        file = Path(self.options.weights)
        content = msgspec.to_builtins({**self._kept, **learned})
        try:
            file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"policy {self.name}: weights {file}: can't be written ({error.strerror})") from error

    def _make_predictor(self, worker: str = "") -> PrefillPredictor:
        made = ExecutionTimes(self._kept.get(worker) or max(self._kept.values(), key=_batches, default=None))
        if worker:
            self._predictors[worker] = made
        return made


def _batches(kept: _Kept) -> int:
    return kept.batches


def _read(file: Path) -> dict[str, _Kept]:
    """By worker; empty where there is no file yet. Raises ValueError for a file that isn't one of these, and for a new
    one that couldn't be written in the end."""
    if not file.exists():
        if not os.access(file.parent, os.W_OK):
            raise ValueError(f"weights {file}: its folder can't be written to: make it, or name another file")
        return {}
    try:
        found = msgspec.json.decode(file.read_bytes(), type=dict[str, _Kept])
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"weights {file}: can't be read ({error}): name a file that this policy wrote") from error
    count = len(LearningPredictor().weights)
    if any(len(own.weights) != count for own in found.values()):
        raise ValueError(f"weights {file}: each worker has {count} weights: name a file that this policy wrote")
    return found
