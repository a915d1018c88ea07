"""A step time fitted to requests that a running engine served, with intervals and where it doesn't fit.

Two kinds of requests say something without knowing the engine's batches:

    prefill   its worker had nothing else until its first token: TTFT = prefill of its uncached tokens
    decode    no other prompt was computed on its worker while it generated: TPOT = a decode step of the mean number of
              requests there, of the request's mean length

The time of HTTP and tokenising is part of TTFT, so it is part of the fitted `base_s` and `per_prefill_sequence_s`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from prefixwatch.engines.model.hardware import DECODE_CONTEXT, DECODE_SEQUENCES, PREFILL_CACHED, PREFILL_TOKENS
from prefixwatch.engines.model.step_time import StepSample, StepTime, StepTimeError, StepWork, fit, prefill_work

RESAMPLES = 200
LEAST_SAMPLES = 8
"""Of each kind."""
POOR_FIT = 0.15
"""A median relative error beyond this is reported."""
_LEAST_MS = 1e-4  # a profile's tables hold no 0


@dataclass(frozen=True, slots=True)
class Served:
    """A completed request; times in seconds on one clock."""

    worker: str
    sent_s: float
    first_token_s: float
    end_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """`intervals`: 95 % of the resamples, by coefficient. `errors`: median relative errors, by part of the work."""

    step_time: StepTime
    intervals: dict[str, tuple[float, float]]
    errors: dict[str, float]
    prefill_samples: int
    decode_samples: int

    @property
    def poor(self) -> list[str]:
        """The parts of the work that the step time doesn't describe well."""
        return [part for part, error in self.errors.items() if error > POOR_FIT]

    def profile(self, source: str, max_num_batched_tokens: int, block_size: int, capacity_blocks: int | None) -> Any:
        """The profile document, as `engines.model.hardware.tabulate` makes it."""
        time = self.step_time
        prefill = [
            [max(_LEAST_MS, 1e3 * time.prefill_s(n + cached, cached, n)) for cached in PREFILL_CACHED]
            for n in PREFILL_TOKENS
        ]
        decode = [
            [max(_LEAST_MS, 1e3 * time.duration_s(decode_sequences=b, context_tokens=b * c)) for c in DECODE_CONTEXT]
            for b in DECODE_SEQUENCES
        ]
        return {
            "measured": f"{self.prefill_samples} first tokens and {self.decode_samples} generations of {source}.",
            "assumed": "Step times are linear in the work; beyond what was measured they go on so.",
            "gpus": 1,
            "max_num_batched_tokens": max_num_batched_tokens,
            "block_size": block_size,
            "capacity_blocks": capacity_blocks,
            "interpolation_error": {part: round(error, 4) for part, error in self.errors.items()},
            "fitted_ms": {
                name: [1e3 * value for value in (getattr(time, name), *self.intervals[name])] for name in self.intervals
            },
            "prefill_ms": {"rows": list(PREFILL_TOKENS), "columns": list(PREFILL_CACHED), "values": prefill},
            "decode_ms": {"rows": list(DECODE_SEQUENCES), "columns": list(DECODE_CONTEXT), "values": decode},
        }


def calibrate(requests: Sequence[Served], max_num_batched_tokens: int) -> Calibration:
    """The step time of the engines that served these. Raises StepTimeError where the requests don't determine it."""
    prefill, decode = _samples(requests, max_num_batched_tokens)
    for kind, samples, remedy in (
        ("first tokens of requests that were alone on their engine", prefill, "send some of them one after another"),
        ("generations that no other prompt disturbed", decode, "ask for longer answers, or send fewer requests"),
    ):
        if len(samples) < LEAST_SAMPLES:
            raise StepTimeError(f"{len(samples)} {kind}, and at least {LEAST_SAMPLES} are needed: {remedy}")
    found = fit([*prefill, *decode])
    return Calibration(found, _intervals(prefill, decode), _errors(found, prefill, decode), len(prefill), len(decode))


def _samples(requests: Sequence[Served], budget: int) -> tuple[list[StepSample], list[StepSample]]:
    by_worker: dict[str, list[Served]] = defaultdict(list)
    for request in requests:
        by_worker[request.worker].append(request)
    prefill, decode = [], []
    for own in by_worker.values():
        for request in own:
            others = [other for other in own if other is not request]
            if not any(_overlap(request.sent_s, request.first_token_s, each.sent_s, each.end_s) for each in others):
                work = prefill_work(request.prompt_tokens, request.cached_tokens, budget)
                prefill.append(StepSample(work, request.first_token_s - request.sent_s))
            first_s, end_s = request.first_token_s, request.end_s
            computing = any(_overlap(first_s, end_s, each.sent_s, each.first_token_s) for each in others)
            if request.output_tokens > 1 and end_s > first_s and not computing:
                beside = sum(_overlap(first_s, end_s, each.first_token_s, each.end_s) for each in others)
                batch = round(1 + beside / (end_s - first_s))
                context = batch * (request.prompt_tokens + request.output_tokens // 2)
                step_s = (end_s - first_s) / (request.output_tokens - 1)
                decode.append(StepSample(StepWork(decode_sequences=batch, context_tokens=context), step_s))
    return prefill, decode


def _overlap(begin_s: float, end_s: float, other_begin_s: float, other_end_s: float) -> float:
    return max(0.0, min(end_s, other_end_s) - max(begin_s, other_begin_s))


def _intervals(prefill: Sequence[StepSample], decode: Sequence[StepSample]) -> dict[str, tuple[float, float]]:
    rng, drawn = np.random.default_rng(1), []
    for _ in range(RESAMPLES):
        samples = [part[k] for part in (prefill, decode) for k in rng.integers(len(part), size=len(part))]
        try:
            time = fit(samples)
        except StepTimeError:
            continue  # this draw has too few kinds of work
        drawn.append([getattr(time, field.name) for field in fields(StepTime)])
    if not drawn:
        return {}
    low, high = np.percentile(np.array(drawn), [2.5, 97.5], axis=0).tolist()
    return {field.name: (low[k], high[k]) for k, field in enumerate(fields(StepTime))}


def _errors(time: StepTime, prefill: Sequence[StepSample], decode: Sequence[StepSample]) -> dict[str, float]:
    """Median relative errors: of short and long prompts, of small and large batches."""
    tokens = float(np.median([sample.work.prefill_tokens for sample in prefill]))
    batch = float(np.median([sample.work.decode_sequences for sample in decode]))
    parts = {
        f"prefill up to {tokens:.0f} tokens": [each for each in prefill if each.work.prefill_tokens <= tokens],
        f"prefill above {tokens:.0f} tokens": [each for each in prefill if each.work.prefill_tokens > tokens],
        f"decode up to {batch:.0f} requests": [each for each in decode if each.work.decode_sequences <= batch],
        f"decode above {batch:.0f} requests": [each for each in decode if each.work.decode_sequences > batch],
    }
    return {
        part: float(np.median([abs(time.work_s(each.work) / each.duration_s - 1) for each in samples]))
        for part, samples in parts.items()
        if samples
    }
