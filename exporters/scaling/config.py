"""The `exporter.scaling` section: what a worker can take, and how quickly the fleet may change."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from prefixwatch.documents.durations import Duration
from prefixwatch.exporters.http.client_config import Strict


class ScalingSettings(Strict):
    """When to add and to remove workers."""

    target_load_requests: float | None = Field(
        default=None,
        gt=0,
        description="requests running and waiting that one worker takes within its objectives, such as `plan` finds; "
        "higher: fewer workers. Without it there is no advice",
    )
    low_ratio: float = Field(
        default=0.8,
        gt=0,
        lt=1,
        description="a worker may go where the others would then have at most this share of the target; lower: workers "
        "stay longer, and a larger swing of the load is needed to change direction",
    )
    up_seconds: Duration = Field(
        default=30.0, description="how long the load must exceed the target before workers are added; longer: later"
    )
    down_seconds: Duration = Field(
        default=300.0,
        description="how long the load must be low before one worker is removed, and between two removals; longer: "
        "they leave later and more slowly",
    )
    horizon_seconds: Duration = Field(
        default=3600.0,
        description="a removal must save more GPU time within this than its lost cache costs; longer: more removals",
    )
    min_workers: int = Field(
        default=1, ge=1, description="never fewer than this, in each group of peers; more: caches outlive a quiet night"
    )
    max_workers: int | None = Field(
        default=None, ge=1, description="never more than this, in each group of peers; fewer: latency rises sooner"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(f"max_workers is {self.max_workers}, below min_workers {self.min_workers}: raise it")
        return self
