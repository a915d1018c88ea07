"""The set of scraped targets: follows what is wanted, and scrapes each target on its own schedule."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from hashlib import blake2b

from prefixwatch.exporters.caches.worker_targets import address_of_worker
from prefixwatch.exporters.catalogue.model import Catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig, split_shard
from prefixwatch.exporters.errors import ExporterError
from prefixwatch.exporters.fleet.retired_targets import RetiredTargets
from prefixwatch.exporters.http.redact import shown_url
from prefixwatch.exporters.requests.request import Place
from prefixwatch.exporters.scraping.target import Target

_log = logging.getLogger("prefixwatch.exporter")

_FIRST_SCRAPES_APART_SECONDS = 0.005
_GOLDEN_RATIO = 0.618033988749895
"""Multiples of it modulo 1 are spread evenly, whatever their number."""


class TargetSet:
    """The targets by name, and one scrape loop for each of them once `keep_scraping` was called.

    `scrape` scrapes one target now; `ended` is called with each target that leaves the set.
    """

    def __init__(
        self,
        config: ExporterConfig,
        catalogue: Catalogue,
        scrape: Callable[[Target], Awaitable[None]],
        ended: Callable[[Target], None],
    ) -> None:
        self.targets: list[Target] = []
        """Those that are scraped now, in the order of the configuration. Always the same list."""
        self.retired = RetiredTargets(config.limits.label_values)
        self._config = config
        self._catalogue = catalogue
        self._scrape = scrape
        self._ended = ended
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._places: Mapping[str, Place] = {}
        self._names: Mapping[str, str] = {}
        self._by_name: Mapping[str, Target] = {}
        self._common_block_size: int | None = None
        self._looked_at_seconds = -math.inf
        self._scraping = False
        self._started = 0

    @property
    def ready(self) -> bool:
        """Every target was scraped at least once, with or without success."""
        return all(target.health.scrapes for target in self.targets)

    def follow(self, wanted: Iterable[TargetConfig]) -> list[str]:
        """Remove the targets that aren't wanted any more and add the new ones.

        Returns why some of those wanted are not scraped. `limits.targets` is applied while `wanted` is read.
        """
        configs: dict[str, TargetConfig] = {}
        problems = []
        most, beyond = self._config.limits.targets, 0
        index, count = split_shard(self._config.shard)
        everywhere = {}
        for config in wanted:
            everywhere[config.name] = config
            if count > 1 and shard_of(config.name, count) != index:
                continue
            known = configs.get(config.name)
            if known is None:
                if len(configs) < most:
                    configs[config.name] = config
                else:
                    beyond += 1
            elif known.url != config.url:
                problems.append(
                    f"two targets have the name '{config.name}': {shown_url(known.url)} is scraped, "
                    f"{shown_url(config.url)} is not; give them different `instance` labels"
                )
        if beyond:
            problems.append(f"{beyond} targets are not scraped: limits.targets is {most}")
        before = {target.name: target for target in self.targets}
        for name, target in before.items():
            if configs.get(name) != target.config:
                self._end(target)
        self._places = _places(everywhere.values())  # routers name workers that other shards scrape
        self._names = {address_of_worker(config.url): config.name for config in everywhere.values()}
        self._names |= {name: name for name in everywhere}
        self.targets.clear()
        for name, config in configs.items():
            try:
                kept = name in before and before[name].config == config
                self.targets.append(before[name] if kept else self._begin(config))
            except ExporterError as error:  # discovery named a system that isn't in the catalogue
                problems.append(f"target {name}: {error}")
        self._by_name = {target.name: target for target in self.targets}
        return problems

    def configure(self, config: ExporterConfig, catalogue: Catalogue) -> None:
        """Use these settings from now on. With another catalogue all targets start again: their numbers mean something
        else. `follow` is to be called next."""
        self._config = config
        if not _same_catalogue(catalogue, self._catalogue):
            self._catalogue = catalogue
            self.follow(())
        self.retired.label_limit = config.limits.label_values
        for target in self.targets:
            target.configure(config)

    def keep_scraping(self) -> None:
        """Scrape every target at the configured interval from now on, spread over it; one scrape at a time each."""
        self._scraping = True
        for target in self.targets:
            self._start(target)

    async def close(self) -> None:
        loops = list(self._loops.values())
        self._loops.clear()
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)

    def waiting_at(self, name: str) -> float | None:
        """Requests queued at the target of this name, by its last scrape; for another name, at all targets."""
        target = self._by_name.get(name)
        if target is not None and target.up and target.numbers and target.numbers.waiting is not None:
            return target.numbers.waiting
        known = (target.numbers.waiting for target in self.targets if target.up and target.numbers)
        waiting = [requests for requests in known if requests is not None]
        return sum(waiting) if waiting else None

    def hits_of(self, name: str) -> float | None:
        """Hit tokens that the engine of this name has counted, by its last scrape; None for another name."""
        target = self._by_name.get(name)
        return target.store.total("prefix_hit_tokens") if target is not None and target.up and target.store else None

    def block_size_of(self, worker: str) -> int | None:
        """Tokens of a KV block at the target of this name or address; for another one, where all targets have the
        same. Asked for with every span, so that all targets are looked at once an interval."""
        target = self._by_name.get(self.worker_name(worker))
        if target is not None and (size := _block_size(target)):
            return size
        now = time.monotonic()
        if now - self._looked_at_seconds >= self._config.interval_seconds:
            sizes = {size for target in self.targets if (size := _block_size(target))}
            self._common_block_size = sizes.pop() if len(sizes) == 1 else None
            self._looked_at_seconds = now
        return self._common_block_size

    def place_of(self, name: str) -> Place:
        """Where the target runs that has this name or address; empty where there is none, or several."""
        return self._places.get(name) or self._places.get(address_of_worker(name)) or Place()

    def worker_name(self, name: str) -> str:
        """The name of the target that a router calls so, by name or address; its host:port where there is none."""
        return self._names.get(name) or self._names.get(address := address_of_worker(name)) or address

    def started_unix_seconds(self, worker: str) -> float:
        """When the process of the target of this name began, by its last page; 0 if it doesn't say."""
        target = self._by_name.get(worker)
        return 0.0 if target is None or target.store is None else target.store.started_unix_seconds or 0.0

    def _begin(self, config: TargetConfig) -> Target:
        target = Target(config, self._config, self._catalogue, self.retired)
        if config.tls_unverified:
            _log.warning(
                "certificate is not checked, anybody could answer for this target", extra={"target": config.name}
            )
        if self._scraping:
            _log.info("target added", extra={"target": config.name, "url": shown_url(config.url)})
            self._start(target)
        return target

    def _end(self, target: Target) -> None:
        _log.info("target removed", extra={"target": target.name, "url": shown_url(target.config.url)})
        target.gone = True
        target.end()
        if loop := self._loops.pop(target.name, None):
            loop.cancel()
        self._ended(target)

    def _start(self, target: Target) -> None:
        self._started += 1
        phase = self._config.interval_seconds * ((self._started * _GOLDEN_RATIO) % 1.0)
        first = min(phase, self._started * _FIRST_SCRAPES_APART_SECONDS)
        self._loops[target.name] = asyncio.create_task(self._loop(target, first, phase), name=f"scrape {target.name}")

    async def _loop(self, target: Target, first_in_seconds: float, phase_seconds: float) -> None:
        due = time.monotonic() + phase_seconds
        own = asyncio.current_task()
        await asyncio.sleep(first_in_seconds)
        while True:
            try:
                await self._scrape(target)
            except Exception as error:  # a bug met by one page must not end this target's scrapes
                _log.exception("scrape ended by a fault of the exporter", extra={"target": target.name})
                target.fail("internal", f"{type(error).__name__}; the exporter's log has more")
            if self._loops.get(target.name) is not own:
                return  # a cancellation that comes with the HTTP client's own timeout is lost
            now = time.monotonic()
            while due <= now:  # ticks that passed during a slow scrape are left out
                due += self._config.interval_seconds
            await asyncio.sleep(due - now)
            due += self._config.interval_seconds  # even if the timer fired a moment early


