"""The exporter's configuration: the `exporter` section of prefixwatch.yaml, or built from command-line flags."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from exporters.errors import ExporterError

DEFAULT_LISTEN = "127.0.0.1:9477"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetConfig(_Strict):
    """One endpoint to scrape."""

    name: str = Field(min_length=1)
    url: str
    """The metrics page; `/metrics` is added to an address without a path."""
    system: str | None = None
    """The catalogue's name for it; told from the text when not given."""
    kv_events: str | None = None
    """Where its KV events come from: tcp://host:5557 to connect to a publisher, tcp://*:5557 to be connected to."""
    kv_replay: str | None = None
    """Where the engine sends past KV events again, e.g. tcp://host:5558."""

    @field_validator("url")
    @classmethod
    def _metrics_url(cls, url: str) -> str:
        given = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(given)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"'{url}' is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ValueError(f"'{url}' is not an http(s) URL such as http://host:8000/metrics")
        return parts._replace(path=parts.path if parts.path.strip("/") else "/metrics").geturl()

    @field_validator("kv_events", "kv_replay")
    @classmethod
    def _zmq_endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not endpoint.startswith(("tcp://", "ipc://")):
            raise ValueError(f"'{endpoint}' is not a ZMQ endpoint such as tcp://host:5557")
        return endpoint


class Limits(_Strict):
    """What one target may cost, whatever it sends."""

    body_bytes: Annotated[int, Field(gt=0)] = 16 * 1024 * 1024
    samples: Annotated[int, Field(gt=0)] = 20_000
    """Samples of wanted families on one page."""
    label_values: Annotated[int, Field(gt=0)] = 100
    """Distinct values of one label of one target; later ones count as `other`."""


class ExporterConfig(_Strict):
    """Everything the exporter needs to run."""

    targets: tuple[TargetConfig, ...] = Field(min_length=1)
    listen: str = DEFAULT_LISTEN
    interval_seconds: Annotated[float, Field(gt=0)] = 5.0
    timeout_seconds: Annotated[float, Field(gt=0)] = 4.0
    window_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Rates and ratios are taken over this long, or over the two newest scrapes if they're further apart."""
    limits: Limits = Limits()

    @field_validator("listen")
    @classmethod
    def _is_address(cls, listen: str) -> str:
        split_listen(listen)
        return listen

    @model_validator(mode="after")
    def _consistent(self) -> ExporterConfig:
        names = [target.name for target in self.targets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"target names must differ, given more than once: {', '.join(twice)}")
        if not math.isfinite(self.interval_seconds):
            raise ValueError("interval_seconds must be finite")
        return self


def split_listen(listen: str) -> tuple[str, int]:
    """Host and port of HOST:PORT (an IPv6 host in brackets). Raises ValueError."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"'{listen}' is not HOST:PORT, such as {DEFAULT_LISTEN}")
    return host.strip("[]") or "0.0.0.0", int(port)


def config_from_flags(targets: Sequence[str], kv_events: Sequence[str] = (), **settings: Any) -> ExporterConfig:
    """A configuration from `[NAME=]URL` targets and `[NAME=]URL` KV-event endpoints.

    Endpoints without a name go to the targets in their order. Settings that are None keep their defaults.
    Raises ExporterError naming the flag that is wrong.
    """
    named = [_named(given) for given in targets]
    endpoints: dict[str, str] = {}
    for position, given in enumerate(kv_events):
        name, url = _split_name(given)
        if name is None:
            if position >= len(named):
                raise ExporterError(f"--kv-events {given}: there are only {len(named)} targets to give it to")
            name = named[position][0]
        if name not in dict(named):
            raise ExporterError(f"--kv-events {given}: no target is called '{name}'")
        endpoints[name] = url
    rows = [{"name": name, "url": url, "kv_events": endpoints.get(name)} for name, url in named]
    given_settings = {key: value for key, value in settings.items() if value is not None}
    return _validated({"targets": rows, **given_settings}, "command line")


def _validated(document: object, origin: str) -> ExporterConfig:
    try:
        return ExporterConfig.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ExporterError(f"{origin}: {where + ': ' if where else ''}{message}") from error


def _named(given: str) -> tuple[str, str]:
    name, url = _split_name(given)
    return name or urlsplit(url if "://" in url else f"http://{url}").netloc or url, url


def _split_name(given: str) -> tuple[str | None, str]:
    """`NAME=URL`, unless the first = belongs to the URL itself."""
    name, equals, url = given.partition("=")
    return (name, url) if equals and "/" not in name and ":" not in name else (None, given)
