"""The prefix tree of the whole fleet, from the KV events of all targets that publish them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client.core import Metric

from prefixwatch.exporters.caches.named_prefixes import NamedPrefixes, PrefixShare, named_shares
from prefixwatch.exporters.caches.prefix_names import NamedPrefix, PrefixNames
from prefixwatch.exporters.caches.prefix_traffic import NodeTraffic, SpanCounts, node_traffic
from prefixwatch.exporters.metrics_page.rows import rows
from prefixwatch.kvcache.index.block_table import BlockTable, TableSnapshot
from prefixwatch.kvcache.index.prefix_tree import PrefixTree, prefix_tree

_log = logging.getLogger("prefixwatch.exporter")

QUANTILES = (0.5, 0.95, 0.99)
HOTTEST = 20
"""Number of branches that are exported, in addition to those that have a name."""

REFRESH_SECONDS = 2.0
TRAFFIC_REFRESH_SECONDS = 5.0
"""A cache that only hits publishes no event: the tree stays, its traffic doesn't."""
_SHARE_OF_A_CORE = 0.05

NO_EVENTS = "no target publishes KV events that are listened to: set kv_events for the targets that do"
NOT_YET = "the tree has not been computed yet"


@dataclass(frozen=True, slots=True)
class TreeView:
    """A tree with all that a page asks of it, and since when the table's content is as it shows."""

    tree: PrefixTree
    configured: Mapping[int, str]
    """Names of the nodes that have one."""
    quantiles: Mapping[str, Sequence[float]]
    """By family, of `QUANTILES`."""
    hot_branch_tokens: Mapping[str, int]
    traffic: NodeTraffic | None
    """None without request records."""
    named: Mapping[str, PrefixShare]
    """Of the running span, by the names that are configured."""
    changed_unix_seconds: float
    seconds: float
    """How long it took to compute."""


class PrefixSource:
    """Keeps the tree of `table` up to date: computed beside the event loop, at most every `REFRESH_SECONDS`, and never
    for more than a twentieth of the time."""

    name = "prefixes"

    def __init__(
        self,
        named: Sequence[NamedPrefix] = (),
        secret: str | None = None,
        *,
        traffic: Callable[[float], SpanCounts | None] = lambda now_seconds: None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.table = BlockTable()
        self.names = PrefixNames(named, secret)
        self.view: TreeView | None = None
        self.started = secrets.token_hex(4)
        """Names this life of the process: versions begin again with the next."""
        self._traffic = traffic
        self._traffic_at = 0.0
        self._counts: SpanCounts | None = None
        self._named = NamedPrefixes()
        self._looks = 0
        self._wall_clock = wall_clock
        self._renamed = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def etag(self) -> str:
        """Changes with everything that the tree's pages show."""
        return f"{self.started}-{self._looks}" if self.view else f"{self.started}-none"

    def configure(self, named: Sequence[NamedPrefix]) -> None:
        """Other names from the next tree on."""
        self.names.configure(named)
        self.view, self._renamed, self._named = None, self._renamed + 1, NamedPrefixes()

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_refreshing(), name="prefix tree")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def refresh(self) -> None:
        """Compute the tree again if the table has changed, or traffic may have."""
        now = time.monotonic()
        unchanged = self.view is not None and self.view.tree.version == self.table.version
        if unchanged and now - self._traffic_at < TRAFFIC_REFRESH_SECONDS:
            return
        renamed, self._traffic_at = self._renamed, now
        counts = self._traffic(now)
        if unchanged and counts == self._counts:
            return
        view = await asyncio.to_thread(self._look, self.table.snapshot(), counts)
        if renamed == self._renamed:  # else these are the old names
            self.view, self._counts, self._looks = view, counts, self._looks + 1
            if counts is not None:
                self._named.look(counts.number, view.named, counts.now.requests)

    def metrics(self, now_seconds: float) -> Iterator[Metric]:
        if not self.table.workers:
            return
        blocks = rows("prefix_tree_blocks")
        blocks.add_metric([], len(self.table))
        yield blocks
        if self.view is not None:
            yield from _shape(self.view)
        yield from self._named.metrics()

    def document(self, now_seconds: float) -> Mapping[str, Any]:
        if not self.table.workers:
            return {"absent": {"prefixes": NO_EVENTS}}
        known: dict[str, Any] = {"blocks": len(self.table), "table_bytes": self.table.nbytes}
        if self.view is None:
            return known | {"absent": {"tree": NOT_YET}}
        tree = self.view.tree
        return known | {
            "nodes": len(tree),
            "height_levels": tree.height,
            "computed_in_seconds": self.view.seconds,
            "details": "/api/v1/prefixes",
        }

    async def _keep_refreshing(self) -> None:
        while True:
            try:
                await self.refresh()
            except Exception:  # a mistake of ours must not freeze the tree for good, unseen
                _log.exception("the prefix tree could not be computed")
            took = self.view.seconds if self.view else 0.0
            await asyncio.sleep(max(REFRESH_SECONDS, took / _SHARE_OF_A_CORE))

    def _look(self, snapshot: TableSnapshot, counts: SpanCounts | None) -> TreeView:
        began = time.monotonic()
        both = counts.both if counts is not None else None
        asked = {*self.names.fingerprints, *(both.ended if both else ()), *(both.reused if both else ())}
        tree = prefix_tree(snapshot, asked)
        configured = self.names.by_node(tree)
        hot = dict.fromkeys(self.names.names, 0)  # a named prefix that isn't cached has no tokens: that is known
        for node in dict.fromkeys([*configured, *tree.hottest(HOTTEST)]):
            hot[self.names.name_of(tree, node, configured)] = int(tree.copied_tokens_below[node])
        return TreeView(
            tree=tree,
            configured=configured,
            quantiles={
                "prefix_tree_depth_levels": _quantiles(tree.levels_of_leaves()),
                "prefix_tree_fan_out": _quantiles(tree.fan_outs()),
                "prefix_block_replicas": _quantiles(tree.replicas_of_block),
            },
            hot_branch_tokens=hot,
            traffic=node_traffic(tree, both) if both is not None else None,
            named=named_shares(self.names.nodes(tree), node_traffic(tree, counts.now)) if counts is not None else {},
            changed_unix_seconds=self._wall_clock(),
            seconds=time.monotonic() - began,
        )


def _quantiles(values: npt.NDArray[np.int64]) -> Sequence[float]:
    """Nearest-rank quantiles; none of nothing."""
    return np.quantile(values, QUANTILES, method="inverted_cdf").tolist() if len(values) else ()


def _shape(view: TreeView) -> Iterator[Metric]:
    height, hot = rows("prefix_tree_height_levels"), rows("prefix_hot_branch_tokens")
    height.add_metric([], view.tree.height)
    for name, cached in view.hot_branch_tokens.items():
        hot.add_metric([name], cached)
    yield from (height, hot)
    for family_name, values in view.quantiles.items():
        family = rows(family_name)
        for quantile, value in zip(QUANTILES, values, strict=False):
            family.add_metric([repr(quantile)], value)
        yield family
