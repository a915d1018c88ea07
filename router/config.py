"""The router's configuration: where it listens, which engines it serves, how it routes, whom it trusts."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from prefixwatch.documents.hints import did_you_mean
from prefixwatch.documents.units import (
    Blocks,
    GbitPerSecond,
    KvBytesPerTokenOrNone,
    LatencySeconds,
    TokensOrNone,
    WaitSeconds,
    WaitSecondsOrNone,
)
from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.kvcache.events.endpoints import check_endpoints, endpoint_list
from prefixwatch.kvcache.index.audit import DEFAULT_AUDIT_SHARE
from prefixwatch.kvcache.prompts.mending import KINDS
from prefixwatch.router.degradation.chain import Limits, Step
from prefixwatch.router.policy import Place

CLIENT_SALT_PREFIX = "client:"
SESSION_KEYS = ("header", "thread", "user", "opening")
"""Kinds of session keys, beside cookies."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)


class WorkerConfig(_Section):
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


class PolicyConfig(_Section):
    """How a worker is chosen for each request."""

    name: str = "cache_aware"
    """A routing policy; `prefixwatch policies` lists them."""
    seed: int = 0
    """Seed of random choices among equal workers."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The policy's own options; `prefixwatch policies --json` lists names, defaults and reasons."""


class CacheViewConfig(_Section):
    """What the router believes the engines cache: their own KV events, its routing history, or nothing."""

    source: Literal["events", "history", "none"] = "history"
    """`events`: the engines' KV events; `history`: what the router itself sent where; `none`: nothing."""
    history_blocks: Blocks = Field(default=65_536, ge=1)
    """Blocks remembered a worker, least recently routed out first; best set to the engine's cache size."""
    history_ttl_seconds: WaitSecondsOrNone = None
    """Forget a block this long after it was last routed; never by age where not given."""
    audit_share: float = Field(default=DEFAULT_AUDIT_SHARE, ge=0, le=1)
    """Share of the lookups that are done block by block as well, to count holes that the quick way steps over."""
    hash_key: SecretStr | None = Field(default=None, min_length=32)
    """Name blocks by their hashes under this secret, so that no client can prepare two prompts that the index takes
    for one. Costs a millisecond per 16,000 prompt tokens. The records then name no blocks: the exporter's map of
    prefixes has no traffic, and suspicious reuse behind several routers stays unproven."""
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
    user_header: str = "x-user-id"
    """Says whose session it is: what a user's other sessions left is the locality of identity."""
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

    @property
    def guards_salts(self) -> bool:
        """Whether clients' own salts must not reach a tenant's blocks."""
        return bool(self.salts) and not self.trust_client_salt

    def salt_for(self, tenant: str, claimed: str | None) -> str | None:
        """The `cache_salt` to send for a request of `tenant` that came with the salt `claimed`."""
        if self.trust_client_salt and claimed:
            return claimed
        own = self.salts.get(tenant)
        if own:
            return own
        if self.guards_salts and claimed:
            return CLIENT_SALT_PREFIX + claimed
        return claimed


class JwtConfig(_Section):
    """Tokens that name the tenant in a claim. Only signatures with a public key count, and only before they expire."""

    jwks: str = Field(min_length=1)
    """The file or https:// address of the keys that sign (RFC 7517). A file is read again when it changes, an address
    every 5 minutes."""
    claim: str = Field(default="tenant", min_length=1)
    """The claim that holds the tenant's name."""
    audience: str | None = None
    """What `aud` must name; not checked where not given."""
    issuer: str | None = None
    """What `iss` must be; not checked where not given."""


