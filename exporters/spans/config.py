"""The `otlp` section of the exporter's configuration: GenAI spans as a source of requests."""

from __future__ import annotations

from pydantic import Field

from prefixwatch.documents.durations import Duration
from prefixwatch.exporters.http.client_config import Strict


class OtlpConfig(Strict):
    """With this section, even an empty one, spans are taken at POST /v1/traces of the exporter's own address."""

    tenant_attributes: tuple[str, ...] = Field(
        default=(), description="span attributes that name the tenant; the first that is there counts"
    )
    settle_seconds: Duration = Field(
        default=15.0, description="how long a trace waits for its other spans; more than the exporters' batch delay"
    )
    max_traces: int = Field(gt=0, default=20_000, description="how many traces are held at once")
    body_timeout_seconds: Duration = Field(default=10.0, description="how long an export may take to arrive")
    max_body_bytes: int = Field(
        gt=0, default=4 * 1024 * 1024, description="the largest export that is taken, uncompressed"
    )
