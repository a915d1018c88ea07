"""The exporter: its targets and every source of figures, wired together, opened, reconfigured and closed."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from prefixwatch.exporters.caches.kv_events import KvEventWatcher
from prefixwatch.exporters.caches.prefixes import PrefixSource
from prefixwatch.exporters.caches.source import CacheSource
from prefixwatch.exporters.catalogue.model import Catalogue, load_catalogue
from prefixwatch.exporters.config import ExporterConfig
from prefixwatch.exporters.discovery.manager import Discovery
from prefixwatch.exporters.errors import ExporterError
from prefixwatch.exporters.fleet.derivation import derive_fleet
from prefixwatch.exporters.fleet.engine_goodput import EngineGoodput
from prefixwatch.exporters.fleet.status import status
from prefixwatch.exporters.http.credentials import Credentials
from prefixwatch.exporters.http.redact import shown_url
from prefixwatch.exporters.isolation.serving_tiers import ServingTiers
from prefixwatch.exporters.isolation.tenant_routes import TenantRoutes
from prefixwatch.exporters.probes.prefill_baseline import PrefillBaselines
from prefixwatch.exporters.probes.prober import Prober
from prefixwatch.exporters.requests.account import ModelWindow
from prefixwatch.exporters.requests.ledger import RequestLedger
from prefixwatch.exporters.requests.router_records import RouterRecords, is_router
from prefixwatch.exporters.scaling.source import ScalingSource
from prefixwatch.exporters.scraping.scrape import Scrape, Scraper
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.exporters.service import ServiceSource
from prefixwatch.exporters.source import Source
from prefixwatch.exporters.state import StateFile
from prefixwatch.exporters.targets import TargetSet, check_systems, served_models
from prefixwatch.slo.build import load_request_objectives, shipped_names

if TYPE_CHECKING:
    from prefixwatch.exporters.spans.receiver import OtlpReceiver

_log = logging.getLogger("prefixwatch.exporter")

_RELOADED = frozenset(
    {"targets", "scrape_configs", "interval_seconds", "timeout_seconds", "limits", "catalogue", "prefixes"}
)
"""Settings that a reload may change."""


class Exporter:
    """All targets, all sources, and the tasks that keep them up to date."""

    def __init__(self, config: ExporterConfig, catalogue: Catalogue | None = None) -> None:
        self.config = config
        self.url = ""
        """Where it listens; empty until it does."""
        self._fixed_catalogue = catalogue
        catalogue = catalogue or load_catalogue(config.catalogue)
        check_systems(config, catalogue)
        self.fleet = TargetSet(config, catalogue, self.scrape, self._ended)
        baselines = PrefillBaselines()
        routes = TenantRoutes(self.fleet.worker_name, self.fleet.started_unix_seconds)
        self._tiers = ServingTiers(self.fleet.worker_name)
        self.ledger = RequestLedger(
            config.requests,
            objectives=load_request_objectives(shipped_names() if config.objectives is None else config.objectives),
            pricing=config.pricing,
            tenants=config.tenants,
            window_seconds=config.window_seconds,
            place_of=self.fleet.place_of,
            baseline=baselines.seconds,
            prove=routes.prove,
            tier_of=self._tiers.of,
            tree=lambda: self.prefixes.view.tree if self.prefixes.view else None,
        )
        self.records = RouterRecords(self.ledger, self.targets, routes=routes)
        secret = config.prefix_secret
        self.prefixes = PrefixSource(
            config.prefixes, secret.get_secret_value() if secret else None, traffic=self.ledger.prefix_counts
        )
        self._cache = CacheSource(
            lambda: self.targets,
            self.ledger.locality,
            self.ledger.cache_size_hit_ratios,
            baselines,
            interval_seconds=config.interval_seconds,
            kv_bytes_per_token=config.kv_bytes_per_token,
        )
        self.scaling = ScalingSource(
            config.scaling,
            lambda: self.targets,
            self.prefixes,
            lambda model: baselines.seconds_per_token(model) or self.ledger.seconds_per_token(model),
            gpus_per_worker=config.pricing.gpus_per_worker,
        )
        self.spans = self._receiver(config)
        self.prober = self._prober(config, baselines)
        self._active = [source for source in (self.spans, self.prober) if source is not None]
        goodput = EngineGoodput(lambda: self.targets, self.ledger.objectives, lambda: self.ledger.has_traffic)
        self.sources: list[Source] = [self.ledger, goodput, self.prefixes, self._cache, self.scaling, *self._active]
        """What is known beside the scraped pages, in order of trust."""
        self._scraper: Scraper | None = None
        self._service: ServiceSource | None = None
        self._state = StateFile(config.state_file, self.records, self.ledger) if config.state_file else None
        self._watchers: dict[str, KvEventWatcher] = {}
        self._scraping = False
        self._endings: set[asyncio.Task[None]] = set()
        self.fleet.follow(config.targets)

    @property
    def targets(self) -> list[Target]:
        """Those that are scraped now; discovery changes the list."""
        return self.fleet.targets

    @property
    def ready(self) -> bool:
        return self.fleet.ready

    @property
    def service(self) -> ServiceSource:
        assert self._service is not None  # there is one from `open` on
        return self._service

    def status(self) -> dict[str, Any]:
        """The block of figures of this moment."""
        requests = self.ledger.window(time.monotonic())
        if self.ledger.has_traffic:  # records are read: of a model without any, none ended
            models = {target.identity.get("model", "") for target in self.targets if target.store}
            requests = {model: ModelWindow() for model in models if model} | dict(requests)
        fleet, objectives = derive_fleet(self.targets), self.ledger.objectives
        return status(self.targets, fleet, requests, self.config.window_seconds, objectives)

    async def open(self) -> None:
        """Look for targets once, everywhere. Raises ExporterError for a discovery that can't work here at all."""
        config = self.config
        self._scraper = Scraper(
            config.timeout_seconds,
            config.limits.body_bytes,
            config.limits.total_body_bytes,
            keep_connection_seconds=_keep_connection_seconds(config),
        )
        self._service = ServiceSource(Discovery(self._scraper, self._sync))
        self.sources.append(self._service)
        await self._service.discovery.configure(config.scrape_configs)
        self._sync()

    async def close(self) -> None:
        """Stop scraping and let go of all connections."""
        if self._service:
            await self._service.discovery.close()
        await self.fleet.close()
        if self._state:
            await self._state.stop()
        await asyncio.gather(*self._endings, return_exceptions=True)
        await self.prefixes.stop()
        for source in self._active:
            await source.stop()
        for watcher in self._watchers.values():
            await watcher.stop()
        if self._scraper:
            await self._scraper.close()

    async def fetch(self, target: Target) -> Scrape:
        """Fetch one target's page now without using it."""
        assert self._scraper is not None
        return await self._scraper.fetch(target.config.url, target.config)

    async def scrape(self, target: Target) -> None:
        """Scrape one target now."""
        was_up, reason, began = target.up, target.reason, time.time()
        scrape = await self.fetch(target)
        if target.gone:
            return  # its counts are with those of all that are gone
        target.ingest(scrape, time.monotonic())
        if target.reason != reason:
            _log_state(target, was_up)
            if target.system is None or target.system.role == "router":  # an engine proves nothing by coming or going
                self.records.look(time.time())
        if target.up and target.store is not None:
            hits = target.store.totals_by("prefix_hit_tokens", "tier")
            self._tiers.scraped(target.name, began, time.time(), {tier: tokens for (tier,), tokens in hits.items()})
        if target.up:
            for model in served_models(target):
                self.ledger.serves(model, target.name)
        if target.up and is_router(target) and self._scraper:
            await self.records.read(target, self._scraper.get)
        if target.config.kv_events and target.kv_events is None:
            self._watch_kv_events(target)

    async def scrape_all(self) -> None:
        """Scrape every target once, all at the same time."""
        await asyncio.gather(*(self.scrape(target) for target in self.targets))

    def keep_scraping(self) -> None:
        """Scrape, probe and look for targets from now on."""
        self._scraping = True
        self.records.since_unix_seconds = time.time()
        if self._state:
            self._state.load()
            self._state.start()
        self.prefixes.start()
        for source in self._active:
            source.start()
        self.service.discovery.keep_looking()
        self.fleet.keep_scraping()

    async def reconfigure(self, config: ExporterConfig) -> None:
        """Continue with another configuration; targets that are in both keep their numbers.

        Raises ExporterError, and changes nothing, when it can't be used.
        """
        fixed = [
            name
            for name in type(config).model_fields
            if name not in _RELOADED and getattr(config, name) != getattr(self.config, name)
        ]
        if fixed:
            raise ExporterError(f"{', '.join(fixed)} can't change while running: restart the exporter")
        assert self._scraper is not None
        catalogue = self._fixed_catalogue or load_catalogue(config.catalogue)
        check_systems(config, catalogue)
        await self.service.discovery.configure(config.scrape_configs)
        self.config = config
        self.prefixes.configure(config.prefixes)
        self._cache.interval_seconds = config.interval_seconds
        limits = config.limits
        self._scraper.configure(
            config.timeout_seconds, limits.body_bytes, limits.total_body_bytes, _keep_connection_seconds(config)
        )
        self.fleet.configure(config, catalogue)
        self._sync()
        self._scraper.credentials.forget_all_but(target.config for target in self.targets)
        if self._scraping:
            self.service.discovery.keep_looking()

    def _receiver(self, config: ExporterConfig) -> OtlpReceiver | None:
        if config.otlp is None:
            return None
        from prefixwatch.exporters.spans.receiver import OtlpReceiver  # noqa: PLC0415  # protobuf: only where used

        return OtlpReceiver(
            config.otlp,
            self.ledger.record,
            tenants=config.tenants,
            hash_secret=config.hash_secret.get_secret_value() if config.hash_secret else None,
            read_elsewhere=self.ledger.router_traces,
            block_size_of=self.fleet.block_size_of,
        )

    def _prober(self, config: ExporterConfig, baselines: PrefillBaselines) -> Prober | None:
        if config.probes is None:
            return None
        return Prober(
            config.probes,
            self.ledger.record,
            self.fleet.waiting_at,
            Credentials(),
            baselines=baselines,
            block_size_of=self.fleet.block_size_of,
            hits_of=self.fleet.hits_of,
        )

    def _sync(self) -> None:
        """Make the targets those of the configuration and the discoveries."""
        static = self.config.targets
        self.service.static_targets = len(static)
        self.service.target_problems = self.fleet.follow(
            [*static, *self.service.discovery.targets(self.config.limits.targets)]
        )

    def _watch_kv_events(self, target: Target) -> None:
        watcher = KvEventWatcher(target.name, target.config.kv_events, target.config.kv_replay, self.prefixes.table)
        watcher.start()
        target.kv_events = watcher
        self._watchers[target.name] = watcher

    def _ended(self, target: Target) -> None:
        self._tiers.forget(target.name)
        if watcher := self._watchers.pop(target.name, None):
            ending = asyncio.create_task(watcher.stop())
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)


def _keep_connection_seconds(config: ExporterConfig) -> float:
    """A connection has to outlive the pause between two scrapes."""
    return 2 * config.interval_seconds


def _log_state(target: Target, was_up: bool) -> None:
    details = {"target": target.name, "url": shown_url(target.config.url)}
    if target.up:
        _log.info("target is up", extra=details | {"system": target.system.system if target.system else ""})
    else:
        level = logging.WARNING if was_up or target.health.scrapes == 1 else logging.INFO
        _log.log(level, "scrape failed", extra=details | {"reason": target.reason, "detail": target.detail})
