"""Rule files as PrometheusRule objects, for clusters with the Prometheus operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alerts.rule import RuleFile, document

LABELS: Mapping[str, str] = {"app.kubernetes.io/name": "prefixwatch", "app.kubernetes.io/component": "rules"}
"""An operator picks rules by label (`ruleSelector`): add yours, or select these."""


def prometheus_rule(file: RuleFile) -> dict[str, Any]:
    """One object of apiVersion monitoring.coreos.com/v1."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": f"prefixwatch-{file.name}", "labels": dict(LABELS)},
        "spec": document(file.groups),
    }
