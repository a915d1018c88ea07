"""What keeping tenants apart costs an engine's cache, by its KV events.

A block is stored again for each salt that its prompt comes under. Two blocks are *copies* when they and all blocks
before them have the same tokens, pictures and LoRA adapter, and only their salts differ: without salts one of them
would do, and an engine never holds a block twice by itself. Copies at several workers are replicas and cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric

from prefixwatch.exporters.caches.kv_events import KvEventCounts
from prefixwatch.exporters.metrics_page.rows import rows

NO_EVENTS = "no engine's KV events are heard: set kv_events for the engines that publish them"
NO_SALTS = "its KV events name no salts: vLLM names them in extra_keys, SGLang in cache_salt, once there is one"


@dataclass(frozen=True, slots=True)
class IsolationCost:
    """Of one target; `lost_hit_tokens` since the exporter began to listen, the others now."""

    cached_tokens: int
    duplicate_tokens: int
    """Of them, in copies of blocks that it also holds under another salt: of ten copies nine count."""
    lost_hit_tokens: int
    """Stored while it held the same under another salt, so they would have been hits without salts.

    More than the lost hits where answers repeat too, whose blocks are no hits; less where copies push other blocks out.
    """


def isolation_cost(counts: KvEventCounts) -> IsolationCost | None:
    """None where the engine's events don't tell salts."""
    if not counts.tells_salts:
        return None
    return IsolationCost(
        counts.resident_blocks * (counts.block_size_tokens or 0), counts.duplicate_tokens, counts.lost_hit_tokens
    )


def isolation_families(costs: Iterable[tuple[str, IsolationCost]]) -> Iterator[Metric]:
    """The families `isolation_*_tokens`, by target."""
    cached, duplicate = rows("isolation_cached_tokens"), rows("isolation_duplicate_tokens")
    lost = rows("isolation_lost_hit_tokens")
    for target, cost in costs:
        cached.add_metric([target], cost.cached_tokens)
        duplicate.add_metric([target], cost.duplicate_tokens)
        lost.add_metric([target], cost.lost_hit_tokens)
    yield from (cached, duplicate, lost)
