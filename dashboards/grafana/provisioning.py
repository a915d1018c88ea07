"""Files by which a Grafana takes the dashboards at its start: on disk, or in Kubernetes by its sidecar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

FOLDER = "prefixwatch"
SIDECAR_LABEL = "grafana_dashboard"
"""What the sidecar of Grafana's Helm chart looks for."""


def dashboard_provider() -> dict[str, Any]:
    """For `provisioning/dashboards/`; the JSON files lie in the folder that it names."""
    provider = {
        "name": "prefixwatch",
        "folder": FOLDER,
        "type": "file",
        "disableDeletion": True,
        "allowUiUpdates": False,
        "options": {"path": "/var/lib/grafana/dashboards/prefixwatch"},
    }
    return {"apiVersion": 1, "providers": [provider]}


def datasource(scrape_interval: str) -> dict[str, Any]:
    """For `provisioning/datasources/`. Without the scrape interval Grafana takes 15 s for granted (SL08)."""
    source = {
        "name": "Prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": "${PROMETHEUS_URL}",
        "jsonData": {"timeInterval": scrape_interval, "httpMethod": "POST"},
    }
    return {"apiVersion": 1, "datasources": [source]}


def config_map(name: str, files: Mapping[str, str]) -> dict[str, Any]:
    """Dashboards' JSON by file name, as an object that the sidecar finds.

    One for each dashboard: `kubectl apply` can't take an object of 256 KiB.
    """
    metadata = {
        "name": name,
        "labels": {SIDECAR_LABEL: "1", "app.kubernetes.io/part-of": "prefixwatch"},
        "annotations": {"grafana_folder": FOLDER},
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": dict(files)}


def dumped(document: Mapping[str, Any]) -> str:
    """One line a text, however long: a folded one isn't shorter."""
    return yaml.safe_dump(dict(document), sort_keys=False, width=float("inf"), allow_unicode=True)
