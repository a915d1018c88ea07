"""The labels and annotations that every alert carries."""

from __future__ import annotations

import re
from dataclasses import dataclass

from alerts.catalogue import Alert
from alerts.settings import RuleSettings

DASHBOARD_VARIABLES = {"target": "worker", "worker": "worker", "tenant": "tenant", "model": "model"}
"""Labels of alerts, and the dashboards' variables that they choose."""
_LABEL = re.compile(r"\$labels\.(\w+)")


@dataclass(frozen=True, slots=True)
class Labels:
    settings: RuleSettings

    def of(self, alert: Alert) -> dict[str, str]:
        """`cause` tells causes from symptoms, for inhibition; `group` is the step of the diagnosis."""
        return {"severity": alert.severity, "cause": str(alert.cause).lower(), "group": alert.group}

    def annotations(self, alert: Alert) -> dict[str, str]:
        return {
            "summary": alert.summary,
            "description": alert.description,
            "exit_condition": alert.exit_condition,
            "runbook_url": f"{self.settings.runbook_base}/{alert.name}.md",
            "dashboard": f"{self.settings.dashboard_base}/{alert.dashboard}{_chosen(alert)}",
        }


def _chosen(alert: Alert) -> str:
    """The part of the dashboard's address that shows what the alert is about. Its words name all labels it has."""
    named = dict.fromkeys(_LABEL.findall(alert.summary + alert.description))
    chosen = [
        f"var-{DASHBOARD_VARIABLES[label]}={{{{ $labels.{label} | urlquery }}}}"
        for label in named
        if label in DASHBOARD_VARIABLES
    ]
    return f"?{'&'.join(chosen)}" if chosen else ""
