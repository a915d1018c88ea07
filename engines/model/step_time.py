"""How long one engine step takes, as a linear function of the work in it, and how that function is fitted.

    duration = base
             + per_prefill_token            · prompt tokens computed in the step
             + per_prefill_token_context    · Σ over those tokens of the tokens before each (attention, quadratic)
             + per_prefill_sequence         · sequences that compute prompt tokens
             + per_decode_sequence          · sequences that generate one token
             + per_context_token            · Σ over those sequences of their length (KV cache read)

The coefficients are fitted to measured times and never below 0. See `engines.model.profiles` for the shipped ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import numpy.typing as npt


class StepTimeError(ValueError):
    """The samples don't determine a step time, or no profile has this name."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step, or the summed work of `steps` of them."""

    steps: int = 1
    prefill_tokens: int = 0
    prefill_token_contexts: float = 0.0
    """Σ over the computed prompt tokens of the tokens before each."""
    prefill_sequences: int = 0
    decode_sequences: int = 0
    context_tokens: int = 0
    """Σ over the decoding sequences of their lengths."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """A measured time for some work."""

    work: StepWork
    duration_s: float


class StepDuration(Protocol):
    """What an engine model asks of its hardware: `StepTime`, or `engines.model.step_table.StepTable`."""

    def duration_s(
        self,
        prefill_tokens: int = 0,
        prefill_token_contexts: float = 0.0,
        prefill_sequences: int = 0,
        decode_sequences: int = 0,
        context_tokens: int = 0,
    ) -> float: ...

    def decode_growth_s(self, sequences: int, context_tokens: int) -> tuple[float, float]: ...

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0, max_num_batched_tokens: int = 2048) -> float: ...

    def scaled(self, factor: float) -> StepDuration: ...


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds a step, by the work in it (the module says how)."""

    base_s: float
    per_prefill_token_s: float = 0.0
    per_prefill_token_context_s: float = 0.0
    per_prefill_sequence_s: float = 0.0
    per_decode_sequence_s: float = 0.0
    per_context_token_s: float = 0.0

    def duration_s(
        self,
        prefill_tokens: int = 0,
        prefill_token_contexts: float = 0.0,
        prefill_sequences: int = 0,
        decode_sequences: int = 0,
        context_tokens: int = 0,
    ) -> float:
        """Seconds one step with this work takes."""
        return (
            self.base_s
            + self.per_prefill_token_s * prefill_tokens
            + self.per_prefill_token_context_s * prefill_token_contexts
            + self.per_prefill_sequence_s * prefill_sequences
            + self.per_decode_sequence_s * decode_sequences
            + self.per_context_token_s * context_tokens
        )

    def decode_growth_s(self, sequences: int, context_tokens: int) -> tuple[float, float]:
        """How much longer each next decode step of this batch takes, and the number of steps for which that holds."""
        return sequences * self.per_context_token_s, math.inf

    def scaled(self, factor: float) -> StepTime:
        """The same on hardware that takes `factor` times as long."""
        return StepTime(*(getattr(self, field.name) * factor for field in fields(self)))

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0, max_num_batched_tokens: int = 2048) -> float:
        """Seconds to prefill one prompt on an otherwise idle engine."""
        return self.work_s(prefill_work(prompt_tokens, cached_tokens, max_num_batched_tokens))

    def work_s(self, work: StepWork) -> float:
        """Seconds that the steps with this work take together."""
        return float(np.dot(_features(work), [getattr(self, field.name) for field in fields(self)]))


def prefill_work(prompt_tokens: int, cached_tokens: int, max_num_batched_tokens: int) -> StepWork:
    """The summed work of prefilling one prompt alone, in chunks of at most `max_num_batched_tokens`."""
    computed = prompt_tokens - cached_tokens
    steps = -(-computed // max_num_batched_tokens)
    return StepWork(
        steps=steps,
        prefill_tokens=computed,
        prefill_token_contexts=token_contexts(cached_tokens, computed),
        prefill_sequences=steps,
    )


def token_contexts(before: int, count: int) -> float:
    """Σ of the tokens before each of `count` tokens that follow `before` others."""
    return count * (before + (count - 1) / 2)


def fit(samples: Sequence[StepSample]) -> StepTime:
    """The coefficients ≥ 0 with the least summed squared *relative* error, so that short steps count as much as long.

    Raises StepTimeError where the samples are too few, not positive, or vary in too few ways to tell the kinds
    of work that occur in them apart. A kind of work that occurs in no sample costs 0.
    """
    durations = np.array([sample.duration_s for sample in samples], dtype=float)
    if len(samples) and not (np.isfinite(durations).all() and (durations > 0).all()):
        raise StepTimeError("every sample needs a duration above 0 seconds")
    matrix = np.array([_features(sample.work) for sample in samples], dtype=float).reshape(
        len(samples), len(fields(StepTime))
    )
    present = [k for k in range(matrix.shape[1]) if matrix[:, k].any()]
    if not present or len(samples) < len(present):
        raise StepTimeError(
            f"{len(samples)} samples can't tell {len(present) or 'any'} kinds of work apart: "
            f"measure at least one step for each kind"
        )
    relative = matrix[:, present] / durations[:, None]
    scale = relative.max(axis=0)
    if np.linalg.matrix_rank(relative / scale) < len(present):
        names = ", ".join(fields(StepTime)[k].name for k in present)
        raise StepTimeError(f"the samples don't tell these apart: {names}; vary prompt length, batch and context")
    coefficients = np.zeros(matrix.shape[1])
    coefficients[present] = _least_squares_at_least_zero(relative / scale) / scale
    return StepTime(*coefficients.tolist())


def _features(work: StepWork) -> list[float]:
    """The factors of StepTime's coefficients, in the order of its fields."""
    return [
        work.steps,
        work.prefill_tokens,
        work.prefill_token_contexts,
        work.prefill_sequences,
        work.decode_sequences,
        work.context_tokens,
    ]


def _least_squares_at_least_zero(matrix: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """x ≥ 0 that brings matrix · x closest to 1: the best plain solution over every choice of columns left at 0.

    At most 2⁶ choices, so the exhaustive search is exact and instant.
    """
    target = np.ones(len(matrix))
    columns = range(matrix.shape[1])
    best, best_error = np.zeros(matrix.shape[1]), float(target @ target)
    for size in range(1, matrix.shape[1] + 1):
        for chosen in itertools.combinations(columns, size):
            part = matrix[:, list(chosen)]
            solution = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(((part @ solution - target) ** 2).sum())
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(matrix.shape[1]), error
                best[list(chosen)] = solution
    return best
