"""Settings of a rule build: the Prometheus, the exporter and the pages that the rules refer to, and what follows for
every alert's labels and annotations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prefixwatch.alerts.catalogue.model import FLEET_LABELS, Alert, Catalogue, load_catalogue
from prefixwatch.documents.errors import InputError

SCRAPES_A_RANGE = 4
"""A range holds at least this many scrape intervals: two lost scrapes still leave a rate (SL07)."""
SHORTEST_RANGE_SECONDS = 300
DASHBOARD_VARIABLES = {"target": "worker", "worker": "worker", "tenant": "tenant", "model": "model"}
"""Labels of alerts → the dashboard variables that they set."""
EXPORTER_URL = "http://prefixwatch:9477"
"""Where the shipped rules expect the exporter, which serves the runbooks: its Service in the shipped manifests."""
GRAFANA_URL = "http://grafana:3000"
DIALECTS = ("prometheus", "victoriametrics")
SOURCES = ("exporter", "engines")
_LABEL = re.compile(r"\$labels\.(\w+)")
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class RuleSettings:
    """The defaults suit an exporter that is scraped every 15 s; up to 75 s will do."""

    scrape_interval_seconds: float = 15.0
    job: str = "prefixwatch"
    """The exporter's job label in Prometheus."""
    runbook_base: str = f"{EXPORTER_URL}/runbooks"
    """Runbooks are at `<base>/<AlertName>`: an absolute address, as a pager knows no other."""
    dashboard_base: str = f"{GRAFANA_URL}/d"
    """Dashboards are at `<base>/<uid>`; absolute, too."""
    by: tuple[str, ...] = FLEET_LABELS
    """Labels that split each SLO's budget and alerts. All but `model` also separate fleets in the other rules."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that every alert gets, such as its team."""
    severities: Mapping[str, str] = field(default_factory=dict)
    """Other names for the severities `page` and `ticket`."""
    replica_labels: tuple[str, ...] = ()
    """Labels in which the exporters of an HA pair differ; of such series the largest counts, not their sum."""
    dialect: str = "prometheus"
    source: str = "exporter"
    """Who measures: the exporter, or the engines themselves, scraped by Prometheus."""
    retention_seconds: float | None = None
    """How long Prometheus keeps samples; a longer SLO window is refused. None: not known."""
    absent_alerts: bool = True
    """Whether SLOs that nothing measures have an alert; drills measure only what they need."""
    thresholds: Path | None = None
    """Thresholds that replace the shipped ones."""
    speedup: float = 1.0
    """For drills: every duration is divided by this."""

    def __post_init__(self) -> None:
        longest = SHORTEST_RANGE_SECONDS / SCRAPES_A_RANGE
        if not 0 < self.scrape_interval_seconds <= longest:
            raise InputError(
                f"a scrape interval of {self.scrape_interval_seconds:g} s leaves too few samples: rules look "
                f"{SHORTEST_RANGE_SECONDS} s back and need {SCRAPES_A_RANGE} scrapes in it, so scrape every "
                f"{longest:g} s or more often"
            )
        for name, base in (("runbooks", self.runbook_base), ("dashboards", self.dashboard_base)):
            if not re.match(r"https?://[^/]", base):
                raise InputError(f"--{name} {base}: a pager needs an absolute address: write http(s)://HOST/PATH")
        for name in (*self.by, *self.labels, *self.replica_labels):
            if not _LABEL_NAME.fullmatch(name):
                raise InputError(f"{name!r} is not a label name: use letters, digits and _")
        for severity in self.severities:
            if severity not in ("page", "ticket"):
                raise InputError(f"--severity-map {severity}=…: the severities are page and ticket")
        if self.source not in SOURCES:
            raise InputError(f"--from {self.source}: use one of {', '.join(SOURCES)}")
        if self.dialect not in DIALECTS:
            raise InputError(f"--dialect {self.dialect}: use one of {', '.join(DIALECTS)}")
        if not self.speedup >= 1:
            raise InputError(f"--speedup must be 1 or more, got {self.speedup:g}")

    @property
    def fleet(self) -> tuple[str, ...]:
        """Labels that separate fleets: `by` without the model, and always the cluster."""
        return tuple(dict.fromkeys((*FLEET_LABELS, *(label for label in self.by if label != "model"))))

    @property
    def native(self) -> bool:
        """Whether the database has native histograms."""
        return self.dialect == "prometheus"

    def catalogue(self) -> Catalogue:
        """The catalogue with these settings filled in. Raises DocumentError."""
        return load_catalogue(
            self.thresholds,
            job=self.job,
            fleet=self.fleet,
            timeout_seconds=min(10.0, self.scrape_interval_seconds),
            native=self.native,
        )

    def keep(self, alert: Alert) -> str:
        """`keep_firing_for`, which vmalert has only in later versions."""
        return alert.keep if self.native else "0s"

    def severity(self, severity: str) -> str:
        """Its name in this organisation."""
        return self.severities.get(severity, severity)

    def labels_of(self, alert: Alert, severity: str | None = None) -> dict[str, str]:
        """`cause` separates causes from symptoms, for inhibition; `group` is the step of the diagnosis."""
        return {
            **self.labels,
            "severity": self.severity(severity or alert.severity),
            "cause": str(alert.cause).lower(),
            "group": alert.group,
        }

    def annotations(self, alert: Alert) -> dict[str, str]:
        return {
            "summary": alert.summary,
            "description": alert.description,
            "exit_condition": alert.exit_condition,
            "runbook_url": f"{self.runbook_base}/{alert.name}",
            "dashboard": f"{self.dashboard_base}/{alert.dashboard}{_chosen(alert)}",
        }


def _chosen(alert: Alert) -> str:
    """The part of the dashboard's address that selects what the alert is about: what its texts name, else its model."""
    named = dict.fromkeys(_LABEL.findall(alert.summary + alert.description))
    if alert.by_model and not DASHBOARD_VARIABLES.keys() & named:
        named["model"] = None
    chosen = [
        f"var-{DASHBOARD_VARIABLES[label]}={{{{ $labels.{label} | urlquery }}}}"
        for label in named
        if label in DASHBOARD_VARIABLES
    ]
    return f"?{'&'.join(chosen)}" if chosen else ""