class IdentityConfig(_Section):
    """Who a tenant is, authenticated by the router itself, and the cache salt derived from that.

    With `trusted_proxies`, `api_keys` or `jwt`, what clients say of themselves no longer counts: the tenant header does
    only from those proxies. With a `namespace_key`, cache salts in bodies and headers are dropped.
    """

    trusted_proxies: list[str] = Field(default_factory=list)
    """Addresses or networks, such as 10.0.0.0/8, whose tenant header counts. From others it is refused."""
    secrets_file: Path | None = None
    """YAML with `namespace_key`, from which each tenant's salt is derived (HMAC-SHA256), and `api_keys`: by tenant, the
    SHA-256 hashes of its keys. Read again when it changes."""
    api_keys: bool = False
    """Clients send an API key of the secrets file, as `Authorization: Bearer KEY` or `x-api-key`."""
    jwt: JwtConfig | None = None
    """Clients send a token as `Authorization: Bearer TOKEN`; needs the optional extra `jwt`."""
    required: bool = False
    """Refuse requests without an identity. Otherwise they share a namespace of their own."""
    trust_groups: dict[str, list[str]] = Field(default_factory=dict)
    """Tenants that may share their caches, by the group's name; each tenant is in one group at most. Prompts common to
    all of a group are computed and kept once, and its tenants can find out what the others sent."""

    @property
    def authenticates(self) -> bool:
        """Whether the tenant header alone no longer counts."""
        return bool(self.trusted_proxies or self.api_keys or self.jwt)

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, given: list[str]) -> list[str]:
        for one in given:
            try:
                ipaddress.ip_network(one, strict=False)
            except ValueError:
                raise ValueError(f"'{one}' is not an address or network (example: 10.0.0.0/8)") from None
        return given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.api_keys and self.secrets_file is None:
            raise ValueError("api_keys needs the secrets_file that has them")
        if (self.required or self.secrets_file is not None) and not self.authenticates:
            raise ValueError("who a tenant is must be certain: add trusted_proxies, api_keys or jwt")
        group_of: dict[str, str] = {}
        for group, tenants in self.trust_groups.items():
            for tenant in tenants:
                if group_of.setdefault(tenant, group) != group:
                    raise ValueError(f"tenant '{tenant}' is in two trust_groups: '{group_of[tenant]}' and '{group}'")
        return self


class RequestRecordsConfig(_Section):
    """The records of finished requests that the exporter reads at `/router/requests`."""

    kept: int = Field(default=16_384, ge=1)
    """The number of newest records to keep; about 1 KB each."""
    hash_secret: str | None = Field(default=None, min_length=16)
    """Key of the hashes that replace the names of sessions and unknown tenants. Give the routers of one fleet the same,
    so that a session has one name; without it each router draws its own."""


class IsolationConfig(_Section):
    """What is remembered of each tenant's prompts, to see whose cache a request reused. No prompt can be read from it.

    `caches_at_start` says what engines held that already ran when the router started: `ask` reads from their metrics
    whether they had served anything, `empty` trusts that they had not, `unknown` never does. Set it to `unknown` where
    anything but this router sends to the engines: reuse of what it never saw proves nothing. (Several routers that one
    exporter scrapes are seen to share engines, and don't need it.)
    """

    remember: bool = True
    """false switches the audit off, and its memory."""
    blocks: int = Field(default=4_194_304, ge=1024, le=2**30)
    """Blocks remembered of all tenants together, 16 to 60 bytes each: at least as many as the engines' caches hold. A
    tenant that sends more than an equal share is remembered less far back."""
    tenants: int = Field(default=10_000, ge=0, le=2**30)
    """Tenants remembered beside the configured ones."""
    caches_at_start: Literal["ask", "empty", "unknown"] = "ask"
    """What engines held before the router started; see above."""


class FairnessConfig(_Section):
    """How much of the caches one tenant, or trust group, may fill while others use them. Off without `cache_tokens`."""

    cache_tokens: TokensOrNone = None
    """What all engines' caches hold together, in tokens. With several routers, each one's part of it."""
    share: float = Field(default=0.5, gt=0, le=1)
    """The part of it that one tenant may fill within the window. Beyond it gets a 429 with Retry-After."""
    window_seconds: WaitSeconds = 60.0
    """How long others' prompts should stay cached between two uses."""


class TimeoutsConfig(_Section):
    """Seconds."""

    connect_seconds: float = Field(default=5.0, gt=0)
    """To open a connection to a worker."""
    first_byte_seconds: float = Field(default=60.0, gt=0)
    """Until a stream begins; then another worker is tried. Keep twice this below your clients' own time-out."""
    answer_seconds: float = Field(default=600.0, gt=0)
    """Until an answer that isn't streamed is complete."""
    inter_token_seconds: float = Field(default=60.0, gt=0)
    """Between two pieces of a streamed answer."""
    startup_seconds: float = Field(default=30.0, ge=0)
    """How long to wait at start for a first healthy worker."""


