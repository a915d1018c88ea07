"""SLO documents and the catalogue → rule files: read → model → rules, each step its own module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

from prefixwatch.alerts.burn_rate import burn_rates
from prefixwatch.alerts.catalogue.model import Alert, Catalogue
from prefixwatch.alerts.engines.figures import figure_records
from prefixwatch.alerts.engines.flags import flag_records
from prefixwatch.alerts.engines.records import OBJECTIVES, engine_records, worker_records
from prefixwatch.alerts.replicas import deduplicated
from prefixwatch.alerts.rule import AlertingRule, RecordingRule, Rule, RuleFile, RuleGroup, text
from prefixwatch.alerts.settings import RuleSettings
from prefixwatch.alerts.slo_alerts import SloAlerts, judging_rate
from prefixwatch.alerts.slo_records import SloRecords
from prefixwatch.alerts.speedup import sped_up
from prefixwatch.documents.durations import promql
from prefixwatch.documents.errors import InputError
from prefixwatch.exporters.metrics_page.families import FAMILIES
from prefixwatch.slo.build import load_slos
from prefixwatch.slo.indicators import KnownMetrics
from prefixwatch.slo.promql import metric_names
from prefixwatch.slo.read import shipped_names
from prefixwatch.slo.rule_model import SloDefinition

RULES = Path(__file__).parent / "rules"
INTERVAL = "1m"
LONG_INTERVAL = "2m"
"""Under Prometheus' 5 minutes of staleness, or alerts on what is recorded would flicker."""
MOST_RULES = 18
"""Of the histograms in a group: whole ones of three rules, within the 20 that Mimir allows."""
SHORTEST_PERIOD_SECONDS = 86_400
_TAKE_AWAY = frozenset({"prefixwatch_scrape_failures_total", "prefixwatch_probe_tokens_total"})
WIDESPREAD = 0.1
"""A cause explains what a whole fleet shows only from this share of its workers on."""
PROMETHEUS_OWN: Mapping[str, tuple[str, ...]] = {
    "up": ("job", "instance"),
    "scrape_duration_seconds": ("job", "instance"),
    "process_resident_memory_bytes": ("job", "instance"),
    "ALERTS": ("alertname", "alertstate", "severity"),
}
"""Series of Prometheus itself that rules and panels may read, with their labels."""


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

    Raises InputError.
    """
    settings = settings or RuleSettings()
    from_engines = settings.source == "engines"
    slos = load_slos(names_or_paths or (OBJECTIVES if from_engines else shipped_names()), known_metrics())
    _refuse_shared_files(slos)
    catalogue = settings.catalogue()
    files = [*catalogue_files(catalogue, settings), *(slo_file(slo, catalogue, settings) for slo in slos)]
    if from_engines:
        files = _on_engines(files, settings, slos)
    if settings.speedup == 1:
        return files
    return [replace(file, groups=tuple(sped_up(file.groups, settings.speedup))) for file in files]


def engine_series() -> frozenset[str]:
    """Names that exist where Prometheus scrapes the engines itself and has the rules `--from engines`."""
    rules = (r for file in build(settings=RuleSettings(source="engines")) for g in file.groups for r in g.rules)
    return frozenset(rule.name for rule in rules if isinstance(rule, RecordingRule)) | PROMETHEUS_OWN.keys()


def _on_engines(files: Sequence[RuleFile], settings: RuleSettings, slos: Sequence[SloDefinition]) -> list[RuleFile]:
    """The engines' metrics under the exporter's names, and every rule that reads nothing else."""
    records = engine_records(settings.fleet)
    figures = [*worker_records(settings.fleet), *flag_records(settings.fleet), *figure_records(settings.fleet, slos)]
    known = {rule.name for rule in (*records, *figures)} | (PROMETHEUS_OWN.keys() - {"scrape_duration_seconds"})
    exporter = f'job="{settings.job}"'
    histograms = tuple(rule for rule in records if rule.name.endswith(("_bucket", "_count", "_sum")))
    others = tuple(rule for rule in records if rule not in histograms)
    groups = [RuleGroup("prefixwatch-engines-records", INTERVAL, others)]
    for first in range(0, len(histograms), MOST_RULES):
        rules = histograms[first : first + MOST_RULES]
        groups.append(RuleGroup(f"prefixwatch-engines-histograms-{first // MOST_RULES}", INTERVAL, rules))
    groups.append(RuleGroup("prefixwatch-engines-figures", INTERVAL, tuple(figures)))
    kept = [RuleFile("engines", tuple(groups))]
    recording = [r for file in files for g in file.groups for r in g.rules if isinstance(r, RecordingRule)]
    while more := {rule.name for rule in recording if _reads_only(rule, known)} - known:
        known |= more
    for file in files:
        fit = [
            replace(group, rules=tuple(r for r in group.rules if _reads_only(r, known) and exporter not in r.expr))
            for group in file.groups
        ]
        if any(group.rules for group in fit):
            kept.append(replace(file, groups=tuple(group for group in fit if group.rules)))
    return kept


def _reads_only(rule: Rule, known: Set[str]) -> bool:
    """A native histogram's name need not exist beside its classic series, nor what only takes something away."""
    names = set(metric_names(rule.expr)) - _TAKE_AWAY
    return bool(names or rule.expr == "vector(1)") and all(n in known or f"{n}_bucket" in known for n in names)


