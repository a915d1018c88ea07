"""`prefixwatch.yaml`: the one configuration file, and how each room's own settings follow from it.

Every value can also come from the environment: PREFIXWATCH_ROUTER__PORT=8100 sets `router.port`; two
underscores step into a section, the value is read as YAML. The environment wins over the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, model_validator

from prefixwatch.documents import DocumentError, KeyPath, load, parse_plain, validate
from prefixwatch.documents.section import Settings
from prefixwatch.documents.units import MOST_WORKERS, BlocksOrNone
from prefixwatch.exporters.config import ExporterConfig, ExporterSettings, TargetConfig, split_listen, validated
from prefixwatch.exporters.http.client_config import Authorization
from prefixwatch.exporters.requests.config import Pricing
from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.loadgen.scenario.fleet_section import Workers
from prefixwatch.router.config import WORKER_PLACE, RequestRecordsConfig, RouterConfig, RouterSettings, WorkerConfig
from prefixwatch.router.tenant_config import TenantsConfig

ENVIRONMENT_PREFIX = "PREFIXWATCH_"


class FleetSection(Settings):
    """The engines: those to start on this machine, or those that already run."""

    engine: Literal["simulated", "vllm"] = "simulated"
    """The kind of engine that `up` starts."""
    workers: int = Field(default=4, ge=1, le=MOST_WORKERS)
    """How many engines `up` starts."""
    profile: str | None = None
    """Step-time profile of simulated engines: a shipped one's name, or a file."""
    capacity_blocks: BlocksOrNone = Field(default=None, ge=1)
    """KV blocks per simulated engine."""
    kinds: list[Workers] = Field(default=[])
    """Unlike engines to start, instead of `workers` equal ones: as `fleet` of a scenario."""
    targets: list[WorkerConfig] = Field(default=[])
    """Running engines; with any of them, none is started."""

    @property
    def size(self) -> int:
        """Engines that `up` starts."""
        return sum(kind.count for kind in self.kinds) or self.workers


class TenantSection(Settings):
    """A tenant and the cache salt that keeps its blocks apart."""

    name: str = Field(min_length=1)
    """As the tenant header has it."""
    salt: SecretStr | None = None
    """The `cache_salt` of all its requests; without one its blocks are shared with the other tenants'."""


class TokenizerSection(Settings):
    """How the engines cut prompts into tokens and blocks."""

    model_dir: Path | None = None
    """Folder with the served model's tokenizer; default: the built-in tiny model's, if engines are started here."""
    block_size: int = Field(default=DEFAULT_BLOCK_SIZE, ge=1)
    """Tokens per KV block, as the engines have it."""


class RouterSection(RouterSettings):
    """The router in front of the engines."""

    tenant_header: str = "x-tenant-id"
    """The header that names the tenant; the gateway in front must have authenticated it."""
    session_header: str = "x-session-id"
    """The header that names the session."""
    user_header: str = "x-user-id"
    """The header that says whose session it is; the locality of identity needs it."""
    class_header: str = "x-request-class"
    """The header that names the request class, by which objectives are chosen."""
    trust_client_salt: bool = False
    """Take a request's own `cache_salt` instead of the tenant's."""
    records_kept: int = Field(default=16_384, ge=1)
    """Newest request records kept for the exporter; about 1 KB each."""


class SloSection(Settings):
    """What requests are judged by."""

    objectives: list[str] | None = None
    """SLO documents: files, or names of shipped ones; default: all shipped ones."""


class SecuritySection(Settings):
    """Secrets of the fleet."""

    hash_secret: SecretStr | None = Field(default=None, min_length=16)
    """Key of the hashes that replace names of sessions and unknown tenants. Give all routers of a fleet the same;
    without it each draws its own."""


