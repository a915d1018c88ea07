"""What the router is told: where it listens, which engines it serves, how it routes, whom it trusts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvcache.audit import DEFAULT_AUDIT_SHARE
from kvcache.blocks import DEFAULT_BLOCK_SIZE

CLIENT_SALT_PREFIX = "client:"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class WorkerConfig(_Section):
    """One engine. `kv_events` and `kv_replay` are ZMQ endpoints of its cache events (vLLM and SGLang publish them)."""

    name: str = Field(min_length=1)
    url: str
    kv_events: str | None = None
    kv_replay: str | None = None
    kv_bind: bool = False
    """The router binds `kv_events` and the engine connects, instead of the other way round."""
    zone: str = ""
    """Where it stands, for who asks whether placements and sessions stay there; the router doesn't look at it."""
    node: str = ""

    @field_validator("url")
    @classmethod
    def _plain_base(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"'{url}' is not an http:// or https:// address")
        return url.rstrip("/").removesuffix("/v1")


class PolicyConfig(_Section):
    name: str = "cache_aware"
    seed: int = 0
    options: dict[str, Any] = Field(default_factory=dict)


class CacheViewConfig(_Section):
    """What the router believes the engines cache: their own KV events, its routing history, or nothing."""

    source: Literal["events", "history", "none"] = "history"
    history_blocks: int = Field(default=65_536, ge=1)
    """Blocks remembered a worker, least recently routed out first; best set to the engine's cache size."""
    history_ttl_seconds: float | None = Field(default=None, gt=0)
    """Forget a block this long after it was last routed; never by age where not given."""
    audit_share: float = Field(default=DEFAULT_AUDIT_SHARE, ge=0, le=1)
    """Share of the lookups that are done block by block as well, to count holes that the quick way steps over."""
    exact: bool = False
    """Look every prompt up block by block: right even with holes, and slower."""


class TenantsConfig(_Section):
    """Who sent a request, by a header that the gateway in front has authenticated, and the tenant's cache salt.

    A tenant with a salt always gets that salt. Where any salt is set, other callers' own salts are prefixed,
    so that nobody reaches a tenant's blocks by sending its salt. With `trust_client_salt`, or without salts
    here, the request's own `cache_salt` counts.
    """

    header: str = "x-tenant-id"
    session_header: str = "x-session-id"
    class_header: str = "x-request-class"
    """Says which objectives a request is judged by."""
    names: list[str] = Field(default_factory=list)
    """Tenants without a salt. These and the salted ones are called by name in records, all others by a keyed hash."""
    salts: dict[str, str] = Field(default_factory=dict)
    trust_client_salt: bool = False

    @field_validator("salts")
    @classmethod
    def _usable_salts(cls, salts: dict[str, str]) -> dict[str, str]:
        for tenant, salt in salts.items():
            if not salt or salt.startswith(CLIENT_SALT_PREFIX):
                raise ValueError(f"the salt of tenant '{tenant}' is empty or begins with '{CLIENT_SALT_PREFIX}'")
        return salts

    @property
    def known(self) -> frozenset[str]:
        """Tenants that are configured."""
        return frozenset((*self.names, *self.salts))

    def salt_for(self, tenant: str, claimed: str | None) -> str | None:
        """The `cache_salt` to send for a request of `tenant` that came with the salt `claimed`."""
        if self.trust_client_salt and claimed:
            return claimed
        own = self.salts.get(tenant)
        if own:
            return own
        if self.salts and not self.trust_client_salt and claimed:
            return CLIENT_SALT_PREFIX + claimed
        return claimed


class RequestRecordsConfig(_Section):
    """The records of finished requests that the exporter reads at `/router/requests`."""

    kept: int = Field(default=16_384, ge=1)
    """The newest so many; about 1 KB each."""
    hash_secret: str | None = Field(default=None, min_length=16)
    """Key of the hashes that stand for sessions and unknown tenants. Give the routers of one fleet the same, so that
    a session has one name; without it each router draws its own."""


class IsolationConfig(_Section):
    """What is remembered of each tenant's prompts, to tell whose cache a request reused. No prompt can be read from it.

    `caches_at_start` says what engines held that already ran when the router started: `ask` reads from their metrics
    whether they had served anything, `empty` trusts that they had not, `unknown` never does. Set it to `unknown` where
    anything but this router sends to the engines: reuse of what it never saw is no proof. (Several routers that one
    exporter scrapes are seen to share engines, and don't need it.)
    """

    remember: bool = True
    blocks_per_tenant: int = Field(default=262_144, ge=1024, le=2**27)
    """At least as much as the engines' caches hold of one tenant; 16 to 40 bytes each."""
    tenants: int = Field(default=64, ge=0)
    """Tenants remembered beside the configured ones."""
    caches_at_start: Literal["ask", "empty", "unknown"] = "ask"


class TimeoutsConfig(_Section):
    """Seconds. A whole unstreamed answer counts as its first byte."""

    connect_seconds: float = Field(default=5.0, gt=0)
    first_byte_seconds: float = Field(default=600.0, gt=0)
    inter_token_seconds: float = Field(default=60.0, gt=0)
    startup_seconds: float = Field(default=30.0, ge=0)
    """How long to wait at start for a first healthy worker."""


class HealthConfig(_Section):
    interval_seconds: float = Field(default=2.0, gt=0)
    down_interval_seconds: float = Field(default=0.25, gt=0)
    timeout_seconds: float = Field(default=2.0, gt=0)
    report_max_age_seconds: float = Field(default=10.0, gt=0)
    """An engine's report of its load counts as missing from this age on. Engines are asked every second; smg asks
    every 10 s and production-stack every 30 s, and each uses a report until the next."""


class RouterConfig(_Section):
    """The router's part of the configuration file."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65_535)
    workers: list[WorkerConfig] = Field(min_length=1)
    policy: PolicyConfig = PolicyConfig()
    model_dir: Path | None = None
    """Folder with the served model's tokenizer; needed by policies that look at tokens or caches."""
    block_size: int = Field(default=DEFAULT_BLOCK_SIZE, ge=1)
    cache_view: CacheViewConfig = CacheViewConfig()
    always_predict: bool = False
    """Predict cached tokens for policies that don't look at caches too, after they have chosen."""
    tenants: TenantsConfig = TenantsConfig()
    adapters: list[str] = Field(default_factory=list)
    """Model names that are LoRA adapters: engines keep their blocks apart."""
    models: list[str] = Field(default_factory=list)
    """Model names that may appear in metrics, beside those the engines list; all others count as `other`."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    health: HealthConfig = HealthConfig()
    request_records: RequestRecordsConfig = RequestRecordsConfig()
    isolation: IsolationConfig = IsolationConfig()
    max_body_bytes: int = Field(default=64 * 2**20, ge=1)
    otlp_endpoint: str | None = None
    """Base address of an OTLP/HTTP collector, such as http://127.0.0.1:4318; no spans without it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [worker.name for worker in self.workers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two workers are called '{name}'")
        if self.cache_view.source == "events":
            mute = [worker.name for worker in self.workers if not worker.kv_events]
            if mute:
                raise ValueError(
                    f"cache_view.source is 'events' but {', '.join(mute)} has no kv_events endpoint: add it, "
                    "or use 'history'"
                )
        return self
