"""The `moves` section of a scenario: sessions are moved on purpose, over a link of this speed."""

from __future__ import annotations

from pydantic import Field

from prefixwatch.documents.units import (
    Compression,
    GbitPerSecond,
    KvBytesPerToken,
    LatencySeconds,
    WaitSecondsOrNone,
)
from prefixwatch.loadgen.scenario.section import Section


class Moves(Section):
    """What moving a session's KV takes, for fleets whose workers leave."""

    link_gbit_per_second: GbitPerSecond = Field(
        default=25.0, description="the link that each worker sends over. Slower: more sessions are computed again"
    )
    link_latency_seconds: LatencySeconds = Field(
        default=0.002, description="of each transfer, beside its bytes. Higher: short sessions are computed again"
    )
    kv_bytes_per_token: KvBytesPerToken = Field(
        default=131_072,
        description="KV of one token in all layers. Larger models: more sessions are computed again",
    )
    compression: Compression = Field(
        default=1.0, description="bytes before over bytes after. Higher: more sessions are sent"
    )
    soft: bool = Field(default=True, description="false: blocks are never sent, all sessions are computed again")
    overload_seconds: WaitSecondsOrNone = Field(
        default=None,
        description="queue of a worker beyond which a tenth of its sessions leave it, if it is twice the median one. "
        "Lower: they leave sooner; default: they never do",
    )
