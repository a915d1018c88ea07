"""A scrape config's discoveries, and the targets that their label sets make."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError

from prefixwatch.exporters.config import TargetConfig
from prefixwatch.exporters.discovery.config import (
    DnsSdConfig,
    FileSdConfig,
    HttpSdConfig,
    KubernetesSdConfig,
    ScrapeConfig,
)
from prefixwatch.exporters.discovery.files import FileDiscovery
from prefixwatch.exporters.discovery.http import HttpDiscovery
from prefixwatch.exporters.discovery.provider import Provider
from prefixwatch.exporters.discovery.relabel import Labels, relabel
from prefixwatch.exporters.errors import ExporterError
from prefixwatch.exporters.http.client_config import ClientConfig
from prefixwatch.exporters.http.redact import shown_url
from prefixwatch.exporters.scraping.scrape import Scraper
from prefixwatch.kvcache.events.endpoints import endpoint_list

SdConfig = FileSdConfig | HttpSdConfig | DnsSdConfig | KubernetesSdConfig


def sd_configs(job: ScrapeConfig) -> list[SdConfig]:
    """Every place that the job looks in, except its static targets."""
    return [*job.file_sd_configs, *job.http_sd_configs, *job.dns_sd_configs, *job.kubernetes_sd_configs]


def provider_for(config: SdConfig, scraper: Scraper) -> Provider:
    """Raises ExporterError when it can't work on this machine."""
    match config:
        case FileSdConfig():
            return FileDiscovery(config)
        case HttpSdConfig():
            return HttpDiscovery(config, scraper)
        case DnsSdConfig():
            from prefixwatch.exporters.discovery.dns import DnsDiscovery  # noqa: PLC0415  # dnspython: only where used

            return DnsDiscovery(config)
        case KubernetesSdConfig():
            return _kubernetes(config)


def _kubernetes(config: KubernetesSdConfig) -> Provider:
    try:
        from prefixwatch.exporters.discovery.kubernetes import KubernetesDiscovery  # noqa: PLC0415  # optional
    except ModuleNotFoundError as error:
        raise ExporterError(
            "kubernetes_sd_configs needs the Kubernetes client, which is not installed: "
            "pip install 'prefixwatch[kubernetes]'"
        ) from error
    return KubernetesDiscovery(config)


def static_targets(job: ScrapeConfig) -> list[Labels]:
    return [{**group.labels, "__address__": address} for group in job.static_configs for address in group.targets]


def target_configs(job: ScrapeConfig, found: Iterable[Labels], most: int) -> tuple[list[TargetConfig], list[str]]:
    """The targets that remain after relabelling, at most that many, and why a label set that should be one can't be.

    No more label sets are looked at once there are enough targets.
    """
    client = job.client()
    targets: list[TargetConfig] = []
    problems: list[str] = []
    for labels in found:
        kept = relabel(
            {"job": job.job_name, "__scheme__": job.scheme, "__metrics_path__": job.metrics_path} | labels,
            job.relabel_configs,
        )
        if kept is None or "__address__" not in kept:
            continue
        if len(targets) >= most or len(problems) >= most:
            problems.append(f"job {job.job_name}: only the first {most} targets are used: see limits.targets")
            break
        try:
            targets.append(_target(job, client, kept))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            why = str(first["msg"]).removeprefix("Value error, ")
            shown = shown_url(f"//{kept['__address__']}").removeprefix("//")
            problems.append(f"job {job.job_name}: target {shown}: {first['loc'][0]}: {why}")
    return targets, problems


def _target(job: ScrapeConfig, client: ClientConfig, labels: Labels) -> TargetConfig:
    address = labels["__address__"]
    return TargetConfig(
        name=labels.get("instance", address),
        url=f"{labels.get('__scheme__', 'http')}://{address}{labels.get('__metrics_path__', '/metrics')}",
        system=labels.get("__system__", job.system),
        kv_events=endpoint_list(labels.get("__kv_events__")),
        kv_replay=endpoint_list(labels.get("__kv_replay__")),
        model=labels.get("__model__"),
        zone=labels.get("zone", ""),
        node=labels.get("node", ""),
        labels={name: value for name, value in labels.items() if not name.startswith("__") and name != "instance"},
        **{name: getattr(client, name) for name in ClientConfig.model_fields},
    )
