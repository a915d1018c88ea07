"""One target: what it is, how its scrapes went, and its numbers while they are fresh."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from exporters.caches.kv_events import KvEventSource
from exporters.catalogue import Catalogue, System
from exporters.config import ExporterConfig, TargetConfig
from exporters.departed import Departed
from exporters.scraping.derive import TargetNumbers, derive_target, loads
from exporters.scraping.exposition import ExpositionReader, line_breaks, metric_names
from exporters.scraping.quality import ranks_seen
from exporters.scraping.scrape import Scrape
from exporters.scraping.signals import SignalStore
from exporters.scraping.window import LoadWindow


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
    """State of one target. Clock values come from outside; nothing here does I/O.

    `departed` is given the signals of a system that is no longer what runs at the target's address, and gives them back
    if it is again.
    """

    def __init__(
        self,
        config: TargetConfig,
        settings: ExporterConfig,
        catalogue: Catalogue,
        departed: Departed | None = None,
    ) -> None:
        self.config = config
        self.settings = settings
        self.health = ScrapeHealth()
        self.reason = "not_scraped"
        """Why there are no fresh numbers; empty when there are."""
        self.detail = "no scrape has ended yet"
        self.version = ""
        self.gone = False
        """It is no target any more, though a scrape of it may be under way."""
        self.kv_events: KvEventSource | None = None
        self.record_flags: dict[str, bool] = {}
        """What its request records make doubtful; empty for targets without."""
        self.loads = LoadWindow(settings.window_seconds)
        self._catalogue = catalogue
        self._departed = departed
        self._forced = catalogue.get(config.system) if config.system else None
        self._lines = 0
        """Of the last text that was looked at for what it is."""
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
        """Derived from the last scrape; None when that one failed, for old numbers aren't current ones.

        Worked out when first asked for: scrapes are more frequent than readers.
        """
        if not self.up or self._store is None:
            return None
        if self._numbers is None:
            self._numbers = derive_target(self._store)
        return self._numbers

    def stale(self, now_seconds: float) -> bool:
        """No success for three intervals."""
        at = self.health.succeeded_at_seconds
        return at is None or now_seconds - at > 3 * self.settings.interval_seconds

    def flags(self, now_seconds: float) -> dict[str, bool]:
        """Why its numbers may mislead: from the numbers, the scrapes and the KV events."""
        flags = {"stale": self.stale(now_seconds), **self.record_flags}
        if self.config.url.startswith("https://"):
            flags["tls_unverified"] = self.config.tls_unverified
        if self.numbers:
            flags |= self.numbers.flags
            flags["malformed_lines"] = self.health.malformed_lines > 0
            flags["duplicate_series"] = self.health.duplicate_lines > 0
            if self.config.ranks and self._store:
                flags["ranks_missing"] = ranks_seen(self._store) < self.config.ranks
        if self.kv_events:
            counts = self.kv_events.counts()
            flags["kv_events_unknown"] = counts is None
            if counts:
                flags |= counts.flags
        return flags

    def ingest(self, scrape: Scrape, now_seconds: float) -> None:
        """Take the outcome of a scrape that ended at `now_seconds` on a monotonic clock."""
        self.health.scrapes += 1
        self.health.last_seconds = scrape.seconds
        if scrape.body is None:
            self.fail(scrape.reason, scrape.detail)
            return
        self.health.body_bytes = len(scrape.body)
        most_lines = self.settings.limits.lines
        if len(scrape.body) > most_lines and line_breaks(scrape.body) > most_lines:
            self.fail("too_many_lines", f"more than limits.lines, {most_lines}")
            return
        reading = self._reader.read(scrape.body) if self._reader else None
        if reading is None or not len(reading.values) or not self._is_still(scrape.body, reading.line_breaks):
            if not self._recognise(scrape.body):
                return
            assert self._reader is not None
            reading = self._reader.read(scrape.body)
        assert self._store is not None
        if len(reading.values) > self.settings.limits.samples:
            self.fail("too_many_samples", f"more than limits.samples, {self.settings.limits.samples}")
            return
        self._store.apply(reading, now_seconds)
        self._numbers = None
        self.loads.add(now_seconds, loads(self._store))
        self.reason = self.detail = ""
        self.health.samples = len(reading.values)
        self.health.malformed_lines = reading.malformed_lines
        self.health.duplicate_lines = reading.duplicate_lines
        self.health.succeeded_at_seconds = now_seconds

    def end(self) -> None:
        """What runs at the address now, if anything, is not what ran there before."""
        if self._store is not None and self._departed is not None:
            self._departed.take(self._store, self.config.url)
        self._store = self._numbers = None

    def _is_still(self, body: bytes, lines: int) -> bool:
        """Whether the text still is of the system that it was: names that show up with traffic may tell better."""
        if lines == self._lines or self._forced or self._store is None:
            return True
        self._lines = lines
        names = metric_names(body)
        self.version = self._store.system.version(names)
        return self._store.system.matches(names)

    def _recognise(self, body: bytes) -> bool:
        """Find out what this target is, now that its text isn't (or isn't any more) what was known."""
        names = metric_names(body)
        system = self._forced or self._catalogue.detect(names)
        if system is None:
            what = "an empty text" if not names else f"none of the known systems ({', '.join(self._catalogue.names)})"
            self.fail("unknown_system", f"it exposes {what}; name the system if detection is wrong")
            return False
        if self._store is None or self._store.system is not system:
            self.end()
            limits = self.settings.limits
            self._reader = ExpositionReader(system.wanted_names(), limits.samples, limits.label_value_bytes)
            before = self._departed.back(self.config.url, system) if self._departed else None
            self._store = before or SignalStore(
                system, self.settings.window_seconds, limits.label_values, self.config.model or ""
            )
            self.loads.clear()
        self.version = system.version(names)
        return True

    def fail(self, reason: str, detail: str) -> None:
        """There are no fresh numbers, for this reason."""
        self.reason, self.detail = reason, detail
        self.health.failures[reason] += 1
        self.loads.clear()
