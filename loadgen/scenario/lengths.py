"""Distributions of lengths and of popularity, as scenario files write them, and draws from them."""

from __future__ import annotations

from math import exp, log
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from prefixwatch.loadgen.scenario.section import LONGEST_TOKENS, Section


class TokenRange(Section):
    """A length in tokens. A plain number fixes it; `min` and `max` alone draw evenly between them, both included."""

    min: int = Field(
        default=1,
        ge=1,
        le=LONGEST_TOKENS,
        description="shortest length, tokens; with `median`, shorter draws become this",
    )
    max: int = Field(
        default=0,
        ge=0,
        le=LONGEST_TOKENS,
        description="longest length, tokens; with `median`, longer draws become this (0: no bound)",
    )
    median: float | None = Field(
        default=None,
        gt=0,
        le=LONGEST_TOKENS,
        description="median of a lognormal length, tokens; needs `sigma`",
        examples=[900],
    )
    sigma: float | None = Field(
        default=None,
        ge=0,
        le=10,
        description="standard deviation of the length's logarithm; 0.5 is mild, 1.2 heavy-tailed",
    )
    values: list[Annotated[int, Field(ge=1, le=LONGEST_TOKENS)]] | None = Field(
        default=None, min_length=1, description="the lengths that occur (an empirical distribution), tokens"
    )
    weights: list[Annotated[float, Field(ge=0)]] | None = Field(
        default=None, description="one relative weight a value; without it all are alike"
    )

    @model_validator(mode="after")
    def _one_distribution(self) -> Self:
        if self.values is not None:
            _check_values(self.values, self.weights, {"min", "max", "median", "sigma"} & self.model_fields_set)
            return self
        if self.weights is not None:
            raise ValueError("weights belong to values: add values, or take weights out")
        if (self.median is None) != (self.sigma is None):
            raise ValueError("median and sigma go together: give both for a lognormal length")
        bounded = self.median is None or self.max
        if self.median is None and not {"min", "max"} <= self.model_fields_set:
            raise ValueError("give a number, min and max, median and sigma, or values")
        if bounded and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}: swap them")
        return self

    @property
    def shortest(self) -> int:
        return min(self.values) if self.values is not None else self.min

    @property
    def mean(self) -> float:
        """Expected length, tokens; for a lognormal one before its bounds are applied."""
        if self.values is not None:
            weights = self.weights or [1.0] * len(self.values)
            return sum(v * w for v, w in zip(self.values, weights, strict=True)) / sum(weights)
        if self.median is not None and self.sigma is not None:
            return self.median * exp(self.sigma**2 / 2)
        return (self.min + self.max) / 2

    def draw(self, rng: np.random.Generator) -> int:
        """One length."""
        if self.values is not None:
            return self.values[int(rng.choice(len(self.values), p=shares(self.weights or [1.0] * len(self.values))))]
        if self.median is not None and self.sigma is not None:
            length = max(self.min, round(float(rng.lognormal(log(self.median), self.sigma))))
            return min(length, self.max or LONGEST_TOKENS)
        return int(rng.integers(self.min, self.max + 1))


def _check_values(values: list[int], weights: list[float] | None, others: set[str]) -> None:
    if others:
        raise ValueError(f"values and {', '.join(sorted(others))} exclude each other: keep one distribution")
    if weights is not None and (len(weights) != len(values) or sum(weights) <= 0):
        raise ValueError(f"weights must be {len(values)} numbers, one a value, with a positive sum")


def _as_range(value: Any) -> Any:
    return {"min": value, "max": value} if isinstance(value, int) else value


Tokens = Annotated[TokenRange, BeforeValidator(_as_range)]


class Popularity(Section):
    """How requests spread over the groups: one of the two keys."""

    zipf: float | None = Field(
        default=None,
        ge=0,
        le=20,
        description="Zipf exponent: group k is asked in proportion to 1/k^exponent; 0 is uniform",
    )
    weights: list[Annotated[float, Field(ge=0)]] | None = Field(
        default=None, description="one relative weight a group, in order"
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.zipf is None) == (self.weights is None):
            raise ValueError("give either zipf or weights")
        if self.weights is not None and sum(self.weights) <= 0:
            raise ValueError("weights add up to 0: make at least one positive")
        return self

    def shares(self, count: int) -> list[float]:
        """Each of `count` items' share of the draws."""
        if self.weights is not None:
            return shares(self.weights)
        return shares([1.0 / rank ** (self.zipf or 0.0) for rank in range(1, count + 1)]) if count else []

    def check(self, count: int, of_what: str) -> None:
        """Raises ValueError where there isn't a weight for each of `count` items."""
        if self.weights is not None and len(self.weights) != count:
            raise ValueError(f"popularity has {len(self.weights)} weights for {count} {of_what}: give one each")


def shares(weights: list[float]) -> list[float]:
    """Weights that add up to 1."""
    total = sum(weights)
    return [weight / total for weight in weights]


class Seconds(Section):
    """A time in seconds. A plain number fixes it; `min` and `max` draw evenly; `mean` draws exponentially."""

    min: float = Field(default=0.0, ge=0, description="shortest, seconds")
    max: float | None = Field(default=None, ge=0, description="longest, seconds")
    mean: float | None = Field(default=None, gt=0, description="mean of an exponential time, seconds")

    @model_validator(mode="after")
    def _one_distribution(self) -> Self:
        if (self.max is None) == (self.mean is None):
            raise ValueError("give a number, min and max, or mean")
        if self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}: swap them")
        return self

    @property
    def fixed(self) -> float | None:
        """The time, where it is always the same."""
        return self.min if self.max == self.min else None

    @property
    def positive(self) -> bool:
        return self.mean is not None or bool(self.max)

    def draw(self, rng: np.random.Generator) -> float:
        """One time, seconds; a fixed one takes no randomness."""
        if self.fixed is not None:
            return self.fixed
        if self.mean is not None:
            return self.min + float(rng.exponential(self.mean))
        assert self.max is not None
        return float(rng.uniform(self.min, self.max))


def _as_seconds(value: Any) -> Any:
    return {"min": value, "max": value} if isinstance(value, int | float) else value


Time = Annotated[Seconds, BeforeValidator(_as_seconds)]
