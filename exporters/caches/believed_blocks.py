"""What routers believe to be cached where. Far fewer blocks than the engines hold: the router is blind."""

from __future__ import annotations

from collections.abc import Sequence

from prefixwatch.exporters.caches.worker_targets import WorkerTargets
from prefixwatch.exporters.scraping.target import Target


def router_believed_blocks(targets: Sequence[Target]) -> dict[str, float]:
    """KV blocks by worker; of several routers the one that knows most."""
    believed: dict[str, float] = {}
    engines = WorkerTargets(targets)
    for target in targets:
        if target.up and target.store is not None and target.store.system.role == "router":
            for labels, blocks in target.store.gauges_of("believed_blocks").items():
                worker = engines.name_of(dict(labels).get("worker", ""))
                believed[worker] = max(believed.get(worker, 0.0), blocks)
    return believed
