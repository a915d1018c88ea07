"""All targets: found, scraped each on its own schedule, and ended when they go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from exporters.caches.kv_events import KvEventWatcher
from exporters.caches.prefixes import PrefixSource
from exporters.caches.source import CacheSource
from exporters.catalogue import Catalogue, load_catalogue
from exporters.config import ExporterConfig, TargetConfig
from exporters.departed import Departed
from exporters.discovery.manager import Discovery
from exporters.errors import ExporterError
from exporters.http.client import Credentials
from exporters.http.redact import shown_url
from exporters.probes.prefill_baseline import PrefillBaseline
from exporters.probes.prober import Prober
from exporters.requests.ledger import RequestLedger
from exporters.requests.router_records import RouterRecords, is_router
from exporters.requests.sessions import Place
from exporters.scraping.scrape import Scrape, Scraper
from exporters.scraping.target import Target
from exporters.service import ServiceSource
from exporters.source import Source
from exporters.spans.receiver import OtlpReceiver
from slo.document import load_request_objectives, shipped_names

_log = logging.getLogger("prefixwatch.exporter")

_RELOADED = frozenset(
    {"targets", "scrape_configs", "interval_seconds", "timeout_seconds", "limits", "catalogue", "prefixes"}
)
"""Settings that a reload may change."""

_FIRST_SCRAPES_APART_SECONDS = 0.005
_GOLDEN_RATIO = 0.618033988749895
"""Multiples of it modulo 1 are spread evenly, however many there are."""


class Exporter:
    """All targets and the tasks that keep them up to date."""

    def __init__(self, config: ExporterConfig, catalogue: Catalogue | None = None) -> None:
        self.config = config
        self.targets: list[Target] = []
        """Those that are scraped now; discovery changes it."""
        self.departed = Departed(config.limits.label_values)
        self.sources: list[Source] = []
        """What is known beside the scraped pages, in order of trust."""
        baseline = PrefillBaseline()
        self.ledger = RequestLedger(
            config.requests,
            objectives=load_request_objectives(shipped_names() if config.objectives is None else config.objectives),
            pricing=config.pricing,
            tenants=config.tenants,
            window_seconds=config.window_seconds,
            place_of=self._place_of,
            baseline=baseline.seconds,
        )
        self.records = RouterRecords(self.ledger, self.targets)
        self.sources.append(self.ledger)
        secret = config.prefix_secret
        self.prefixes = PrefixSource(
            config.prefixes, secret.get_secret_value() if secret else None, traffic=self.ledger.prefix_counts
        )
        self.sources.append(self.prefixes)
        self.sources.append(
            CacheSource(
                lambda: self.targets,
                self.prefixes,
                self.ledger.locality,
                baseline,
                interval_seconds=config.interval_seconds,
                kv_bytes_per_token=config.kv_bytes_per_token,
            )
        )
        self.spans = self._receiver(config)
        self.prober = self._prober(config, baseline)
        self.sources += [source for source in (self.spans, self.prober) if source is not None]
        self.url = ""
        """Where it listens; empty before it does."""
        self._given_catalogue = catalogue is not None
        self._catalogue = catalogue or load_catalogue(config.catalogue)
        self._scraper: Scraper | None = None
        self._service: ServiceSource | None = None
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._watchers: dict[str, KvEventWatcher] = {}
        self._scraping = False
        self._started = 0
        self._endings: set[asyncio.Task[None]] = set()
        _check_systems(config, self._catalogue)
        self._follow(config.targets)

    @property
    def ready(self) -> bool:
        """Every target was scraped at least once, well or not."""
        return all(target.health.scrapes for target in self.targets)

    @property
    def service(self) -> ServiceSource:
        assert self._service is not None  # there is one from `open` on
        return self._service

    async def open(self) -> None:
        """Look for targets once, everywhere. Raises ExporterError for a discovery that can't work here at all."""
        config = self.config
        self._scraper = Scraper(
            config.timeout_seconds,
            config.limits.body_bytes,
            config.limits.total_body_bytes,
            keep_connection_seconds=2 * config.interval_seconds,
        )
        self._service = ServiceSource(Discovery(self._scraper, self._sync))
        self.sources.append(self._service)
        await self._service.discovery.configure(config.scrape_configs)
        self._sync()

    async def close(self) -> None:
        """Stop scraping and let go of all connections."""
        if self._service:
            await self._service.discovery.close()
        loops = list(self._loops.values())
        self._loops.clear()
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, *self._endings, return_exceptions=True)
        await self.prefixes.stop()
        for source in (self.spans, self.prober):
            if source is not None:
                await source.stop()
        for watcher in self._watchers.values():
            await watcher.stop()
        if self._scraper:
            await self._scraper.close()

    async def fetch(self, target: Target) -> Scrape:
        """Fetch one target's page now, and do nothing with it."""
        assert self._scraper is not None
        return await self._scraper.fetch(target.config.url, target.config)

    async def scrape(self, target: Target) -> None:
        """Scrape one target now."""
        was_up, reason = target.up, target.reason
        scrape = await self.fetch(target)
        if target.gone:
            return  # its counts are with those of all that are gone
        target.ingest(scrape, time.monotonic())
        if target.reason != reason:
            _log_state(target, was_up)
        if target.up and is_router(target) and self._scraper:
            await self.records.read(target, self._scraper.get)
        if target.config.kv_events and target.kv_events is None:
            self._watch_kv_events(target, target.config.kv_events)

    async def scrape_all(self) -> None:
        """Scrape every target once, all at the same time."""
        await asyncio.gather(*(self.scrape(target) for target in self.targets))

    def keep_scraping(self) -> None:
        """Scrape every target at the configured interval from now on, spread over it; one at a time per target."""
        self._scraping = True
        self.records.since_unix_seconds = time.time()
        self.prefixes.start()
        for source in (self.spans, self.prober):
            if source is not None:
                source.start()
        self.service.discovery.keep_looking()
        for target in self.targets:
            self._start(target)

    async def reconfigure(self, config: ExporterConfig) -> None:
        """Go on with another configuration; targets that are in both keep their numbers.

        Raises ExporterError, and changes nothing, when it can't be taken.
        """
        fixed = [
            name
            for name in type(config).model_fields
            if name not in _RELOADED and getattr(config, name) != getattr(self.config, name)
        ]
        if fixed:
            raise ExporterError(f"{', '.join(fixed)} can't change while running: restart the exporter")
        assert self._scraper is not None
        catalogue = self._catalogue if self._given_catalogue else load_catalogue(config.catalogue)
        _check_systems(config, catalogue)
        await self.service.discovery.configure(config.scrape_configs)
        self.config = config
        self.prefixes.configure(config.prefixes)
        if not _same_catalogue(catalogue, self._catalogue):
            self._catalogue = catalogue
            self._follow(())  # what the numbers mean has changed: they begin anew
        limits = config.limits
        self._scraper.configure(config.timeout_seconds, limits.body_bytes, limits.total_body_bytes)
        for target in self.targets:
            target.settings = config
        self._sync()
        self._scraper.credentials.forget_all_but(target.config for target in self.targets)
        if self._scraping:
            self.service.discovery.keep_looking()

    def _receiver(self, config: ExporterConfig) -> OtlpReceiver | None:
        if config.otlp is None:
            return None
        return OtlpReceiver(
            config.otlp,
            self.ledger,
            tenants=config.tenants,
            hash_secret=config.hash_secret.get_secret_value() if config.hash_secret else None,
            read_elsewhere=self.ledger.router_traces,
            block_size_of=self._block_size_of,
        )

    def _prober(self, config: ExporterConfig, baseline: PrefillBaseline) -> Prober | None:
        if config.probes is None:
            return None
        return Prober(
            config.probes,
            self.ledger,
            self._waiting_at,
            Credentials(),
            baseline=baseline,
            block_size_of=self._block_size_of,
        )

    def _waiting_at(self, name: str) -> float | None:
        """Requests that wait at the target of this name, by its last scrape; behind a router, at all engines."""
        known = {target.name: target.numbers.waiting for target in self.targets if target.up and target.numbers}
        if known.get(name) is not None:
            return known[name]
        waiting = [requests for requests in known.values() if requests is not None]
        return sum(waiting) if waiting else None

    def _block_size_of(self, worker: str) -> int | None:
        """Tokens of a KV block at the target of this name; for another name, where all targets have the same."""
        known = {
            target.name: int(size)
            for target in self.targets
            if target.numbers and (size := target.numbers.block_size_tokens)
        }
        sizes = set(known.values())
        return known.get(worker) or (sizes.pop() if len(sizes) == 1 else None)

    def _place_of(self, worker: str) -> Place:
        """Where the target of this name stands."""
        config = next((target.config for target in self.targets if target.name == worker), None)
        if config is None:
            return Place()
        return Place(config.zone or config.labels.get("zone", ""), config.node or config.labels.get("node", ""))

    def _sync(self) -> None:
        """Make the targets those of the configuration and the discoveries."""
        static = self.config.targets
        self.service.static_targets = len(static)
        self.service.target_problems = self._follow([*static, *self.service.discovery.targets()])

    def _follow(self, wanted: Iterable[TargetConfig]) -> list[str]:
        """End the targets that aren't wanted any more, begin those that are new; the problems with the wanted ones."""
        configs: dict[str, TargetConfig] = {}
        problems = []
        for config in wanted:
            known = configs.setdefault(config.name, config)
            if known.url != config.url:
                problems.append(
                    f"two targets are called '{config.name}': {shown_url(known.url)} is scraped, "
                    f"{shown_url(config.url)} is not; give them different `instance` labels"
                )
        most = self.config.limits.targets
        if len(configs) > most:
            problems.append(f"{len(configs)} targets, limits.targets is {most}: the last ones are not scraped")
            configs = dict(list(configs.items())[:most])
        before = {target.name: target for target in self.targets}
        for name, target in before.items():
            if configs.get(name) != target.config:
                self._end(target)
        self.targets.clear()
        for name, config in configs.items():
            try:
                kept = name in before and before[name].config == config
                self.targets.append(before[name] if kept else self._begin(config))
            except ExporterError as error:  # discovery named a system that isn't in the catalogue
                problems.append(f"target {name}: {error}")
        return problems

    def _begin(self, config: TargetConfig) -> Target:
        target = Target(config, self.config, self._catalogue, self.departed)
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
        if watcher := self._watchers.pop(target.name, None):
            ending = asyncio.create_task(watcher.stop())
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    def _start(self, target: Target) -> None:
        self._started += 1
        phase = self.config.interval_seconds * ((self._started * _GOLDEN_RATIO) % 1.0)
        first = min(phase, self._started * _FIRST_SCRAPES_APART_SECONDS)
        self._loops[target.name] = asyncio.create_task(self._loop(target, first, phase), name=f"scrape {target.name}")

    async def _loop(self, target: Target, first_in_seconds: float, phase_seconds: float) -> None:
        due = time.monotonic() + phase_seconds
        own = asyncio.current_task()
        await asyncio.sleep(first_in_seconds)
        while True:
            try:
                await self.scrape(target)
            except Exception as error:  # a mistake of ours about one page must not end this target's scrapes
                _log.exception("scrape ended by a fault of the exporter", extra={"target": target.name})
                target.fail("internal", f"{type(error).__name__}; the exporter's log has more")
            if self._loops.get(target.name) is not own:
                return  # a cancellation that comes with the HTTP client's own timeout is lost
            now = time.monotonic()
            while due <= now:  # ticks that passed while a slow scrape was running are left out
                due += self.config.interval_seconds
            await asyncio.sleep(due - now)
            due += self.config.interval_seconds  # even if the timer rang a moment early

    def _watch_kv_events(self, target: Target, endpoint: str) -> None:
        watcher = KvEventWatcher(target.name, endpoint, target.config.kv_replay, self.prefixes.table)
        watcher.start()
        target.kv_events = watcher
        self._watchers[target.name] = watcher


def _check_systems(config: ExporterConfig, catalogue: Catalogue) -> None:
    """Raises ExporterError for a system that isn't in the catalogue."""
    for owner, system in [
        *((f"target {target.name}", target.system) for target in config.targets),
        *((f"job {job.job_name}", job.system) for job in config.scrape_configs),
    ]:
        if system is not None:
            try:
                catalogue.get(system)
            except ExporterError as error:
                raise ExporterError(f"{owner}: {error}") from error


def _same_catalogue(one: Catalogue, other: Catalogue) -> bool:
    return one.names == other.names and all(one.get(name) == other.get(name) for name in one.names)


def _log_state(target: Target, was_up: bool) -> None:
    details = {"target": target.name, "url": shown_url(target.config.url)}
    if target.up:
        _log.info("target is up", extra=details | {"system": target.system.system if target.system else ""})
    else:
        level = logging.WARNING if was_up or target.health.scrapes == 1 else logging.INFO
        _log.log(level, "scrape failed", extra=details | {"reason": target.reason, "detail": target.detail})