class PrefixwatchConfig(Settings):
    """The whole file; every section and key has a default."""

    fleet: FleetSection = FleetSection()
    """The engines."""
    tenants: list[TenantSection] = Field(default=[])
    """Tenants that are called by name in metrics, and their salts."""
    tokenizer: TokenizerSection = TokenizerSection()
    """The served model's tokenizer and block size."""
    router: RouterSection = RouterSection()
    """The router."""
    exporter: ExporterSettings = ExporterSettings()
    """The exporter."""
    slo: SloSection = SloSection()
    """The objectives that each request is counted by."""
    pricing: Pricing = Pricing()
    """What an accelerator costs, for figures in money."""
    security: SecuritySection = SecuritySection()
    """Secrets of the fleet."""

    @model_validator(mode="after")
    def _tenants_differ(self) -> Self:
        names = [tenant.name for tenant in self.tenants]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"tenants: two are called '{name}'")
        salted = self.router.trust_client_salt or any(tenant.salt is not None for tenant in self.tenants)
        if salted and self.router.identity.secrets_file is not None:
            raise ValueError("router.identity.secrets_file derives all salts: remove the others, and trust_client_salt")
        return self

    def listening_on(self, host: str | None, port: int | None) -> PrefixwatchConfig:
        """The same with router and exporter on `host`, and the router on `port`; None changes nothing."""
        exporter_host, exporter_port = split_listen(self.exporter.listen)
        router = {key: value for key, value in {"host": host, "port": port}.items() if value is not None}
        listen = f"{exporter_host if host is None else host}:{exporter_port}"
        return self.model_copy(
            update={
                "router": self.router.model_copy(update=router),
                "exporter": self.exporter.model_copy(update={"listen": listen}),
            }
        )

    def exporter_config(self, workers: Sequence[WorkerConfig], router_url: str | None = None) -> ExporterConfig:
        """The exporter's settings for these engines, a router in front of them, and its own targets.

        Raises DocumentError when there is nothing to scrape, ExporterError when two targets have one name.
        """
        section = self.exporter
        engines = [
            TargetConfig.model_validate(
                w.model_dump(include={"name", "url", "kv_events", "kv_replay", "zone", "node", *WORKER_PLACE})
            )
            for w in workers
        ]
        router = [self.router_target(router_url)] if router_url else []
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

    def router_target(self, url: str) -> TargetConfig:
        """The router as the exporter scrapes it, with the router's admin token."""
        token = self.router.admin_token
        return TargetConfig(name="router", url=url, authorization=Authorization(credentials=token) if token else None)

    def router_config(self, workers: list[WorkerConfig], model_dir: Path | None, block_size: int) -> RouterConfig:
        """The router's settings in front of these engines."""
        section = self.router
        secret = self.security.hash_secret
        return RouterConfig(
            **{name: getattr(section, name) for name in RouterSettings.model_fields},
            workers=workers,
            model_dir=model_dir,
            block_size=block_size,
            always_predict=model_dir is not None,
            tenants=TenantsConfig(
                header=section.tenant_header,
                session_header=section.session_header,
                user_header=section.user_header,
                class_header=section.class_header,
                names=[tenant.name for tenant in self.tenants],
                salts={t.name: t.salt.get_secret_value() for t in self.tenants if t.salt is not None},
                trust_client_salt=section.trust_client_salt,
            ),
            request_records=RequestRecordsConfig(
                kept=section.records_kept, hash_secret=secret.get_secret_value() if secret else None
            ),
        )


def load_config(file: Path | None, environment: Mapping[str, str] = os.environ) -> PrefixwatchConfig:
    """The configuration of a file (none: the defaults) and the environment. Raises DocumentError."""
    config = PrefixwatchConfig() if file is None else load(file, PrefixwatchConfig)
    overrides = dict(_overrides(environment))
    if not overrides:
        return config
    values = config.model_dump(exclude_unset=True)
    for path, (name, value) in overrides.items():
        _set(values, path, value, name)

    def place(path: KeyPath) -> str:
        near = (name for own, (name, _) in overrides.items() if path[: len(own)] == own or own[: len(path)] == path)
        return f"environment variable {next(near, 'unknown')}"

    return validate(values, PrefixwatchConfig, place)


def _overrides(environment: Mapping[str, str]) -> Iterator[tuple[KeyPath, tuple[str, Any]]]:
    """The path that each variable sets, shortest first: its name and value."""
    for name in sorted(environment):
        path = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
        if name.startswith(ENVIRONMENT_PREFIX) and len(path) > 1:
            yield path, (name, parse_plain(environment[name], name=f"environment variable {name}"))


def _set(values: dict[str, Any], path: KeyPath, value: Any, variable: str) -> None:
    section: Any = values
    for depth, step in enumerate(path):
        if not isinstance(section, dict):
            parent = ".".join(map(str, path[:depth]))
            kind = "a list: give the whole list as YAML" if isinstance(section, list) else "a single value"
            raise DocumentError(f"environment variable {variable}: {parent} is {kind}, in {_variable(path[:depth])}")
        if depth == len(path) - 1:
            section[step] = value
        section = section.setdefault(step, {})


def _variable(path: KeyPath) -> str:
    return ENVIRONMENT_PREFIX + "__".join(map(str, path)).upper()
