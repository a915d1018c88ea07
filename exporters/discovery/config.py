"""`exporter.scrape_configs`: where targets are looked for. The keys are a subset of Prometheus' own."""

from __future__ import annotations

import re
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from prefixwatch.documents.addresses import host_and_port
from prefixwatch.documents.durations import Duration
from prefixwatch.exporters.discovery.relabel import RelabelRule
from prefixwatch.exporters.http.client_config import ClientConfig, Strict, http_address

_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class StaticConfig(Strict):
    """Addresses that are known."""

    targets: tuple[str, ...] = Field(description="host:port of each target")
    labels: dict[str, str] = Field(default={}, description="labels that all of these targets get")


class FileSdConfig(Strict):
    """Files with target groups in Prometheus' file_sd format, JSON or YAML."""

    files: tuple[str, ...] = Field(min_length=1, description="paths or globs of .json, .yml or .yaml files")
    refresh_interval: Duration = Field(default=5.0, description="how often to look whether a file has changed")

    @field_validator("files")
    @classmethod
    def _has_known_suffix(cls, files: tuple[str, ...]) -> tuple[str, ...]:
        for file in files:
            if Path(file).suffix not in (".json", ".yml", ".yaml"):
                raise ValueError(f"'{file}' doesn't end in .json, .yml or .yaml")
        return files


class HttpSdConfig(ClientConfig):
    """A server that answers with target groups in Prometheus' http_sd format."""

    url: str = Field(description="http(s) address of the list")
    refresh_interval: Duration = Field(default=60.0, description="how often to ask")

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        http_address(url, "http://host:8080/targets")
        return url


def split_nameserver(server: str) -> tuple[str, int]:
    """Address and port of a DNS server, `1.2.3.4`, `1.2.3.4:53`, `::1` or `[::1]:53`. Raises ValueError."""
    try:
        host, port = host_and_port(server, 53)
        address = ip_address(host if port else "")
    except ValueError as error:
        raise ValueError(f"'{server}' is not the IP address of a DNS server such as 10.0.0.2:53 or [::1]:53") from error
    return str(address), port


class DnsSdConfig(Strict):
    """Names whose records are the targets."""

    names: tuple[str, ...] = Field(min_length=1, description="the names to look up")
    type: Literal["SRV", "A", "AAAA"] = Field(default="SRV", description="the kind of record")
    port: int | None = Field(default=None, ge=1, le=65_535, description="the targets' port, for A and AAAA")
    refresh_interval: Duration = Field(default=30.0, description="how often to look up")
    nameservers: tuple[str, ...] = Field(default=(), description="IP:PORT of servers to ask; the system's if none")

    @field_validator("nameservers")
    @classmethod
    def _are_addresses(cls, nameservers: tuple[str, ...]) -> tuple[str, ...]:
        for server in nameservers:
            split_nameserver(server)
        return nameservers

    @model_validator(mode="after")
    def _port_is_known(self) -> Self:
        if self.type != "SRV" and self.port is None:
            raise ValueError(f"{self.type} records have no port: add port")
        return self


class NamespacesConfig(Strict):
    """Which namespaces of the cluster to look in."""

    names: tuple[str, ...] = Field(default=(), description="namespaces to look in; all if none")


class SelectorConfig(Strict):
    """Which objects the API server is asked for."""

    role: Literal["pod", "service"] = Field(description="pod or service; must be this entry's role")
    label: str = Field(default="", description="label selector, e.g. app=vllm")
    field: str = Field(default="", description="field selector, e.g. status.phase=Running")


class KubernetesSdConfig(Strict):
    """Pods (one target a container port) or services (one a port) of a cluster."""

    role: Literal["pod", "service"] = Field(description="pod or service")
    namespaces: NamespacesConfig = Field(default=NamespacesConfig(), description="where to look")
    selectors: tuple[SelectorConfig, ...] = Field(default=(), max_length=1, description="what to look for")
    kubeconfig_file: Path | None = Field(
        default=None, description="a kubeconfig; without it the pod's own service account, else ~/.kube/config"
    )
    refresh_interval: Duration = Field(default=300.0, description="how often to list everything again besides watching")

    @model_validator(mode="after")
    def _selectors_are_of_this_role(self) -> Self:
        if any(selector.role != self.role for selector in self.selectors):
            raise ValueError(f"selectors: role must be '{self.role}', this entry's own")
        return self


class ScrapeConfig(ClientConfig):
    """Targets that are scraped the same way, and all the places where they are looked for.

    After relabelling `__address__`, `__scheme__` and `__metrics_path__` make the URL and `instance` (by default the
    address) the target's name. `__system__`, `__model__`, `__kv_events__`, `__kv_replay__`, `zone` and `node` are those
    of a target.
    """

    job_name: str = Field(min_length=1, description="a name of your own for this group of targets")
    system: str | None = Field(default=None, description="the catalogue's name for these targets; detected if absent")
    scheme: Literal["http", "https"] = Field(default="http", description="http or https")
    metrics_path: str = Field(default="/metrics", pattern="^/", description="path of the metrics page")
    static_configs: tuple[StaticConfig, ...] = Field(default=(), description="known addresses")
    file_sd_configs: tuple[FileSdConfig, ...] = Field(default=(), description="files that list targets")
    http_sd_configs: tuple[HttpSdConfig, ...] = Field(default=(), description="servers that list targets")
    dns_sd_configs: tuple[DnsSdConfig, ...] = Field(default=(), description="names to look up")
    kubernetes_sd_configs: tuple[KubernetesSdConfig, ...] = Field(default=(), description="clusters to ask")
    relabel_configs: tuple[RelabelRule, ...] = Field(default=(), description="which targets to take, and their labels")

    @field_validator("static_configs")
    @classmethod
    def _label_names(cls, configs: tuple[StaticConfig, ...]) -> tuple[StaticConfig, ...]:
        for config in configs:
            for name in config.labels:
                if not _LABEL_NAME.fullmatch(name):
                    raise ValueError(f"labels: '{name}' is not a label's name")
        return configs

    @model_validator(mode="after")
    def _looks_somewhere(self) -> Self:
        if not (
            self.static_configs
            or self.file_sd_configs
            or self.http_sd_configs
            or self.dns_sd_configs
            or self.kubernetes_sd_configs
        ):
            raise ValueError(
                f"job '{self.job_name}' looks nowhere for targets: add static_configs, file_sd_configs, "
                "http_sd_configs, dns_sd_configs or kubernetes_sd_configs"
            )
        return self
