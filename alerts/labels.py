"""The labels and annotations that every alert carries."""

from __future__ import annotations

from dataclasses import dataclass

from alerts.catalogue import Alert
from alerts.settings import RuleSettings


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
            "dashboard": f"{self.settings.dashboard_base}/{alert.dashboard}",
        }