def _refuse_shared_files(slos: Sequence[SloDefinition]) -> None:
    """Objectives of one SLO are numbered: `chat/0` has the file of an SLO named `chat-0`."""
    seen: dict[str, SloDefinition] = {}
    for slo in slos:
        first = seen.setdefault(_stem(slo), slo)
        if first is not slo:
            raise InputError(f"{slo.place}: {slo.name} would have the file of {first.name} ({first.place}): rename one")


def _stem(slo: SloDefinition) -> str:
    return "slo-" + slo.name.replace("/", "-")


def catalogue_files(catalogue: Catalogue, settings: RuleSettings) -> list[RuleFile]:
    """One file per group: what it records, then what it alerts on."""
    files = []
    for group in catalogue.groups:
        records: list[Rule] = [
            RecordingRule(record.name, deduplicated(record.expr, settings.replica_labels), {})
            for record in catalogue.records
            if record.group == group.group
        ]
        alerts: list[Rule] = [
            rule
            for alert in catalogue.alerts
            if alert.group == group.group
            for rule in _alerting_rules(alert, catalogue, settings)
        ]
        groups = [
            RuleGroup(f"prefixwatch-{group.group}-{kind}", INTERVAL, tuple(rules))
            for kind, rules in (("records", records), ("alerts", alerts))
            if rules
        ]
        if groups:
            files.append(RuleFile(group.group, tuple(groups)))
    return files


def _alerting_rules(alert: Alert, catalogue: Catalogue, settings: RuleSettings) -> Iterable[AlertingRule]:
    """The alert, and one on the fleet for a cause that single workers have and whole fleets show symptoms of."""
    if alert.expr is None:
        return
    labels, annotations = settings.labels_of(alert), settings.annotations(alert)
    own = deduplicated(alert.expr, settings.replica_labels)
    yield AlertingRule(alert.name, own, alert.hold, labels, annotations, settings.keep(alert))
    if catalogue.is_widespread(alert):
        scope = ", ".join((*settings.fleet, "model") if alert.by_model else settings.fleet)
        workers = "prefixwatch:workers:count" if alert.by_model else f"sum by ({scope}) (prefixwatch:workers:count)"
        expr = f"count by ({scope}) (\n{own}\n)\n/ on ({scope}) ({workers} > 0)\n>= {WIDESPREAD:g}"
        share = "{{ $value | humanizePercentage }} of the workers"
        texts = {
            "summary": f"{share}: {alert.name}",
            "description": f"{alert.name} holds for {share}; from {WIDESPREAD:.0%} it explains the fleet's symptoms.",
            "dashboard": annotations["dashboard"].partition("?")[0],
        }
        yield AlertingRule(
            alert.name, expr, alert.hold, {**labels, "scope": "fleet"}, {**annotations, **texts}, settings.keep(alert)
        )


def slo_file(slo: SloDefinition, catalogue: Catalogue, settings: RuleSettings) -> RuleFile:
    """The rules of one SLO."""
    if slo.window_seconds < SHORTEST_PERIOD_SECONDS:
        raise InputError(
            f"{slo.place}: a window of {promql(slo.window_seconds)} is too short to alert on: use 1d or more, "
            "or grade it on a load test only"
        )
    if settings.retention_seconds is not None and slo.window_seconds > settings.retention_seconds:
        raise InputError(
            f"{slo.place}: a window of {promql(slo.window_seconds)} is longer than Prometheus keeps samples "
            f"({promql(settings.retention_seconds)}): raise --storage.tsdb.retention.time, or shorten the window"
        )
    if slo.slices and slo.slices.seconds < settings.scrape_interval_seconds * 4:
        raise InputError(
            f"{slo.place}: slices of {promql(slo.slices.seconds)} hold fewer than 4 scrapes of "
            f"{settings.scrape_interval_seconds:g} s: use {promql(settings.scrape_interval_seconds * 4)} or more"
        )
    rates = burn_rates(slo)
    records = SloRecords(slo, settings)
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
    """What was changed of the workbook's burn rates, for the person who builds."""
    return [note for file in files for note in file.notes[1:]]


def rendered(files: Sequence[RuleFile]) -> dict[str, str]:
    """File names and their YAML."""
    return {f"{file.name}.yaml": text(file) for file in files}
