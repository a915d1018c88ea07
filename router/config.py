"""The router's configuration: where it listens, which engines it serves, how it routes, whom it trusts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from prefixwatch.documents.hints import did_you_mean
from prefixwatch.documents.section import Settings
from prefixwatch.documents.units import (
    Blocks,
    GbitPerSecond,
    KvBytesPerTokenOrNone,
    LatencySeconds,
    WaitSecondsOrNone,
)
from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.kvcache.events.endpoints import check_endpoints, endpoint_list
from prefixwatch.kvcache.index.audit import DEFAULT_AUDIT_SHARE
from prefixwatch.kvcache.prompts.mending import KINDS
from prefixwatch.router.degradation.config import DegradationConfig
from prefixwatch.router.policy import Place
from prefixwatch.router.tenant_config import FairnessConfig, IdentityConfig, IsolationConfig, TenantsConfig

SESSION_KEYS = ("header", "thread", "user", "opening")
"""Kinds of session keys, beside cookies."""


class WorkerConfig(Settings):
    """One engine. `kv_events` and `kv_replay` are ZMQ endpoints of its cache events (vLLM and SGLang publish them)."""

    name: str = Field(min_length=1)
    """Its name in metrics and records."""
    url: str
    """Base address, such as http://10.0.0.7:8000; `/v1` at its end is taken off."""
    kv_events: tuple[str, ...] = ()
    """One endpoint, or one per data-parallel rank."""
    kv_replay: tuple[str, ...] = ()
    """Where past events are sent again; none, or one per endpoint of `kv_events`."""
    kv_bind: bool = False
    """The router binds `kv_events` and the engine connects, instead of the other way round."""
    models: list[str] | None = None
    """The model names that it serves. Learned from its `/v1/models` where not given."""
    kv_store: str = ""
    """The store of KV blocks that it writes to and reads from, such as a connector's shared folder. Between workers of
    one store sessions move softly."""
    region: str = ""
    """The region that it runs in; policy `topology` chooses among regions first."""
    zone: str = ""
    """Its location, for reports on whether placements and sessions stay there. The router doesn't use it."""
    node: str = ""
    """The machine it runs on; for reports, like `zone`. A `gpu_group` is one of its node."""
    gpu_group: str = ""
    """GPUs of the node that reach each other's memory quickly, by NVLink or within a NUMA domain; policy `topology` may
    move a request among them."""
    role: str = ""
    """`prefill` or `decode`, where the two are split."""
    pool: str = ""
    """The pool of workers that it belongs to."""
    namespace: str = ""
    """The Kubernetes namespace, or another division of your own."""
    cluster: str = ""
    """The cluster that it runs in."""

    @property
    def where(self) -> Place:
        """Where it is, for policies."""
        return Place(self.region, self.zone, self.node, self.gpu_group)

    @property
    def place(self) -> dict[str, str]:
        """The keys that records and metrics repeat."""
        return self.model_dump(include=set(WORKER_PLACE))

    @field_validator("kv_events", "kv_replay", mode="before")
    @classmethod
    def _endpoint_list(cls, given: Any) -> Any:
        return endpoint_list(given)

    @model_validator(mode="after")
    def _one_stream_per_rank(self) -> Self:
        check_endpoints(self.kv_events, self.kv_replay)
        return self

    @field_validator("url")
    @classmethod
    def _plain_base(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"'{url}' is not an http:// or https:// address")
        return url.rstrip("/").removesuffix("/v1")


WORKER_PLACE = ("role", "pool", "namespace", "cluster")
"""The keys of a worker that records and metrics repeat."""


class PolicyConfig(Settings):
    """How a worker is chosen for each request."""

    name: str = "cache_aware"
    """A routing policy; `prefixwatch policies` lists them."""
    seed: int = 0
    """Seed of random choices among equal workers."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The policy's own options; `prefixwatch policies --json` lists names, defaults and reasons."""


class CacheViewConfig(Settings):
    """What the router believes the engines cache: their own KV events, its routing history, or nothing."""

    source: Literal["events", "history", "none"] = "history"
    """`events`: the engines' KV events; `history`: what the router itself sent where; `none`: nothing."""
    history_blocks: Blocks = Field(default=65_536, ge=1)
    """Blocks remembered a worker, least recently routed out first; best set to the engine's cache size. More: hits are
    expected that the engine has evicted; fewer: hits that it still has are missed."""
    history_ttl_seconds: WaitSecondsOrNone = None
    """Forget a block this long after it was last routed; never by age where not given. Shorter: fewer hits are expected
    in vain, and more are missed."""
    audit_share: float = Field(default=DEFAULT_AUDIT_SHARE, ge=0, le=1)
    """Share of the lookups that are done block by block as well, to count holes that the quick way steps over. Higher:
    holes are found sooner, and lookups take more CPU."""
    hash_key: SecretStr | None = Field(default=None, min_length=32)
    """Name blocks by their hashes under this secret, so that no client can prepare two prompts that the index takes
    for one. Costs a millisecond per 16,000 prompt tokens. The records then name no blocks: the exporter's map of
    prefixes has no traffic, and suspicious reuse behind several routers stays unproven."""
    exact: bool = False
    """Look every prompt up block by block: right even with holes, and slower."""


