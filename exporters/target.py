"""One target: what it is, how its scrapes went, and its numbers while they are fresh."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from exporters.catalogue import Catalogue, System
from exporters.config import ExporterConfig, TargetConfig
from exporters.derive import TargetNumbers, derive_target
from exporters.exposition import ExpositionReader, metric_names
from exporters.kv_events import KvEventSource
from exporters.scrape import Scrape
from exporters.signals import SignalStore
from exporters.window import LoadWindow


@dataclass(slots=True)
class ScrapeHealth:
    """How the scrapes of a target went, since the exporter started."""

    scrapes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    last_seconds: float | None = None
    body_bytes: int | None = None
    samples: int | None = None
    malformed_lines: int = 0
    duplicate_lines: int = 0
    succeeded_at_seconds: float | None = None
    """On the exporter's monotonic clock."""


class Target:
    """State of one target. Clock values come from outside; nothing here does I/O."""

    def __init__(self, config: TargetConfig, settings: ExporterConfig, catalogue: Catalogue) -> None:
        self.config = config
        self.health = ScrapeHealth()
        self.reason = "not_scraped"
        """Why there are no fresh numbers; empty when there are."""
        self.detail = "no scrape has ended yet"
        self.version = ""
        self.kv_events: KvEventSource | None = None
        self.loads = LoadWindow(settings.window_seconds)
        self._settings = settings
        self._catalogue = catalogue
        self._forced = catalogue.get(config.system) if config.system else None
        self._reader: ExpositionReader | None = None
        self._store: SignalStore | None = None
        self._numbers: TargetNumbers | None = None

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def up(self) -> bool:
        """The last scrape brought metrics of a known system."""
        return not self.reason

    @property
    def system(self) -> System | None:
        return self._store.system if self._store else self._forced

    @property
    def store(self) -> SignalStore | None:
        """All signals over time: also of a target that is down, for sums that must not go backwards."""
        return self._store

    @property
    def numbers(self) -> TargetNumbers | None:
        """Derived from the last scrape; None when that one failed, for old numbers aren't current ones."""
        return self._numbers if self.up else None

    def stale(self, now_seconds: float) -> bool:
        """No success for three intervals."""
        at = self.health.succeeded_at_seconds
        return at is None or now_seconds - at > 3 * self._settings.interval_seconds

    def flags(self, now_seconds: float) -> dict[str, bool]:
        """Why its numbers may mislead: from the numbers, the scrapes and the KV events."""
        flags = {"stale": self.stale(now_seconds)}
        if self.numbers:
            flags |= self.numbers.flags
            flags["malformed_lines"] = self.health.malformed_lines > 0
            flags["duplicate_series"] = self.health.duplicate_lines > 0
        if self.kv_events:
            counts = self.kv_events.counts()
            flags["kv_events_unknown"] = counts is None
            if counts:
                flags["kv_events_missed"] = counts.missed_batches > 0
        return flags

    def ingest(self, scrape: Scrape, now_seconds: float) -> None:
        """Take the outcome of a scrape that ended at `now_seconds` on a monotonic clock."""
        self.health.scrapes += 1
        self.health.last_seconds = scrape.seconds
        if scrape.body is None:
            self._fail(scrape.reason, scrape.detail)
            return
        self.health.body_bytes = len(scrape.body)
        reading = self._reader.read(scrape.body) if self._reader else None
        if reading is None or not len(reading.values):
            if not self._recognise(scrape.body):
                return
            assert self._reader is not None
            reading = self._reader.read(scrape.body)
        assert self._store is not None
        if len(reading.values) > self._settings.limits.samples:
            self._fail("too_many_samples", f"{len(reading.values)}, the limit is {self._settings.limits.samples}")
            return
        self._store.apply(reading, now_seconds)
        self._numbers = derive_target(self._store)
        self.loads.add(now_seconds, self._numbers.loads)
        self.reason = self.detail = ""
        self.health.samples = len(reading.values)
        self.health.malformed_lines = reading.malformed_lines
        self.health.duplicate_lines = reading.duplicate_lines
        self.health.succeeded_at_seconds = now_seconds

    def _recognise(self, body: bytes) -> bool:
        """Find out what this target is, now that its text isn't (or isn't any more) what was known."""
        names = metric_names(body)
        system = self._forced or self._catalogue.detect(names)
        if system is None:
            what = "an empty text" if not names else f"none of the known systems ({', '.join(self._catalogue.names)})"
            self._fail("unknown_system", f"it exposes {what}; name the system if detection is wrong")
            return False
        if self._store is None or self._store.system is not system:
            self._reader = ExpositionReader(system.wanted_names())
            self._store = SignalStore(system, self._settings.window_seconds, self._settings.limits.label_values)
            self.loads.clear()
        self.version = system.version(names)
        return True

    def _fail(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        self.health.failures[reason] += 1
        self.loads.clear()