class HealthConfig(_Section):
    """How a worker is found to be up or down, and asked for its load."""

    interval_seconds: float = Field(default=2.0, gt=0)
    """Between two health checks of a worker."""
    down_interval_seconds: float = Field(default=0.25, gt=0)
    """The same for a worker that is down."""
    timeout_seconds: float = Field(default=2.0, gt=0)
    """For the answer to a health check."""
    failures_to_leave: int = Field(default=1, ge=1)
    """Failures in a row, of requests and probes, after which a worker gets no more requests. A refused connection
    counts as all of them."""
    successes_to_return: int = Field(default=1, ge=1)
    """Probes in a row that must succeed before it gets requests again."""
    silent_seconds: float = Field(default=30.0, ge=0)
    """How long a worker stays out that let a request time out and answered no other meanwhile, whatever its `/health`
    says. Longer: a worker that hangs costs fewer time-outs, and one that was only slow comes back later."""
    report_max_age_seconds: float = Field(default=10.0, gt=0)
    """An engine's report of its load counts as missing from this age on. Engines are asked every second; smg asks
    every 10 s and production-stack every 30 s, and each uses a report until the next."""


_StepName = Literal["re_sticky", "warm_pool", "smaller_model", "async_prefill"]


class DegradationConfig(_Section):
    """What the router does for a request class whose predicted TTFT exceeds its objective. Off unless `enabled`.

    The steps and their exits are in docs/caches-that-move.md.
    """

    enabled: bool = False
    """Needs a view of the caches: `cache_view.source` other than `none`, and a `model_dir`."""
    ttft_seconds: float = Field(default=2.0, gt=0)
    """The objective of a first token. Lower: the chain begins earlier."""
    classes: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Request classes with an objective of their own; each has its own state. All others share one."""
    steps: tuple[_StepName, ...] = ("re_sticky", "warm_pool", "smaller_model", "async_prefill")
    """The steps that may be taken, in this order: `re_sticky`, `warm_pool`, `smaller_model` (needs `smaller_models`),
    `async_prefill`."""
    opening_tokens: int = Field(default=256, ge=1)
    """Re-sticky: the part of a prompt that must be cached where the request goes. Larger: fewer workers qualify."""
    warm_pool_workers: int = Field(default=1, ge=1)
    """Workers that are reserved for misses at first. More: misses wait less, and hits have fewer workers."""
    warm_pool_most_ratio: float = Field(default=0.5, gt=0, lt=1)
    """The share of the workers that the pool may grow to while its backlog exceeds the objective."""
    miss_ratio: float = Field(default=0.25, gt=0)
    """A request is a miss when its uncached tokens take more than this share of the objective. Lower: more requests go
    to the pool, and hits wait for less."""
    smaller_models: dict[str, str] = Field(default_factory=dict)
    """A model, and the smaller one that may answer instead. Only for clients that send `Prefer: smaller-model`; the
    answer has `Preference-Applied: smaller-model`."""
    async_pending: int = Field(default=64, ge=1)
    """Asynchronous prefills at once; beyond them requests are served as usual. Only for clients that send
    `Prefer: respond-async`."""
    async_kept_seconds: float = Field(default=120.0, gt=0)
    """How long the client may take to send the request again."""
    exit_ratio: float = Field(default=0.7, gt=0, lt=1)
    """Steps end once the prediction is at most this share of the objective. Lower: later exits, fewer changes."""
    entry_seconds: float = Field(default=2.0, ge=0)
    """How long the prediction must exceed the objective before a step is taken."""
    dwell_seconds: float = Field(default=5.0, ge=0)
    """How long a step lasts at least before the next is taken, or it ends by relief; also between two workers that the
    pool grows by."""
    relief_seconds: float = Field(default=30.0, gt=0)
    """How long the prediction must be low before a step ends; doubled by every relapse."""
    rearm_seconds: float = Field(default=300.0, gt=0)
    """How long a class must be calm before a step that didn't help is tried again."""

    def limits(self, ttft_seconds: float | None = None) -> Limits:
        """The chain's numbers for a class with this objective; None: the common one."""
        return Limits(
            objective_seconds=self.ttft_seconds if ttft_seconds is None else ttft_seconds,
            exit_ratio=self.exit_ratio,
            entry_seconds=self.entry_seconds,
            dwell_seconds=self.dwell_seconds,
            relief_seconds=self.relief_seconds,
            rearm_seconds=self.rearm_seconds,
        )

    def chain(self) -> list[Step]:
        """The steps that can be taken."""
        steps = [Step(name) for name in self.steps]
        return [step for step in steps if step is not Step.SMALLER_MODEL or self.smaller_models]


class MovesConfig(_Section):
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


class SplitConfig(_Section):
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


class RouterSettings(_Section):
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
