"""The `cache` section of a scenario: where KV lives beyond a worker's own GPU memory, and what moving it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from prefixwatch.documents.units import BlocksOrNone, Compression, GbitPerSecondOrNone, KvBytesPerToken, LatencyMs
from prefixwatch.loadgen.scenario.section import Section

Architecture = Literal["sticky", "shared", "transfer", "tiers"]
ARCHITECTURES: tuple[Architecture, ...] = ("sticky", "shared", "transfer", "tiers")


class Cache(Section):
    """What a fleet of `simulate` does with KV beyond each GPU. Without a rate (null) nothing queues, without a capacity
    nothing is forgotten."""

    architecture: Architecture = Field(
        default="sticky",
        description="`sticky`: each worker has its GPU's cache and no other. `shared`: each computed block is also "
        "written to one store, from which any worker pulls. `transfer`: workers pull from each other. `tiers`: blocks "
        "that leave the GPU go to the worker's CPU memory, from there to its disk, from there to one remote store",
    )
    link_gbit_per_second: GbitPerSecondOrNone = Field(
        default=100.0,
        description="of each worker's network link, in each direction; faster: pulls are shorter, and shorter prefixes "
        "are worth one",
    )
    store_gbit_per_second: GbitPerSecondOrNone = Field(
        default=None,
        description="of the store's link (`shared`, and the remote tier); lower: all workers' pulls queue for it",
    )
    latency_ms: LatencyMs = Field(
        default=5.0,
        description="from asking over the network to the first byte; higher: only longer prefixes are worth a pull",
    )
    compression: Compression = Field(
        default=1.0,
        description="how many times smaller KV is on the network and in the store; higher: fewer bytes, shorter pulls. "
        "Losses of quality and the time to decompress aren't modelled",
    )
    failure_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of pulls over the network that fail, after the whole time of the pull; higher: more prompts "
        "wait in vain and are computed after all",
    )
    seed: int = Field(
        default=0, ge=0, le=2**63, description="of which pulls fail; another: others fail, at the same ratio"
    )
    kv_bytes_per_token: KvBytesPerToken = Field(
        default=131_072,
        description="of the model: 2 · layers · KV heads · head size · bytes of a value; larger: pulls take longer. "
        "The default is an 8B model with 8 KV heads in 16 bits",
    )
    gpu_blocks: BlocksOrNone = Field(
        default=None,
        ge=1,
        description="KV blocks of each GPU; default: engine.capacity_blocks; fewer: more is pulled or computed again",
    )
    cpu_blocks: BlocksOrNone = Field(
        default=4096, ge=0, description="`tiers`: blocks of each worker's CPU memory; more: fewer reach the disk"
    )
    disk_blocks: BlocksOrNone = Field(
        default=0,
        ge=0,
        description="`tiers`: blocks of each worker's disk; it outlives a restart; 0: none; more: fewer go to the "
        "remote store",
    )
    remote_blocks: BlocksOrNone = Field(
        default=None,
        ge=0,
        description="blocks of the store of `shared`, and of the remote tier, which all workers share; fewer: the "
        "store forgets what was used longest ago",
    )
    cpu_gbit_per_second: GbitPerSecondOrNone = Field(
        default=200.0, description="from CPU memory to the GPU; faster: more blocks are brought back"
    )
    disk_gbit_per_second: GbitPerSecondOrNone = Field(
        default=50.0, description="from the disk to the GPU; faster: more blocks are brought back"
    )
    disk_latency_ms: LatencyMs = Field(
        default=1.0, description="of a read of the disk; longer: only longer prefixes are read"
    )

    def at(self, changes: Mapping[str, Any]) -> Cache:
        """The same with these keys changed. Raises ValueError for a wrong key or value."""
        return type(self).model_validate({**self.model_dump(), **changes})
