"""`prefixwatch.yaml`: the one configuration file, and how each room's own settings follow from it.

Every value can also come from the environment: PREFIXWATCH_ROUTER__PORT=8100 sets `router.port`; two
underscores step into a section, the value is read as YAML. The environment wins over the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from documents import DocumentError, load
from exporters.config import ExporterConfig, ExporterSettings, TargetConfig, split_listen, validated
from exporters.requests.settings import Pricing
from kvcache.blocks import DEFAULT_BLOCK_SIZE
from router.config import (
    CacheViewConfig,
    HealthConfig,
    IsolationConfig,
    PolicyConfig,
    RequestRecordsConfig,
    RouterConfig,
    TenantsConfig,
    TimeoutsConfig,
    WorkerConfig,
)

ENVIRONMENT_PREFIX = "PREFIXWATCH_"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class FleetSection(_Section):
    """The engines: those to start on this machine, or those that already run."""

    engine: Literal["simulated", "vllm"] = "simulated"
    workers: int = Field(default=4, ge=1)
    profile: str | None = None
    capacity_blocks: int | None = Field(default=None, ge=1)
    targets: list[WorkerConfig] = []
    """Running engines; with any of them, none is started."""


class TenantSection(_Section):
    """A tenant and the cache salt that keeps its blocks apart."""

    name: str = Field(min_length=1)
    salt: SecretStr | None = None


class TokenizerSection(_Section):
    model_dir: Path | None = None
    """Folder of the served model; the built-in tiny model where engines are started here."""
    block_size: int = Field(default=DEFAULT_BLOCK_SIZE, ge=1)


class RouterSection(_Section):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65_535)
    policy: PolicyConfig = PolicyConfig()
    cache_view: CacheViewConfig = CacheViewConfig(source="history")
    timeouts: TimeoutsConfig = TimeoutsConfig()
    health: HealthConfig = HealthConfig()
    tenant_header: str = "x-tenant-id"
    session_header: str = "x-session-id"
    class_header: str = "x-request-class"
    trust_client_salt: bool = False
    isolation: IsolationConfig = IsolationConfig()
    records_kept: int = Field(default=16_384, ge=1)
    max_body_bytes: int = Field(default=64 * 2**20, ge=1)
    otlp_endpoint: str | None = None


class SloSection(_Section):
    objectives: list[str] | None = None
    """SLO documents that requests are judged by: files, or shipped ones' names; all shipped ones where not given."""


class SecuritySection(_Section):
    hash_secret: SecretStr | None = Field(default=None, min_length=16)
    """Key of the hashes that stand for sessions and unknown tenants; the same for all routers of a fleet. Each draws
    its own without it."""


