"""What the exporter knows about itself: its discoveries and its configuration, as one more source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import Metric

from prefixwatch.exporters.discovery.manager import Discovery
from prefixwatch.exporters.metrics_page.rows import rows


@dataclass(slots=True)
class ServiceSource:
    """Read by the pages like any other source."""

    discovery: Discovery
    target_problems: list[str] = field(default_factory=list)
    """Why targets that were found aren't scraped."""
    reload_problem: str = ""
    """What was wrong with the last configuration; empty when it was taken."""
    static_targets: int = 0
    name: str = "service"

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        found = rows("discovered_targets")
        for discovery, count in self._found().items():
            found.add_metric([discovery], count)
        failures = rows("discovery_failures")
        for discovery, count in self.discovery.failures.items():
            failures.add_metric([discovery], count)
        reloaded = rows("config_last_reload_successful")
        reloaded.add_metric([], float(not self.reload_problem))
        return [found, failures, reloaded]

    def document(self, now_seconds: float) -> Mapping[str, Any]:
        return {
            "discovered_targets": self._found(),
            "discovery_failures": dict(self.discovery.failures),
            "problems": [*self.discovery.problems(), *self.target_problems],
            "config_last_reload_successful": not self.reload_problem,
            **({"reload_problem": self.reload_problem} if self.reload_problem else {}),
        }

    def _found(self) -> dict[str, int]:
        return {"static": self.static_targets, **self.discovery.found_counts()}
