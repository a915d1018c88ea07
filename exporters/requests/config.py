"""Settings for requests: the names it shows, how much it remembers, and what a GPU costs."""

from __future__ import annotations

from pydantic import Field

from prefixwatch.exporters.http.client_config import Strict


class RequestSettings(Strict):
    """The `requests` section of the exporter's configuration."""

    classes: tuple[str, ...] = Field(
        default=(), description="request classes that count by name; without any, the first ones seen do"
    )
    label_values: int = Field(
        default=20, gt=0, description="values of a label that clients choose, beside those that are configured"
    )
    window_requests: int = Field(default=20_000, gt=0, description="first tokens that TTFT deltas are taken from")
    sessions: int = Field(default=65_536, gt=0, description="sessions remembered, least recently seen out first")


class Pricing(Strict):
    """The `pricing` section of prefixwatch.yaml."""

    gpu_usd_per_hour: float | None = Field(default=None, ge=0, description="price of one GPU; no costs without it")
    gpus_per_worker: float = Field(default=1.0, gt=0, description="GPUs that one engine runs on")
