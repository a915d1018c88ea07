"""How long a prefill takes, in milliseconds: FlexLB's two predictors and one that is fitted to measured times.

A batch is a sequence of `Prefill`s. Predictors are pure, except for what `learn` teaches them.

`FormulaPredictor`   T = ms_per_computed_token · Σ(L − H) + ms_per_cached_token · Σ H
`LearningPredictor`  with R = H/1024, M = (L − H)/1024 for each member and x = [1, |B|, ΣR, ΣM, ΣM², ΣR·M]:

                         z = (w0·x0 + … + w5·x5)/320 + 1 + w8
                         T = w6/0.005 + (w7/0.02)·(z + √(z² + 4))

                     SquarePlus with b = 4, not divided by two. Learns from every 4 batches by one Adam step on the
                     mean of (T − measured)·∂T/∂w: α 0.022, β1 0.9, β2 0.95, ε² 1e-20 inside the root
`CalibratedPredictor`  T = base_ms + ms_per_token · Σ(L − H) + ms_per_token_context · Σ over computed tokens of the
                     tokens before each, coefficients ≥ 0 with the least squared relative error. Ours

Source: alibaba/rtp-llm `rtp_llm/flexlb` for the first two. FlexLB's memo of 256 predictions changes no value and is
left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

INITIAL_WEIGHTS = (
    -4.40538432604287,
    10.522208701202377,
    1.5043093890711503,
    21.40103419118763,
    0.11145680735428248,
    0.08305932028650383,
    1.451617309598213,
    1.0268830123611967,
    -4.405384326042869,
)
"""What FlexLB ships: nearly the constant 320 ms."""

BATCHES_PER_UPDATE = 4
_LEARNING_RATE, _BETA1, _BETA2, _EPSILON_SQUARED = 0.022, 0.9, 0.95, 1e-20
_INPUT_SCALE, _OFFSET_SCALE, _SLOPE_SCALE, _SQUARE_PLUS = 320.0, 0.005, 0.02, 4.0
_LINEAR = 6  # weights of the linear part: one a feature


class Prefill(NamedTuple):
    """One prompt: its length and how much of it is cached."""

    prompt_tokens: int
    cached_tokens: int


class PrefillPredictor(Protocol):
    """Predicts a batch's prefill time, and may learn from measured ones."""

    def predict_ms(self, batch: Sequence[Prefill]) -> float:
        """Expected time of this batch; an untrained model may answer below 0."""
        ...

    def learn(self, batch: Sequence[Prefill], measured_ms: float) -> None:
        """This batch took so long."""
        ...


class FormulaPredictor:
    """A fixed price for each computed and each cached token; FlexLB's defaults are placeholders, 1 ms and 0.3 ms."""

    def __init__(self, ms_per_computed_token: float = 1.0, ms_per_cached_token: float = 0.3) -> None:
        self.ms_per_computed_token = ms_per_computed_token
        self.ms_per_cached_token = ms_per_cached_token

    def predict_ms(self, batch: Sequence[Prefill]) -> float:
        computed = sum(prompt - cached for prompt, cached in batch)
        return computed * self.ms_per_computed_token + sum(cached for _, cached in batch) * self.ms_per_cached_token

    def learn(self, batch: Sequence[Prefill], measured_ms: float) -> None:
        """A formula learns nothing."""