class PrefixwatchConfig(_Section):
    """The whole file; every section and key has a default."""

    fleet: FleetSection = FleetSection()
    tenants: list[TenantSection] = []
    tokenizer: TokenizerSection = TokenizerSection()
    router: RouterSection = RouterSection()
    exporter: ExporterSettings = ExporterSettings()
    slo: SloSection = SloSection()
    pricing: Pricing = Pricing()
    security: SecuritySection = SecuritySection()

    @model_validator(mode="after")
    def _tenants_differ(self) -> Self:
        names = [tenant.name for tenant in self.tenants]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"tenants: two are called '{name}'")
        return self

    def listening_on(self, host: str | None) -> PrefixwatchConfig:
        """The same with router and exporter listening on `host`; None changes nothing."""
        if host is None:
            return self
        _, port = split_listen(self.exporter.listen)
        return self.model_copy(
            update={
                "router": self.router.model_copy(update={"host": host}),
                "exporter": self.exporter.model_copy(update={"listen": f"{host}:{port}"}),
            }
        )

    def exporter_config(self, workers: Sequence[WorkerConfig], router_url: str | None = None) -> ExporterConfig:
        """The exporter's settings for these engines, a router in front of them, and its own targets.

        Raises DocumentError when there is nothing to scrape, ExporterError when two targets have one name.
        """
        section = self.exporter
        engines = [
            TargetConfig(name=w.name, url=w.url, kv_events=w.kv_events, kv_replay=w.kv_replay, zone=w.zone, node=w.node)
            for w in workers
        ]
        router = [TargetConfig(name="router", url=router_url)] if router_url else []
        targets = (*router, *engines, *section.targets)
        if not targets and not section.scrape_configs:
            raise DocumentError(
                "exporter.targets, exporter.scrape_configs and fleet.targets: list nothing to scrape: "
                "add a target to one"
            )
        values = {name: getattr(section, name) for name in section.model_fields_set}
        shared = {
            "objectives": self.slo.objectives,
            "pricing": self.pricing,
            "tenants": [tenant.name for tenant in self.tenants],
            "hash_secret": self.security.hash_secret,
        }
        return validated({**values, **shared, "targets": targets}, "exporter.targets and fleet.targets")

    def router_config(self, workers: list[WorkerConfig], model_dir: Path | None, block_size: int) -> RouterConfig:
        """The router's settings in front of these engines."""
        section = self.router
        salts = {t.name: t.salt.get_secret_value() for t in self.tenants if t.salt is not None}
        secret = self.security.hash_secret
        return RouterConfig(
            host=section.host,
            port=section.port,
            workers=workers,
            policy=section.policy,
            model_dir=model_dir,
            block_size=block_size,
            cache_view=section.cache_view,
            always_predict=model_dir is not None,
            tenants=TenantsConfig(
                header=section.tenant_header,
                session_header=section.session_header,
                class_header=section.class_header,
                names=[tenant.name for tenant in self.tenants],
                salts=salts,
                trust_client_salt=section.trust_client_salt,
            ),
            request_records=RequestRecordsConfig(
                kept=section.records_kept, hash_secret=secret.get_secret_value() if secret else None
            ),
            isolation=section.isolation,
            timeouts=section.timeouts,
            health=section.health,
            max_body_bytes=section.max_body_bytes,
            otlp_endpoint=section.otlp_endpoint,
        )


def load_config(file: Path | None, environment: Mapping[str, str] = os.environ) -> PrefixwatchConfig:
    """The configuration of a file (none: the defaults) and the environment. Raises DocumentError."""
    config = PrefixwatchConfig() if file is None else load(file, PrefixwatchConfig)
    overrides = _overrides(environment)
    if not overrides:
        return config
    values = config.model_dump(exclude_unset=True)
    for path, value in overrides.values():
        _set(values, path, value)
    try:
        return PrefixwatchConfig.model_validate(values)
    except ValidationError as error:
        raise DocumentError("\n".join(_explain(problem, overrides) for problem in error.errors())) from error


def _overrides(environment: Mapping[str, str]) -> dict[str, tuple[tuple[str, ...], Any]]:
    """Variables that set a value: name → (path, value)."""
    found = {}
    for name, text in environment.items():
        path = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
        if name.startswith(ENVIRONMENT_PREFIX) and len(path) > 1:
            try:
                found[name] = (path, yaml.safe_load(text))
            except yaml.YAMLError as error:
                raise DocumentError(f"environment variable {name}: {text!r} is not a YAML value") from error
    return found


def _set(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for step in path[:-1]:
        values = values.setdefault(step, {})
    values[path[-1]] = value


def _explain(problem: Any, overrides: Mapping[str, tuple[tuple[str, ...], Any]]) -> str:
    location = tuple(str(step) for step in problem["loc"])
    names = [name for name, (path, _) in overrides.items() if location[: len(path)] == path or path == location]
    where = f"environment variable {names[0]}" if names else ".".join(location)
    what = "unknown key" if problem["type"] == "extra_forbidden" else str(problem["msg"]).removeprefix("Value error, ")
    return f"{where}: {what}"
