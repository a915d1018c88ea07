"""The exporter's configuration: the `exporter` section of prefixwatch.yaml, or built from command-line flags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator

from prefixwatch.documents.addresses import host_and_port
from prefixwatch.documents.durations import Duration
from prefixwatch.documents.units import KvBytesPerTokenOrNone
from prefixwatch.exporters.caches.prefix_names import NamedPrefix
from prefixwatch.exporters.discovery.config import ScrapeConfig
from prefixwatch.exporters.errors import ExporterError
from prefixwatch.exporters.http.client_config import ClientConfig, Strict, http_address
from prefixwatch.exporters.logs import LogFormat, LogLevel
from prefixwatch.exporters.probes.config import ProbeConfig
from prefixwatch.exporters.requests.config import Pricing, RequestSettings
from prefixwatch.exporters.scaling.config import ScalingSettings
from prefixwatch.exporters.spans.config import OtlpConfig
from prefixwatch.kvcache.events.endpoints import check_endpoints, endpoint_list

Settings = TypeVar("Settings", bound="ExporterSettings")

DEFAULT_LISTEN = "127.0.0.1:9477"

_ZMQ_ENDPOINT = re.compile(r"tcp://[^\s/]+:\d{1,5}|ipc://\S+")


class TargetConfig(ClientConfig):
    """One endpoint to scrape."""

    name: str = Field(min_length=1, description="what the target is called in all metrics")
    url: str = Field(description="the metrics page; `/metrics` is added to an address without a path")
    system: str | None = Field(
        default=None, description="the catalogue's name for it; default: detected from the page's content"
    )
    model: str | None = Field(default=None, description="the model it serves, where its page doesn't name it")
    role: str = Field(default="", description="prefill or decode, where the two are split and the page doesn't say")
    pool: str = Field(default="", description="the pool of workers it belongs to; only its peers are compared with it")
    namespace: str = Field(default="", description="the Kubernetes namespace, or another division of your own")
    cluster: str = Field(default="", description="the cluster it runs in")
    layers: tuple[str, ...] = Field(
        default=(),
        description="parts whose families should be on its page besides its own, such as lmcache or nixl; a silent one "
        "raises layer_silent",
    )
    ranks: int | None = Field(
        default=None, gt=0, description="how many GPU processes should report on this page; fewer raise ranks_missing"
    )
    kv_events: tuple[str, ...] = Field(
        default=(),
        description="where its KV events come from: tcp://host:5557 to connect to a publisher, tcp://*:5557 to be "
        "connected to; one endpoint, or a list with one per data-parallel rank",
    )
    kv_replay: tuple[str, ...] = Field(
        default=(),
        description="where the engine sends past KV events again, e.g. tcp://host:5558; one per endpoint of kv_events",
    )
    zone: str = Field(default="", description="where the worker stands, to tell placements and sessions that leave it")
    node: str = Field(default="", description="the machine it runs on")
    labels: dict[str, str] = Field(
        default={},
        description="labels from discovery, shown in the fleet API; model, role, pool, namespace and cluster count as "
        "the keys of that name",
    )

    @field_validator("url")
    @classmethod
    def _metrics_url(cls, url: str) -> str:
        parts = http_address(url if "://" in url else f"http://{url}", "http://host:8000/metrics")
        return parts._replace(path=parts.path if parts.path.strip("/") else "/metrics").geturl()

    @field_validator("kv_events", "kv_replay", mode="before")
    @classmethod
    def _endpoint_list(cls, given: Any) -> Any:
        return endpoint_list(given)

    @field_validator("kv_events", "kv_replay")
    @classmethod
    def _zmq_endpoints(cls, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        for endpoint in endpoints:
            if not _ZMQ_ENDPOINT.fullmatch(endpoint):
                raise ValueError(f"'{endpoint}' is not a ZMQ endpoint such as tcp://host:5557")
        return endpoints

    @model_validator(mode="after")
    def _one_stream_per_rank(self) -> Self:
        check_endpoints(self.kv_events, self.kv_replay)
        return self


class Limits(Strict):
    """What targets may cost, whatever they send."""

    body_bytes: int = Field(default=16 * 1024 * 1024, gt=0, description="bytes of one target's page")
    total_body_bytes: int = Field(
        default=256 * 1024 * 1024, gt=0, description="bytes of all pages that are being received at a time"
    )
    samples: int = Field(default=20_000, gt=0, description="samples of wanted families on one page")
    lines: int = Field(default=200_000, gt=0, description="lines on one page, wanted or not")
    label_values: int = Field(
        default=100, gt=0, description="distinct values of one label of one target; later ones count as `other`"
    )
    label_value_bytes: int = Field(
        default=4096, gt=0, description="length of a label's value; a series with a longer one is left out"
    )
    targets: int = Field(default=5_000, gt=0, description="targets in all; those found beyond it are not scraped")


class ExporterSettings(Strict):
    """The `exporter` section of prefixwatch.yaml."""

    targets: tuple[TargetConfig, ...] = Field(default=(), description="scraped beside the engines of fleet.targets")
    scrape_configs: tuple[ScrapeConfig, ...] = Field(default=(), description="where further targets are looked for")
    listen: str = Field(default=DEFAULT_LISTEN, description="HOST:PORT to serve on")
    web_config_file: Path | None = Field(default=None, description="TLS and basic authentication of the pages")
    log_format: LogFormat = Field(default="logfmt", description="logfmt or json, on standard error")
    log_level: LogLevel = Field(default="info", description="debug, info, warning or error")
    interval_seconds: Duration = Field(default=5.0, description="between two scrapes of a target")
    timeout_seconds: Duration = Field(default=4.0, description="how long one scrape may take")
    window_seconds: Duration = Field(
        default=60.0, description="rates and ratios are taken over this long, or over the two newest scrapes"
    )
    limits: Limits = Field(default=Limits(), description="what targets may cost")
    kv_bytes_per_token: KvBytesPerTokenOrNone = Field(
        default=None, description="KV cache of one token, all layers and heads; for the break-even of transfers"
    )
    prefixes: tuple[NamedPrefix, ...] = Field(default=(), description="prompt openings that have a name in metrics")
    """Openings of prompts that are called by name."""
    prefix_secret: SecretStr | None = Field(
        default=None, description="keeps the names of all other prefixes the same after a restart, and in each exporter"
    )
    requests: RequestSettings = Field(
        default=RequestSettings(), description="how request records are judged, named and priced"
    )
    otlp: OtlpConfig | None = Field(default=None, description="take GenAI spans at POST /v1/traces")
    probes: ProbeConfig | None = Field(default=None, description="send probes of our own")
    scaling: ScalingSettings = Field(
        default=ScalingSettings(), description="advice on the number of workers, and on which of them may go"
    )
    state_file: Path | None = Field(
        default=None, description="where to keep what was read and counted, so that a restart loses and repeats nothing"
    )
    shard: str | None = Field(
        default=None, description="INDEX/COUNT: scrape only this share of the targets, e.g. 0/3, 1/3 and 2/3"
    )
    catalogue: Path | None = Field(default=None, description="folder with catalogue files (*.yaml) of one's own")

    @field_validator("shard")
    @classmethod
    def _is_shard(cls, shard: str | None) -> str | None:
        split_shard(shard)
        return shard

    @field_validator("listen")
    @classmethod
    def _is_address(cls, listen: str) -> str:
        split_listen(listen)
        return listen

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [target.name for target in self.targets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"target names must differ, given more than once: {', '.join(twice)}")
        jobs = [job.job_name for job in self.scrape_configs]
        twice = sorted({name for name in jobs if jobs.count(name) > 1})
        if twice:
            raise ValueError(f"job names must differ, given more than once: {', '.join(twice)}")
        return self


class ExporterConfig(ExporterSettings):
    """Everything the exporter needs to run."""

    objectives: tuple[str, ...] | None = None
    """SLO documents that requests are judged by, by path or shipped name; None: all shipped ones."""
    tenants: tuple[str, ...] = ()
    """Tenants that are shown by name however many others there are."""
    pricing: Pricing = Pricing()
    hash_secret: SecretStr | None = None
    """Key of the hashes that stand for sessions and unknown tenants of spans."""

    @model_validator(mode="after")
    def _has_something_to_do(self) -> Self:
        if not self.targets and not self.scrape_configs:
            raise ValueError("no targets: add one to targets, or a place to look for them to scrape_configs")
        return self


def split_shard(shard: str | None) -> tuple[int, int]:
    """Index and count of `INDEX/COUNT`, from 0; (0, 1) without one. Raises ValueError."""
    index, slash, count = (shard or "0/1").partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f"'{shard}' is not INDEX/COUNT with an index below the count, such as 0/3")
    return int(index), int(count)


def split_listen(listen: str) -> tuple[str, int]:
    """Host and port of HOST:PORT (an IPv6 host in brackets). Raises ValueError."""
    try:
        host, port = host_and_port(listen)
    except ValueError as error:
        raise ValueError(f"{error}, such as {DEFAULT_LISTEN}") from None
    return host or "0.0.0.0", port


def config_from_flags(targets: Sequence[str], kv_events: Sequence[str] = (), **settings: Any) -> ExporterConfig:
    """A configuration from `[NAME=]URL` targets and `[NAME=]URL` KV-event endpoints.

    Endpoints without a name go to the targets in their order; a name that repeats gives its target one endpoint per
    rank. Settings that are None keep their defaults. Raises ExporterError naming the flag that is wrong.
    """
    named = [_named(given) for given in targets]
    endpoints: dict[str, list[str]] = {name: [] for name, _ in named}
    for position, given in enumerate(kv_events):
        name, url = _split_name(given)
        if name is None:
            if position >= len(named):
                raise ExporterError(f"--kv-events {given}: there are only {len(named)} targets to give it to")
            name = named[position][0]
        if name not in dict(named):
            raise ExporterError(f"--kv-events {given}: no target is called '{name}'")
        if url in endpoints[name]:
            raise ExporterError(f"--kv-events {given}: given twice; list each rank's endpoint once")
        endpoints[name] += endpoint_list(url)
    rows = [{"name": name, "url": url, "kv_events": endpoints[name]} for name, url in named]
    given_settings = {key: value for key, value in settings.items() if value is not None}
    return validated({"targets": rows, **given_settings}, "command line")


def with_flags(settings: ExporterSettings, given: Mapping[str, Any]) -> ExporterSettings:
    """The settings with what the command line gives instead. Raises ExporterError."""
    values = {name: getattr(settings, name) for name in settings.model_fields_set}
    return _checked(ExporterSettings, values | dict(given), "command line")


def validated(document: object, origin: str) -> ExporterConfig:
    """Raises ExporterError that names `origin`."""
    return _checked(ExporterConfig, document, origin)


def _checked(model: type[Settings], document: object, origin: str) -> Settings:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ExporterError(f"{origin}: {where + ': ' if where else ''}{message}") from error


def _named(given: str) -> tuple[str, str]:
    name, url = _split_name(given)
    try:
        return name or urlsplit(url if "://" in url else f"http://{url}").netloc or url, url
    except ValueError as error:  # such as a bracket that is none
        raise ExporterError(f"--target {given}: is not a URL: {error}") from error


def _split_name(given: str) -> tuple[str | None, str]:
    """`NAME=URL`, unless the first = belongs to the URL itself."""
    name, equals, url = given.partition("=")
    return (name, url) if equals and "/" not in name and ":" not in name else (None, given)