class LearningPredictor:
    """Nine weights, moved by Adam after every fourth batch."""

    def __init__(self, weights: Sequence[float] = INITIAL_WEIGHTS) -> None:
        self.weights = list(weights)
        self._gradients: list[list[float]] = []
        self._first = [0.0] * len(self.weights)
        self._second = [0.0] * len(self.weights)
        self._updates = 0

    def predict_ms(self, batch: Sequence[Prefill]) -> float:
        w, z = self.weights, self._z(_features(batch))
        return w[6] / _OFFSET_SCALE + w[7] / _SLOPE_SCALE * (z + math.sqrt(z * z + _SQUARE_PLUS))

    def learn(self, batch: Sequence[Prefill], measured_ms: float) -> None:
        error_ms = self.predict_ms(batch) - measured_ms
        self._gradients.append([error_ms * slope for slope in self._slopes(_features(batch))])
        if len(self._gradients) == BATCHES_PER_UPDATE:
            self._update([sum(column) / BATCHES_PER_UPDATE for column in zip(*self._gradients, strict=True)])
            self._gradients.clear()

    def _z(self, features: Sequence[float]) -> float:
        weighted = sum(w * x for w, x in zip(self.weights[:_LINEAR], features, strict=True))
        return weighted / _INPUT_SCALE + 1.0 + self.weights[8]

    def _slopes(self, features: Sequence[float]) -> list[float]:
        """∂T/∂w."""
        z = self._z(features)
        root = math.sqrt(z * z + _SQUARE_PLUS)
        by_z = self.weights[7] / _SLOPE_SCALE * (1.0 + z / root)
        return [*(by_z / _INPUT_SCALE * x for x in features), 1.0 / _OFFSET_SCALE, (z + root) / _SLOPE_SCALE, by_z]

    def _update(self, gradient: Sequence[float]) -> None:
        self._updates += 1
        step = _LEARNING_RATE * math.sqrt(1.0 - _BETA2**self._updates) / (1.0 - _BETA1**self._updates)
        for k, slope in enumerate(gradient):
            self._first[k] = _BETA1 * self._first[k] + (1.0 - _BETA1) * slope
            self._second[k] = _BETA2 * self._second[k] + (1.0 - _BETA2) * slope * slope
            self.weights[k] -= step * self._first[k] / math.sqrt(self._second[k] + _EPSILON_SQUARED)


class CalibratedPredictor:
    """Base, tokens and attention, at measured prices."""

    def __init__(self, base_ms: float, ms_per_token: float, ms_per_token_context: float = 0.0) -> None:
        self.base_ms = base_ms
        self.ms_per_token = ms_per_token
        self.ms_per_token_context = ms_per_token_context

    @classmethod
    def fit(cls, measured: Iterable[tuple[int, int, float]]) -> CalibratedPredictor:
        """From rows of (prompt tokens, cached tokens, milliseconds), each measured alone on an idle engine.

        Raises ValueError for fewer than two rows, times not above 0 or prompts all of one length.
        """
        rows = list(measured)
        if len(rows) < 2 or any(not ms > 0 for *_, ms in rows):
            raise ValueError(f"a calibration needs at least 2 measured times above 0 ms, got {len(rows)} rows")
        matrix = np.array([_costs([Prefill(prompt, cached)]) for prompt, cached, _ in rows])
        relative = matrix / np.array([[ms] for *_, ms in rows])
        if np.linalg.matrix_rank(matrix[:, :2]) < 2:
            raise ValueError("the calibration's rows all compute the same number of tokens; measure another length")
        return cls(*_least_squares_at_least_zero(relative))

    def predict_ms(self, batch: Sequence[Prefill]) -> float:
        base, tokens, contexts = _costs(batch)
        return base * self.base_ms + tokens * self.ms_per_token + contexts * self.ms_per_token_context

    def learn(self, batch: Sequence[Prefill], measured_ms: float) -> None:
        """Fitted once; measure again and make a new one."""


def _features(batch: Sequence[Prefill]) -> list[float]:
    """FlexLB's x."""
    reused = [cached / 1024 for _, cached in batch]
    missing = [(prompt - cached) / 1024 for prompt, cached in batch]
    return [
        1.0,
        float(len(batch)),
        sum(reused),
        sum(missing),
        sum(m * m for m in missing),
        sum(r * m for r, m in zip(reused, missing, strict=True)),
    ]


def _costs(batch: Sequence[Prefill]) -> tuple[float, float, float]:
    """What the calibrated coefficients multiply."""
    tokens = contexts = 0.0
    for prompt, cached in batch:
        computed = prompt - cached
        tokens += computed
        contexts += computed * (cached + (computed - 1) / 2)
    return 1.0, tokens, contexts


def _least_squares_at_least_zero(matrix: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> list[float]:
    """x ≥ 0 that brings matrix · x closest to 1: the best plain solution over every choice of columns left at 0."""
    count = matrix.shape[1]
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1.0
    target = np.ones(len(matrix))
    best, best_error = np.zeros(count), float(len(matrix))
    for size in range(1, count + 1):
        for chosen in map(list, itertools.combinations(range(count), size)):
            part = matrix[:, chosen] / scale[chosen]
            solution = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(((part @ solution - target) ** 2).sum())
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(count), error
                best[chosen] = solution / scale[chosen]
    return [float(x) for x in best]