def shard_of(name: str, shards: int) -> int:
    """Which of the shards scrapes the target of this name: rendezvous hashing, so that another shard more takes only
    its own share from each of the others."""
    return max(range(shards), key=lambda shard: blake2b(f"{shard}/{name}".encode(), digest_size=8).digest())


def _block_size(target: Target) -> int | None:
    return int(target.numbers.block_size_tokens or 0) if target.numbers else None


def served_models(target: Target) -> set[str]:
    """Names of the models that an engine's page shows."""
    if target.store is None or target.store.system.role != "engine":
        return set()
    labels = (dict(labels) for labels in target.store.gauges_of("running_requests"))
    return {model for each in labels if (model := each.get("model", ""))}


def _places(configs: Iterable[TargetConfig]) -> dict[str, Place]:
    """By name and by address; an address that several targets share says nothing."""
    by_name: dict[str, Place] = {}
    by_address: dict[str, Place] = {}
    for config in configs:
        place = Place(*(getattr(config, name) or config.labels.get(name, "") for name in Place._fields))
        by_name[config.name] = place
        address = address_of_worker(config.url)
        by_address[address] = place if by_address.get(address, place) == place else Place()
    return by_address | by_name


def check_systems(config: ExporterConfig, catalogue: Catalogue) -> None:
    """Raises ExporterError for a system that isn't in the catalogue."""
    owners: Mapping[str, str | None] = {
        **{f"target {target.name}": target.system for target in config.targets},
        **{f"job {job.job_name}": job.system for job in config.scrape_configs},
    }
    for owner, system in owners.items():
        if system is not None:
            try:
                catalogue.get(system)
            except ExporterError as error:
                raise ExporterError(f"{owner}: {error}") from error


def _same_catalogue(one: Catalogue, other: Catalogue) -> bool:
    return one.names == other.names and all(one.get(name) == other.get(name) for name in one.names)
