"""Prometheus and Alertmanager beside a local stack: where their binaries are, and how they are configured."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from prefixwatch import alerts

_BINARIES = {"prometheus": ("prometheus",), "alertmanager": ("prometheus-alertmanager", "alertmanager")}
"""Names under which they may be installed; Debian's comes first."""

SHIPPED_RULES = Path(str(alerts.__file__)).parent / "rules"
SHIPPED_ALERTMANAGER = SHIPPED_RULES.parent / "alertmanager.yaml"


def binary(name: str) -> str | None:
    """Of `prometheus` or `alertmanager`; None where it isn't on PATH."""
    return next((path for each in _BINARIES[name] if (path := shutil.which(each))), None)


def prometheus_config(exporter: str, interval: str, *, rules: Path, alertmanager: str | None = None) -> dict[str, Any]:
    """Scrape the exporter and judge the rule files of a folder every `interval`. Addresses are HOST:PORT."""
    config: dict[str, Any] = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(rules.resolve() / "*.yaml"), str(rules.resolve() / "*.yml")],
        "scrape_configs": [{"job_name": "prefixwatch", "static_configs": [{"targets": [exporter]}]}],
    }
    if alertmanager is not None:
        config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    return config


def prometheus_command(binary: str, folder: Path, address: str) -> list[str]:
    """Its configuration and data are in `folder`."""
    return [
        binary,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address={address}",
    ]


def alertmanager_command(binary: str, folder: Path, address: str) -> list[str]:
    """Its configuration and data are in `folder`; it joins no cluster."""
    return [
        binary,
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
    ]


def alertmanager_config(receiver: Callable[[str], dict[str, Any]], shipped: Path = SHIPPED_ALERTMANAGER) -> Any:
    """The shipped routes and inhibitions, with other receivers: what `receiver` makes of each one's name."""
    config = yaml.safe_load(shipped.read_text(encoding="utf-8"))
    config["receivers"] = [receiver(each["name"]) for each in config["receivers"]]
    return config


def routes(route: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A route of an Alertmanager configuration, and all below it."""
    yield route
    for below in route.get("routes", ()):
        yield from routes(below)
