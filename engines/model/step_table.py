"""Step times from two tables of measured times, for hardware on which they aren't linear in the work.

    prefill:  seconds to compute n prompt tokens that follow p tokens in the cache, one sequence alone
    decode:   seconds of a step in which B sequences of mean length c each generate one token

Between its points a table is bilinear. A step that does both costs prefill(n, p) + decode(B, c) − decode(1, 1): the
weights are read once. Beyond its ends a table goes on as its last interval does. `error_ratio` is the largest relative
error at the midpoints of the grid against the source that the table was taken from.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from math import inf


@dataclass(frozen=True, slots=True)
class Grid:
    """A function of two numbers, known at the crossings of `rows` and `columns` (both ascending from 0 or above),
    bilinear between."""

    rows: tuple[float, ...]
    columns: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]
    """A row of values per element of `rows`."""

    def __post_init__(self) -> None:
        for name, axis in (("rows", self.rows), ("columns", self.columns)):
            ascends = len(axis) > 1 and all(a < b for a, b in itertools.pairwise(axis))
            if not ascends or axis[0] < 0 or axis[-1] == inf:
                raise ValueError(f"{name} must be at least two ascending numbers from 0 on, got {list(axis)}")
        if len(self.values) != len(self.rows) or any(len(row) != len(self.columns) for row in self.values):
            raise ValueError(f"values must be {len(self.rows)} rows of {len(self.columns)} numbers")
        if not all(0 < value < inf for row in self.values for value in row):
            raise ValueError("values must be finite numbers above 0")

    def at(self, row: float, column: float) -> float:
        """The interpolated value; never below the smallest value of the grid."""
        rows, columns = self.rows, self.columns
        i, j = bisect_right(rows, row, 1, len(rows) - 1) - 1, bisect_right(columns, column, 1, len(columns) - 1) - 1
        left, above = columns[j], rows[i]
        share = (column - left) / (columns[j + 1] - left)
        upper, lower = self.values[i], self.values[i + 1]
        low = upper[j] + (upper[j + 1] - upper[j]) * share
        high = lower[j] + (lower[j + 1] - lower[j]) * share
        value = low + (high - low) * ((row - above) / (rows[i + 1] - above))
        smallest = self.values[0][0]
        return value if value > smallest else smallest

    def next_column(self, column: float) -> float:
        """Up to where the function stays linear in the column: the next grid column, or infinity."""
        j = bisect_right(self.columns, column)
        return self.columns[j] if j < len(self.columns) - 1 else inf

    def scaled(self, factor: float) -> Grid:
        return replace(self, values=tuple(tuple(value * factor for value in row) for row in self.values))


@dataclass(frozen=True, slots=True)
class StepTable:
    """Seconds a step, by the work in it; the same questions as `engines.model.step_time.StepTime` answers."""

    prefill: Grid
    """Rows: tokens computed; columns: tokens cached before them."""
    decode: Grid
    """Rows: sequences; columns: their mean length in tokens, the new one included."""
    _weights_s: float = field(init=False, repr=False)
    """decode(1, 1)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_weights_s", self.decode.at(1, 1))

    def duration_s(
        self,
        prefill_tokens: int = 0,
        prefill_token_contexts: float = 0.0,
        prefill_sequences: int = 0,
        decode_sequences: int = 0,
        context_tokens: int = 0,
    ) -> float:
        """Seconds one step with this work takes. Several prompts in a step count as one after their mean prefix."""
        seconds = 0.0
        if prefill_tokens:
            cached = prefill_token_contexts / prefill_tokens - (prefill_tokens / max(prefill_sequences, 1) - 1) / 2
            seconds = self.prefill.at(prefill_tokens, max(0.0, cached))
        if not decode_sequences:
            return seconds or self._weights_s
        decode = self.decode.at(decode_sequences, context_tokens / decode_sequences)
        return seconds + decode - self._weights_s if seconds else decode

    def decode_growth_s(self, sequences: int, context_tokens: int) -> tuple[float, float]:
        """How much longer each next decode step of this batch takes, and the number of steps for which that holds."""
        mean = context_tokens / sequences
        room = self.decode.next_column(mean) - mean
        if room < 1:
            return 0.0, 0.0
        return self.decode.at(sequences, mean + 1) - self.decode.at(sequences, mean), room

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0, max_num_batched_tokens: int = 2048) -> float:
        """Seconds to prefill one prompt on an otherwise idle engine, in chunks of at most `max_num_batched_tokens`."""
        seconds, done = 0.0, cached_tokens
        while done < prompt_tokens:
            chunk = min(max_num_batched_tokens, prompt_tokens - done)
            seconds += self.prefill.at(chunk, done)
            done += chunk
        return seconds

    def scaled(self, factor: float) -> StepTable:
        """The same on hardware that takes `factor` times as long."""
        return StepTable(self.prefill.scaled(factor), self.decode.scaled(factor))
