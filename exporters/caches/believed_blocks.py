"""What routers believe to be cached where. Far fewer blocks than the engines hold: the router is blind."""

from __future__ import annotations

from collections.abc import Sequence

from exporters.scraping.target import Target


def router_believed_blocks(targets: Sequence[Target]) -> dict[str, float]:
    """KV blocks by the worker's name as routers give it; of several routers the one that knows most."""
    believed: dict[str, float] = {}
    for target in targets:
        if target.up and target.store is not None and target.store.system.role == "router":
            for labels, blocks in target.store.gauges_of("believed_blocks").items():
                worker = dict(labels).get("worker", "")
                believed[worker] = max(believed.get(worker, 0.0), blocks)
    return believed
