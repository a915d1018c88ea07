"""What rules need to know of the Prometheus, the exporter and the pages around them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from alerts.errors import RuleError

SCRAPES_A_RANGE = 4
"""A range holds at least so many scrape intervals: two lost scrapes leave a rate (SL07)."""
SHORTEST_RANGE_SECONDS = 300


@dataclass(frozen=True, slots=True)
class RuleSettings:
    """Defaults suit an exporter scraped every 15 s; up to 75 s will do."""

    scrape_interval_seconds: float = 15.0
    job: str = "prefixwatch"
    """The exporter's job label in Prometheus."""
    runbook_base: str = "runbooks"
    """Runbooks are at `<base>/<AlertName>.md`: the folder in the repository, or where you serve it."""
    dashboard_base: str = "/d"
    """Dashboards are at `<base>/<uid>`; give Grafana's address to make the links work outside it."""
    absent_alerts: bool = True
    """Whether SLOs that nothing measures have an alert."""
    thresholds: Path | None = None
    """Thresholds that replace the shipped ones."""
    hasten: float = 1.0
    """For drills: every length of time is divided by this."""

    def __post_init__(self) -> None:
        longest = SHORTEST_RANGE_SECONDS / SCRAPES_A_RANGE
        if not 0 < self.scrape_interval_seconds <= longest:
            raise RuleError(
                f"a scrape interval of {self.scrape_interval_seconds:g} s leaves too few samples: rules look "
                f"{SHORTEST_RANGE_SECONDS} s back and need {SCRAPES_A_RANGE} scrapes in it, so scrape every "
                f"{longest:g} s or more often"
            )
        if not self.hasten >= 1:
            raise RuleError(f"time can be hastened, not slowed: {self.hasten:g} must be 1 or more")
