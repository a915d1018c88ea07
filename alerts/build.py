"""SLO documents and the catalogue → rule files: read → model → rules, each step its own module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from alerts.burn_rate import burn_rates
from alerts.catalogue import Catalogue, load_catalogue
from alerts.errors import RuleError
from alerts.labels import Labels
from alerts.rule import AlertingRule, RecordingRule, Rule, RuleFile, RuleGroup, hastened, text
from alerts.settings import RuleSettings
from alerts.slo_alerts import SloAlerts, judging_rate
from alerts.slo_records import SloRecords
from exporters.families import FAMILIES
from slo.definition import SloDefinition
from slo.definitions import load_slos
from slo.indicators import KnownMetrics
from slo.library import shipped_names
from slo.window import promql

RULES = Path(__file__).parent / "rules"
INTERVAL = "1m"
LONG_INTERVAL = "2m"
"""Under Prometheus' 5 minutes of staleness, or alerts on what is recorded would flicker."""
SHORTEST_PERIOD_SECONDS = 86_400


def known_metrics() -> KnownMetrics:
    """Every name that the exporter's families have in PromQL, with their labels."""
    known: dict[str, Sequence[str]] = {}
    for family in FAMILIES.values():
        known[family.full_name] = family.labels
        if family.kind == "histogram":
            for suffix in ("_bucket", "_count", "_sum"):
                known[family.full_name + suffix] = family.labels
    return known


def build(names_or_paths: Sequence[str | Path] = (), settings: RuleSettings | None = None) -> list[RuleFile]:
    """All rule files: one for each group of the catalogue, one for each SLO of the documents (default: the shipped).

    Raises DocumentError and RuleError.
    """
    settings = settings or RuleSettings()
    slos = load_slos(names_or_paths or shipped_names(), known_metrics())
    _refuse_shared_files(slos)
    catalogue = load_catalogue(settings.thresholds, job=settings.job)
    files = [*catalogue_files(catalogue, settings), *(slo_file(slo, catalogue, settings) for slo in slos)]
    if settings.hasten == 1:
        return files
    return [replace(file, groups=tuple(hastened(file.groups, settings.hasten))) for file in files]


def _refuse_shared_files(slos: Sequence[SloDefinition]) -> None:
    """Objectives of one SLO are numbered: `chat/0` has the file of an SLO named `chat-0`."""
    seen: dict[str, SloDefinition] = {}
    for slo in slos:
        first = seen.setdefault(_stem(slo), slo)
        if first is not slo:
            raise RuleError(f"{slo.place}: {slo.name} would have the file of {first.name} ({first.place}): rename one")


def _stem(slo: SloDefinition) -> str:
    return "slo-" + slo.name.replace("/", "-")


def catalogue_files(catalogue: Catalogue, settings: RuleSettings) -> list[RuleFile]:
    """A file a group: what it records, then what it alerts on."""
    labels = Labels(settings)
    files = []
    for group in catalogue.groups:
        records: list[Rule] = [
            RecordingRule(record.name, record.expr, {}) for record in catalogue.records if record.group == group.group
        ]
        alerts: list[Rule] = [
            AlertingRule(alert.name, alert.expr, alert.hold, labels.of(alert), labels.annotations(alert))
            for alert in catalogue.alerts
            if alert.group == group.group and alert.expr is not None
        ]
        groups = [
            RuleGroup(f"prefixwatch-{group.group}-{kind}", INTERVAL, tuple(rules))
            for kind, rules in (("records", records), ("alerts", alerts))
            if rules
        ]
        if groups:
            files.append(RuleFile(group.group, tuple(groups)))
    return files


def slo_file(slo: SloDefinition, catalogue: Catalogue, settings: RuleSettings) -> RuleFile:
    """The rules of one SLO."""
    if slo.window_seconds < SHORTEST_PERIOD_SECONDS:
        raise RuleError(
            f"{slo.place}: a window of {promql(slo.window_seconds)} is too short to alert on: use 1d or more, "
            "or grade it on a load test only"
        )
    if slo.slices and slo.slices.seconds < settings.scrape_interval_seconds * 4:
        raise RuleError(
            f"{slo.place}: slices of {promql(slo.slices.seconds)} hold fewer than 4 scrapes of "
            f"{settings.scrape_interval_seconds:g} s: use {promql(settings.scrape_interval_seconds * 4)} or more"
        )
    rates = burn_rates(slo)
    records = SloRecords(slo)
    alerts = SloAlerts(records, rates, catalogue, settings)
    stem = _stem(slo)
    groups = (
        RuleGroup(f"prefixwatch-{stem}-records", INTERVAL, tuple(records.short(rates))),
        RuleGroup(
            f"prefixwatch-{stem}-budget",
            LONG_INTERVAL,
            tuple(records.long(rates, judging_rate(rates).long_seconds)),
        ),
        RuleGroup(f"prefixwatch-{stem}-alerts", INTERVAL, tuple(alerts.rules())),
    )
    title = f"{slo.title}: {slo.rule}, over {promql(slo.window_seconds)}"
    return RuleFile(stem, groups, (title, *slo_notes(slo)))


def slo_notes(slo: SloDefinition) -> list[str]:
    """What is read otherwise than it is written, and what was changed of the workbook's burn rates."""
    if slo.zero_tolerance:
        return list(slo.notes)
    return [*slo.notes, *(line for rate in burn_rates(slo) if rate.note for line in rate.note.splitlines())]


def notes(files: Sequence[RuleFile]) -> list[str]:
    """What was changed of the workbook's burn rates, for who builds."""
    return [note for file in files for note in file.notes[1:]]


def rendered(files: Sequence[RuleFile]) -> dict[str, str]:
    """File names and their YAML."""
    return {f"{file.name}.yaml": text(file) for file in files}
