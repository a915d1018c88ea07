"""Definitions → every file that is shipped: classic JSON, v2 manifests, provisioning, a ConfigMap."""

from __future__ import annotations

import json
import re
from typing import Any

from prefixwatch.alerts.settings import EXPORTER_URL
from prefixwatch.dashboards.definition import shipped
from prefixwatch.dashboards.grafana.classic import SCRAPE_INTERVALS, classic
from prefixwatch.dashboards.grafana.manifest import manifest
from prefixwatch.dashboards.grafana.provisioning import config_map, dashboard_provider, datasource, dumped
from prefixwatch.documents.errors import InputError

RUNBOOKS = f"{EXPORTER_URL}/runbooks"
"""As the alerts' `runbook_url`: the exporter serves them. Absolute, as a relative address is one of Grafana's own."""


def rendered(runbooks: str = RUNBOOKS) -> dict[str, str]:
    """Texts by path within the folder. Raises DocumentError, InputError."""
    if not re.match(r"https?://[^/]", runbooks):
        raise InputError(
            f"--runbooks {runbooks}: in Grafana a link needs an absolute address: write http(s)://HOST/PATH"
        )
    models = {name: classic(dashboard, runbooks) for name, dashboard in shipped().items()}
    files = {f"json/{name}.json": _json(model) for name, model in models.items()}
    files |= {f"v2/{name}.json": _json(manifest(shipped()[name], model)) for name, model in models.items()}
    files["provisioning/dashboards.yaml"] = dumped(dashboard_provider())
    files["provisioning/datasource.yaml"] = dumped(datasource(SCRAPE_INTERVALS[0]))
    files["provisioning/configmap.yaml"] = "---\n".join(
        dumped(config_map(shipped()[name].uid, {f"{name}.json": _compact(model)})) for name, model in models.items()
    )
    return files


def _json(document: Any) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _compact(document: Any) -> str:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)
