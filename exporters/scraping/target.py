"""One target: what it is, how its scrapes went, and its numbers while they are fresh."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from prefixwatch.exporters.caches.kv_events import KvEventSource
from prefixwatch.exporters.catalogue.model import Catalogue, System
from prefixwatch.exporters.catalogue.renames import Renames, detected, follow
from prefixwatch.exporters.catalogue.review import PageReview, review
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.fleet.retired_targets import RetiredTargets
from prefixwatch.exporters.metrics_page.families import IDENTITY
from prefixwatch.exporters.scraping.derive import TargetNumbers, derive_target, loads
from prefixwatch.exporters.scraping.exposition import ExpositionReader, line_breaks, metric_names
from prefixwatch.exporters.scraping.quality import engines_seen, ranks_seen
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.signals import SignalStore
from prefixwatch.exporters.scraping.times import time_contradictions
from prefixwatch.exporters.scraping.window import LoadWindow


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


_CONTENT_TYPES = ("text/plain", "application/openmetrics-text")
_log = logging.getLogger("prefixwatch.exporter")


class Target:
    """State of one target. Clock values come from outside; nothing here does I/O.

    `retired` is given the signals of a system that is no longer what runs at the target's address, and gives them back
    if it is again.
    """

    def __init__(
        self,
        config: TargetConfig,
        settings: ExporterConfig,
        catalogue: Catalogue,
        retired: RetiredTargets | None = None,
    ) -> None:
        self.config = config
        self.settings = settings
        self.health = ScrapeHealth()
        self.reason = "not_scraped"
        """Why there are no fresh numbers; empty when there are."""
        self.detail = "no scrape has ended yet"
        self.version = ""
        self.gone = False
        """It isn't a target any more, though a scrape of it may be under way."""
        self.kv_events: KvEventSource | None = None
        self.record_flags: dict[str, bool] = {}
        """What its request records make doubtful; empty for targets without."""
        self.witnesses: dict[str, str] = {}
        """Flags from holding its figures against request records: both values where they differ, otherwise empty."""
        self.loads = LoadWindow(settings.window_seconds)
        self._shown: Mapping[str, str] = {}
        """What its page named last of model and role; kept while it is down."""
        self._place = {name: getattr(config, name) or config.labels.get(name, "") for name in IDENTITY}
        """What is configured of its identity, or known by discovery."""
        self._catalogue = catalogue
        self._retired = retired
        self._forced = catalogue.get(config.system) if config.system else None
        self._size = 0, 0
        """Lines and samples of the last text that was looked at for what it is."""
        self.review = PageReview()
        self.renames = Renames()
        """What its page calls families of the catalogue."""
        self.vanished: tuple[str, ...] = ()
        """Families that were read from an earlier page and were missing from a later one."""
        self._vanished_at_seconds = -math.inf
        self._read: frozenset[str] = frozenset()
        self._silent: tuple[str, ...] = ()
        """Layers that are configured and have no family on the page."""
        self._content_type = ""
        self._reader: ExpositionReader | None = None
        self._store: SignalStore | None = None
        self._numbers: TargetNumbers | None = None

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def identity(self) -> Mapping[str, str]:
        """What it is: `model`, `role`, `pool`, `namespace` and `cluster`, as far as they are known.

        The configuration says most about pool, namespace and cluster, and its page about the model.
        """
        return self.identity_of(None)

    def identity_of(self, engine: str | None) -> Mapping[str, str]:
        """The same of one engine on its page."""
        shown = self._shown if engine is None or self._store is None else self._store.identity_of(engine)
        known = {**self._place, **shown, **({"role": self.config.role} if self.config.role else {})}
        return {name: value for name, value in known.items() if value}

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
            try:
                self._numbers = derive_target(self._store)
            except Exception as error:  # a mistake about one target must not take the page of all others with it
                _log.exception("numbers of a target could not be derived", extra={"target": self.name})
                self.fail("internal", f"{type(error).__name__}; the exporter's log has the details")
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
            unusable = self._store.unusable if self._store else 0
            flags["malformed_lines"] = self.health.malformed_lines + unusable > 0
            flags["duplicate_series"] = self.health.duplicate_lines > 0
            flags["type_mismatch"] = bool(self.review.mistyped)
            flags["family_twice"] = bool(self.review.twice)
            flags["schema_changed"] = now_seconds - self._vanished_at_seconds < self.settings.window_seconds
            flags["renamed_family"] = bool(self.renames.not_followed)
            flags["unmapped_label"] = self._store is not None and bool(self._store.unmapped)
            if self._content_type:
                flags["wrong_content_type"] = not self._content_type.startswith(_CONTENT_TYPES)
            if self.config.layers:
                flags["layer_silent"] = bool(self._silent)
            flags["several_processes"] = self._store is not None and self._store.several_processes
            flags["several_engines"] = self._store is not None and self._store.several_engines
            flags["labels_overflowed"] = self._store is not None and bool(self._store.overflowed)
            if self.config.ranks and self._store:
                flags["ranks_missing"] = ranks_seen(self._store) < self.config.ranks
            flags |= {flag: bool(reason) for flag, reason in self._held_against_others().items()}
        if self.kv_events:
            counts = self.kv_events.counts()
            flags["kv_events_unknown"] = counts is None
            if counts:
                unheard = counts.flags["ranks_missing"] or engines_seen(self._store) > len(self.config.kv_events)
                flags |= {**counts.flags, "ranks_missing": unheard or flags.get("ranks_missing", False)}
        return flags

    def contradictions(self) -> dict[str, str]:
        """The reason of each flag that is raised and has one; both values where it holds two sources against each
        other."""
        found = dict(self.numbers.contradictions) if self.numbers else {}
        found |= {flag: reason for flag, reason in self._held_against_others().items() if reason}
        store = self._store
        unmapped = sorted(f"{signal}: {value}" for signal, value in store.unmapped) if store else []
        details = {
            "type_mismatch": self.review.mistyped,
            "family_twice": self.review.twice,
            "renamed_family": self.renames.not_followed,
            "unmapped_label": unmapped,
            "layer_silent": self._silent,
        }
        return found | {flag: "; ".join(every[:10]) for flag, every in details.items() if every}

    def _held_against_others(self) -> dict[str, str]:
        """Flags for sources that are held against each other: both values where they differ, empty where they agree."""
        found = dict(self.witnesses)
        if self._store is not None:
            found |= time_contradictions(self._store, self.loads)
        declared, shown = self._place, self._shown
        named = [name for name in ("model", "role") if declared[name] and shown.get(name)]
        if named:
            found["identity_disagrees"] = "; ".join(
                f"{name}: {declared[name]} is configured, {shown[name]} is on its page"
                for name in named
                if declared[name] != shown[name]
            )
        return found

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
        names = self._names_of(scrape.body, (reading.line_breaks, len(reading.values))) if reading is not None else None
        if reading is None or not len(reading.values) or not self._is_still(names):
            names = metric_names(scrape.body)
            if not self._recognise(names):
                return
            assert self._reader is not None
            reading = self._reader.read(scrape.body)
            self._size = reading.line_breaks, len(reading.values)
        assert self._store is not None
        if len(reading.values) > self.settings.limits.samples:
            self.fail("too_many_samples", f"more than limits.samples, {self.settings.limits.samples}")
            return
        resets = self._store.resets
        self._store.apply(reading, now_seconds)
        self._shown = self._store.identity
        if names is not None:
            self._review(scrape.body, names, now_seconds, restarted=self._store.resets > resets)
        self._content_type = scrape.content_type
        self._numbers = None
        self.loads.add(now_seconds, loads(self._store))
        self.reason = self.detail = ""
        self.health.samples = len(reading.values)
        self.health.malformed_lines = reading.malformed_lines
        self.health.duplicate_lines = reading.duplicate_lines
        self.health.succeeded_at_seconds = now_seconds

    def configure(self, settings: ExporterConfig) -> None:
        """Use these settings from now on. Other limits of labels or samples start the target's numbers again, because
        series that were merged under `other` can't be told apart afterwards."""
        before, self.settings = self.settings, settings
        named = ("label_values", "label_value_bytes", "samples")
        if any(getattr(before.limits, name) != getattr(settings.limits, name) for name in named):
            self._reader = self._store = self._numbers = None
            self.loads.clear()

    def end(self) -> None:
        """What runs at the address now, if anything, is not what ran there before."""
        if self._store is not None and self._retired is not None:
            self._retired.take(self._store, self.config.url)
        self._store = self._numbers = None
        self._shown = {}

    def _names_of(self, body: bytes, size: tuple[int, int]) -> frozenset[str] | None:
        """The names on a page, if its number of lines or of samples has changed; otherwise they are those it had."""
        if size == self._size:
            return None
        self._size = size
        return metric_names(body)

    def _is_still(self, names: frozenset[str] | None) -> bool:
        """Whether the text still is of the system that it was: names that show up with traffic may tell better."""
        if names is None or self._store is None:
            return True
        system = self._store.catalogued
        followed = follow(system, names)
        if followed.renames.families != self.renames.families:
            return False
        self.renames, self.version = followed.renames, system.version(followed.names)
        return self._forced is not None or system.matches(followed.names)

    def _review(self, body: bytes, names: frozenset[str], now_seconds: float, *, restarted: bool) -> None:
        """Look at what the page has beside what is read of it, and at what was on the one before."""
        assert self._store is not None
        system = self._store.system
        self.review = review(system, body, names)
        self._silent = tuple(
            layer
            for layer in self.config.layers
            if not any(name.startswith((f"{layer}:", f"{layer}_")) for name in names)
        )
        read = names & system.wanted_names()
        gone = {
            name for name in self._read - read if f"# TYPE {name} ".encode() not in body
        }  # declared: has no series now
        if gone and not restarted:
            self.vanished, self._vanished_at_seconds = tuple(sorted(gone)), now_seconds
        self._read = read

    def _recognise(self, names: frozenset[str]) -> bool:
        """Find out what this target is, now that its text isn't (or isn't any more) what was known."""
        known = map(self._catalogue.get, self._catalogue.names)
        system = self._forced or self._catalogue.detect(names) or detected(known, names)
        if system is None:
            what = "an empty text" if not names else f"none of the known systems ({', '.join(self._catalogue.names)})"
            self.fail("unknown_system", f"it exposes {what}; name the system if detection is wrong")
            return False
        limits, followed = self.settings.limits, follow(system, names)
        if self._store is None or self._store.catalogued is not system:
            self.end()
            self._read = frozenset()
            before = self._retired.back(self.config.url, system) if self._retired else None
            self._store = before or SignalStore(system, self.settings.window_seconds, limits.label_values, self._place)
            self._store.place = self._place
            self.loads.clear()
            self._reader = None
        if self._reader is None or followed.renames.families != self.renames.families:
            self._store.follow(followed.system)
            wanted = followed.system.wanted_names()
            self._reader = ExpositionReader(wanted, limits.samples, limits.label_value_bytes)
        self.renames, self.version = followed.renames, system.version(followed.names)
        return True

    def fail(self, reason: str, detail: str) -> None:
        """There are no fresh numbers, for this reason."""
        self.reason, self.detail = reason, detail
        self.health.failures[reason] += 1
        self.loads.clear()