class RequestRecordsConfig(Settings):
    """The records of finished requests that the exporter reads at `/router/requests`."""

    kept: int = Field(default=16_384, ge=1)
    """The number of newest records to keep; about 1 KB each."""
    hash_secret: str | None = Field(default=None, min_length=16)
    """Key of the hashes that replace the names of sessions and unknown tenants. Give the routers of one fleet the same,
    so that a session has one name; without it each router draws its own."""


class TimeoutsConfig(Settings):
    """Seconds."""

    connect_seconds: float = Field(default=5.0, gt=0)
    """To open a connection to a worker. Shorter: a machine that is gone costs less, and a busy one counts as failed."""
    first_byte_seconds: float = Field(default=60.0, gt=0)
    """Until a stream begins; then another worker is tried. Shorter: a worker that hangs costs less, and one with a
    queue is given up sooner. Keep twice this below your clients' own time-out."""
    answer_seconds: float = Field(default=600.0, gt=0)
    """Until an answer that isn't streamed is complete. Shorter: long answers are cut off."""
    inter_token_seconds: float = Field(default=60.0, gt=0)
    """Between two pieces of a streamed answer. Shorter: a stream that hangs ends sooner, and so does one whose request
    is preempted for long."""
    startup_seconds: float = Field(default=30.0, ge=0)
    """How long to wait at start for a first healthy worker."""


class HealthConfig(Settings):
    """How a worker is found to be up or down, and asked for its load."""

    interval_seconds: float = Field(default=2.0, gt=0)
    """Between two health checks of a worker. Longer: fewer checks, and an idle worker that fails is found later."""
    down_interval_seconds: float = Field(default=0.25, gt=0)
    """The same for a worker that is down. Longer: it comes back later."""
    timeout_seconds: float = Field(default=2.0, gt=0)
    """For the answer to a health check. Shorter: a worker that hangs is found sooner, and a busy one is taken out by
    two slow answers in a row."""
    failures_to_leave: int = Field(default=1, ge=1)
    """Failures in a row, of requests and probes, after which a worker gets no more requests. A refused connection
    counts as all of them. More: one error takes nobody out, and a broken worker fails more requests first."""
    successes_to_return: int = Field(default=1, ge=1)
    """Probes in a row that must succeed before it gets requests again. More: it comes back later, and swings less."""
    silent_seconds: float = Field(default=30.0, ge=0)
    """How long a worker stays out that let a request time out and answered no other meanwhile, whatever its `/health`
    says. Then it gets one request at a time until it answers one. Longer: a worker that hangs costs fewer time-outs,
    and one that was only slow comes back later."""
    report_max_age_seconds: float = Field(default=10.0, gt=0)
    """An engine's report of its load counts as missing from this age on. Engines are asked every second; smg asks
    every 10 s and production-stack every 30 s, and each uses a report until the next. Longer: policies go on by
    older loads of an engine that doesn't answer."""


class MovesConfig(Settings):
    """Sessions that are moved on purpose when their worker drains, dies or is overloaded. Off unless `enabled`.

    How the way is chosen is in docs/caches-that-move.md.
    """

    enabled: bool = False
    """Needs a view of the caches: `cache_view.source` other than `none`, and a `model_dir`."""
    kv_bytes_per_token: KvBytesPerTokenOrNone = None
    """KV of one token, all layers and heads; without it no move is soft. Larger: more moves are hard."""
    link_gbit_per_second: GbitPerSecond = 25.0
    """How fast a worker reads from the store. Faster: more moves are soft."""
    link_latency_seconds: LatencySeconds = 0.005
    """Before the first byte from the store. Higher: short sessions are computed again."""
    overload_seconds: WaitSecondsOrNone = None
    """A worker whose queue takes longer than this, and twice as long as the median one, gives up a tenth of its quiet
    sessions every 5 s; looked for once a second. Lower: they leave sooner. They never do where not given."""
    sessions: int = Field(default=10_000, ge=1, le=2**30)
    """The newest sessions that are remembered, with 8 bytes a block of their last prompts. Fewer: those that were quiet
    for longest aren't moved, and find their way as new ones do."""


class SplitConfig(Settings):
    """Prefill and decode apart: long uncached prompts are computed by a worker with the role `prefill`, and the worker
    that answers loads their KV from a store that both share. Off unless `enabled`."""

    enabled: bool = False
    """Needs workers with the role `prefill`, which then serve nothing else, and others; and engines whose KV connector
    shares a store."""
    prefill_from_tokens: int = Field(default=2048, ge=1)
    """Uncached prompt tokens from which a prompt goes to a prefill worker. Lower: more prompts do, and each pays for
    the way through the store."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """How long a prefill worker may take. Then the answering worker computes the prompt, as after any failure, and the
    prefill worker is out for `health.silent_seconds`. Lower: a worker that hangs costs less, but one with a queue is
    given up sooner. Keep it below your clients' own time-out."""


