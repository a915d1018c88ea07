"""What reuse is worth, by what is reused, and what a slow tail costs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from prefixwatch.loadgen.plan.request import BLOCK_CLASSES
from prefixwatch.loadgen.scenario.section import Section


class ReuseObjective(Section):
    """One figure for reuse and tail: J = sum of w(k) hit tokens(k) / sum of w(k) prompt tokens(k) - lambda * P99 of the
    TTFT in seconds, over block classes k."""

    weights: dict[str, Annotated[float, Field(ge=0, le=1e6)]] = Field(
        description=f"w of each block class, {', '.join(BLOCK_CLASSES)}; a class that isn't named has 0"
    )
    tail_weight_per_second: float = Field(
        default=0.0, ge=0, description="lambda: what a second of the P99 of the TTFT costs, as a share of reuse"
    )
    at_least: float | None = Field(
        default=None,
        description="smallest J that passes; part of the verdict. Without it J is reported and not graded",
    )

    @field_validator("weights")
    @classmethod
    def _known(cls, weights: dict[str, float]) -> dict[str, float]:
        if strange := sorted(weights.keys() - set(BLOCK_CLASSES)):
            raise ValueError(f"{', '.join(strange)}: no block class: use {', '.join(BLOCK_CLASSES)}")
        if not any(weights.values()):
            raise ValueError("all weights are 0: give one class a weight above 0")
        return weights