class RouterSettings(Settings):
    """What a user sets of the router; `prefixwatch.yaml` has the same keys."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = Field(default=8000, ge=0, le=65_535)
    """The port to listen on; 0 picks a free one."""
    policy: PolicyConfig = PolicyConfig()
    """How a worker is chosen."""
    cache_view: CacheViewConfig = CacheViewConfig()
    """What the router believes the engines cache."""
    adapters: list[str] = Field(default_factory=list)
    """Model names that are LoRA adapters: engines keep their blocks apart."""
    models: list[str] = Field(default_factory=list)
    """Model names that may appear in metrics, beside those the engines list; all others count as `other`."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """When a worker's answer is given up."""
    health: HealthConfig = HealthConfig()
    """Health checks of the workers."""
    identity: IdentityConfig = IdentityConfig()
    """Who a tenant is, and which tenants may share."""
    session_keys: list[str] = Field(default_factory=lambda: ["header"])
    """What names a conversation, the first that a request has: `header` (`session_header`), `thread` (the body's
    `conversation`, or `thread_id` and the like in its `metadata`, with its `user`), `user`, `cookie:NAME`, `opening`
    (all up to the first question). Requests without any are counted."""
    routing_key: tuple[str, ...] = ()
    """Kinds of differences that are left out of what the policy sees, so that prompts which differ in these alone go to
    one worker: `billing`, `time`, `id`, `tools`, `version`, `media`, `thoughts`, `spelling`, as `prefixwatch analyze`
    names them. What is sent never changes. The policy then looks at the router's own history of such keys."""
    fairness: FairnessConfig = FairnessConfig()
    """Tenants' shares of the caches."""
    isolation: IsolationConfig = IsolationConfig()
    """The audit of reuse across tenants."""
    degradation: DegradationConfig = DegradationConfig()
    """What is done under pressure, and when it ends."""
    moves: MovesConfig = MovesConfig()
    """Sessions that are moved on purpose."""
    split: SplitConfig = SplitConfig()
    """Prefill and decode on workers of their own."""
    max_body_bytes: int = Field(default=64 * 2**20, ge=1)
    """The largest body of a request."""
    max_bodies_bytes: int = Field(default=2**30, ge=1)
    """All bodies that are held at once. A request that would exceed it gets a 503."""
    max_prompt_characters: int = Field(default=4_000_000, ge=1)
    """Characters, token ids or JSON values of a prompt that is tokenised; a longer one gets a 413. Encoded images,
    audio and files don't count."""
    max_messages: int = Field(default=10_000, ge=1)
    """Messages of a chat, or texts of a batch."""
    admin_token: SecretStr | None = None
    """With it, `/metrics` and `/router/requests` need the header `Authorization: Bearer TOKEN`, and `/health` without
    it doesn't name the workers. Give it to whatever scrapes this router."""
    otlp_endpoint: str | None = None
    """Base address of an OTLP/HTTP collector, such as http://127.0.0.1:4318; no spans without it."""

    @field_validator("routing_key")
    @classmethod
    def _known_kinds(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        for kind in kinds:
            if kind not in KINDS:
                raise ValueError(f"'{kind}' is not a kind of difference: {did_you_mean(kind, KINDS)}")
        return kinds

    @field_validator("session_keys")
    @classmethod
    def _known_keys(cls, keys: list[str]) -> list[str]:
        for key in keys:
            if key not in SESSION_KEYS and not (key.startswith("cookie:") and key != "cookie:"):
                raise ValueError(f"'{key}' is not a session key: use {', '.join(SESSION_KEYS)} or cookie:NAME")
        return keys


class RouterConfig(RouterSettings):
    """The router's whole configuration: the settings, the engines behind it, their tokenizer, and its tenants."""

    workers: list[WorkerConfig] = Field(min_length=1)
    model_dir: Path | None = None
    """Folder with the served model's tokenizer; needed by policies that look at tokens or caches."""
    block_size: int = Field(default=DEFAULT_BLOCK_SIZE, ge=1)
    always_predict: bool = False
    """Predict cached tokens for policies that don't look at caches too, after they have chosen."""
    tenants: TenantsConfig = TenantsConfig()
    request_records: RequestRecordsConfig = RequestRecordsConfig()

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
        if self.routing_key and self.degradation.enabled:
            raise ValueError("degradation predicts by the prompts themselves: leave out routing_key, or degradation")
        if self.identity.secrets_file is not None and (self.tenants.salts or self.tenants.trust_client_salt):
            raise ValueError("identity.secrets_file derives the salts: remove the tenants' own, and trust_client_salt")
        return self

    @property
    def prefill_workers(self) -> frozenset[str]:
        """Those that only compute prompts."""
        return frozenset(worker.name for worker in self.workers if self.split.enabled and worker.role == "prefill")

    @model_validator(mode="after")
    def _both_sides(self) -> Self:
        if self.split.enabled and not 0 < len(self.prefill_workers) < len(self.workers):
            raise ValueError("split needs workers with the role 'prefill', and others that answer: give workers a role")
        return self
