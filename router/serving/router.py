"""The router: its parts, put together from a configuration, and its endpoints."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from yarl import URL

from prefixwatch.kvcache.events.endpoints import event_streams
from prefixwatch.kvcache.events.feed import WorkerFeed
from prefixwatch.kvcache.events.subscriber import KvEventSubscriber
from prefixwatch.kvcache.index.audit import IndexAudit
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.kvcache.index.keyed_blocks import BlockKey
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.degradation.policy import DegradingPolicy
from prefixwatch.router.errors import RouterError, error_body
from prefixwatch.router.exchange.namespaces import Namespaces
from prefixwatch.router.exchange.prompt import PromptLimits, PromptReader
from prefixwatch.router.placement.cache_view import CacheView, EventView, HistoryView, NoView
from prefixwatch.router.placement.dispatch import CacheLosses, Dispatcher
from prefixwatch.router.placement.ledger import Ledger
from prefixwatch.router.placement.load import poll_load
from prefixwatch.router.policy import Policy
from prefixwatch.router.records.capabilities import describe_worker
from prefixwatch.router.records.cold_start import ColdEngines
from prefixwatch.router.records.degradation import DegradationState
from prefixwatch.router.records.metrics import RouterMetrics
from prefixwatch.router.records.recorder import Recorder
from prefixwatch.router.records.request_log import RequestLog
from prefixwatch.router.records.session_moves import SessionMoves
from prefixwatch.router.serving.degraded import Degraded
from prefixwatch.router.serving.health import HealthMonitor
from prefixwatch.router.serving.identity import Identities
from prefixwatch.router.serving.identity_files import IdentityFiles
from prefixwatch.router.serving.models import ServedModels, fetch_models, merged
from prefixwatch.router.serving.moves import DRAIN_REASONS, LiveDriver, moved, moving_policy
from prefixwatch.router.serving.proxy import Proxy
from prefixwatch.router.serving.split import Split
from prefixwatch.router.serving.upstream import forward_headers, upstream_session

if TYPE_CHECKING:
    from prefixwatch.router.records.tracing import Tracing

_NUMBER_DIGITS = 18
_MODELS_SECONDS = 10.0
"""Between two looks at which models the engines list."""
_log = logging.getLogger(__name__)


class Router:
    """Everything behind the endpoints, put together from a configuration."""

    def __init__(self, config: RouterConfig, policy: Policy, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self._policy = policy
        self._prefill_workers = config.prefill_workers
        self.ledger = Ledger({worker.name: worker.where for worker in config.workers})
        self.metrics = RouterMetrics(config.models)
        self.request_log = RequestLog(config.request_records.kept)
        self._namespaces: Namespaces | None = None
        self._cold_engines = ColdEngines(config.isolation)
        self._recorder = Recorder(config, policy.label, self.request_log, self._cold_engines)
        self._subscribers: list[KvEventSubscriber] = []
        self._feeds: dict[str, list[WorkerFeed]] = {}
        self._audit = IndexAudit(config.cache_view.audit_share, exact=config.cache_view.exact, seed=config.policy.seed)
        secret = config.cache_view.hash_key
        self._block_key = None if secret is None else BlockKey(secret.get_secret_value())
        self.view = self._make_view()
        self.health = HealthMonitor(
            config.workers, config.health, on_up=self._worker_up, on_gone=self._worker_gone
        )  # fmt: skip
        self.models = ServedModels({worker.name: worker.models for worker in config.workers})
        self.dispatcher = Dispatcher(
            policy,
            self.ledger,
            self.view,
            self._answers if config.prefill_workers else self.health.is_up,
            losses=self._losses,
            report_max_age_seconds=config.health.report_max_age_seconds,
            serving=self.models.workers,
            key_view=self._make_key_view(),
            on_trial=self.health.on_trial,
        )
        self.identity_files = IdentityFiles(config.identity, self._namespace_key_changed)
        self.metrics.watch(
            identity_files=self.identity_files.usable,
            ledger=self.ledger,
            health=self.health,
            block_count=self.view.block_count,
            subscribers=self._subscribers,
            audit=self._audit,
            policy=policy,
        )
        self._moving = moving_policy(policy)
        if self._moving is not None:
            self._moving.driver = LiveDriver(config, self.dispatcher)
            self.metrics.registry.register(SessionMoves(self._moving))
        self._degraded: Degraded | None = None
        if isinstance(policy, DegradingPolicy):
            self.metrics.registry.register(DegradationState(policy))
        key = self.identity_files.namespace_key
        self._namespaces = None if key is None else Namespaces(key, config.identity.trust_groups)
        self._reader = PromptReader(
            tokenizer,
            namespaces=self._namespaces,
            block_size=config.block_size,
            tenants=config.tenants,
            adapters=frozenset(config.adapters),
            block_key=self._block_key,
            limits=PromptLimits(config.max_prompt_characters, config.max_messages),
            routing_key=config.routing_key,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    async def running(self, app: web.Application) -> AsyncIterator[None]:
        """The connections and background tasks, for as long as the server runs."""
        tracing = _tracing(self.config.otlp_endpoint)
        async with upstream_session(self.config.timeouts) as self._session:
            self._degraded = self._make_degraded()
            self._proxy = Proxy(
                self.config,
                reader=self._reader,
                dispatcher=self.dispatcher,
                health=self.health,
                models=self.models,
                metrics=self.metrics,
                recorder=self._recorder,
                session=self._session,
                tracing=tracing,
                degraded=self._degraded,
                split=self._make_split(),
                identities=self._identities(),
            )
            if self._proxy.wants_blocks:
                await asyncio.to_thread(self._reader.warm_up)
            await asyncio.gather(*(self.health.probe(worker.name, self._session) for worker in self.config.workers))
            up = [name for name, is_up in self.health.up().items() if is_up]
            await asyncio.gather(*map(self._ask_whether_cold, up), *map(self._learn_models, up))
            self._start_tasks()
            yield
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._proxy.close()
            try:
                self._policy.on_close()
            except ValueError as error:
                _log.error("%s", error)
            if self._degraded is not None:
                self._degraded.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Every endpoint that takes a prompt."""
        return await self._proxy.handle(request)  # the proxy exists once the server runs

    async def poll_prefill(self, request: web.Request) -> web.Response:
        """`/router/prefills/ID`: where an asynchronous prefill is; whoever knows the ID may ask."""
        if self._degraded is None:
            return web.json_response({"status": "unknown"}, status=404)
        return self._degraded.poll(request.match_info["key"])

    async def list_models(self, request: web.Request) -> web.Response:
        """`/v1/models`: the healthy engines' lists in one; 503 when no engine is healthy."""
        urls = [worker.url for worker in self.config.workers if self.health.is_up(worker.name)]
        listings = await fetch_models(self._session, urls, forward_headers(request.headers))
        return web.json_response({"object": "list", "data": merged(listings)}, status=200 if urls else 503)

    async def show_health(self, request: web.Request) -> web.Response:
        """`/health`: every worker's standing, named to administrators only; 503 when none takes requests."""
        in_flight = self.ledger.in_flight()
        workers = [
            {
                "name": name,
                "url": state.config.url,
                "healthy": state.up,
                "draining": state.draining,
                "reason": state.reason or None,
                "in_flight": in_flight.get(name, 0),
            }
            for name, state in self.health.states.items()
        ]
        healthy = any(worker["healthy"] for worker in workers)
        status = "ok" if healthy else "no healthy worker"
        document = {"status": status} | ({"workers": workers} if self._is_admin(request) else {})
        return web.json_response(document, status=200 if healthy else 503)

    def _is_admin(self, request: web.Request) -> bool:
        token = self.config.admin_token
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        return token is None or hmac.compare_digest(given, f"Bearer {token.get_secret_value()}".encode())

    async def show_workers(self, request: web.Request) -> web.Response:
        """`/router/workers`: where each worker is, and what is known of its hardware; null is unknown."""
        if not self._is_admin(request):
            return _unauthorized()
        return web.json_response({"workers": [describe_worker(worker) for worker in self.ledger.workers]})

    async def drain(self, request: web.Request) -> web.Response:
        """`POST /router/workers/NAME/drain`: no new requests there until its process ends; DELETE takes it back.

        With `?reason=scale_in` its sessions' moves are recorded as such.
        """
        if not self._is_admin(request):
            return _unauthorized()
        name = request.match_info["name"]
        state = self.health.states.get(name)
        if state is None:
            return _refused(f"no worker '{name[:100]}': there are {', '.join(self.health.states)}", 404)
        reason = request.query.get("reason", DRAIN_REASONS[0])
        if reason not in DRAIN_REASONS:
            return _refused(f"reason={reason[:40]!r} is not a reason to drain: give {' or '.join(DRAIN_REASONS)}", 400)
        if request.method not in ("POST", "DELETE"):
            return _refused("give POST to drain, or DELETE to take it back", 405, {"Allow": "POST, DELETE"})
        begins = request.method == "POST" and not state.draining
        state.draining = request.method == "POST"
        answer: dict[str, Any] = {"name": name, "draining": state.draining}
        answer["in_flight"] = self.ledger.in_flight().get(name, 0)
        if begins and self._moving is not None:
            answer["moves"] = moved(self._moving, self.dispatcher, name, reason)
        return web.json_response(answer)

    async def show_requests(self, request: web.Request) -> web.Response:
        """`/router/requests?after=N`: the records after number N, a page at a time; see `RequestPage`."""
        if not self._is_admin(request):
            return _unauthorized()
        after = request.query.get("after", "0")
        if not after.isdecimal() or len(after) > _NUMBER_DIGITS:
            return _refused(
                f"after={after[:40]!r} is not the number of a record: give the last one that you have, or 0", 400
            )
        page = self.request_log.page(int(after))
        return web.Response(body=msgspec.json.encode(page), content_type="application/json")

    async def show_metrics(self, request: web.Request) -> web.Response:
        """`/metrics`."""
        if not self._is_admin(request):
            return _unauthorized()
        return web.Response(
            body=generate_latest(self.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )  # fmt: skip

    async def wait_for_workers(self) -> None:
        """Return once a worker is healthy. Raises RouterError when none is within the configured time."""
        deadline = asyncio.get_running_loop().time() + self.config.timeouts.startup_seconds
        while not any(self.health.up().values()):
            if asyncio.get_running_loop().time() >= deadline:
                reasons = "; ".join(
                    f"{name} at {state.config.url}: {state.reason}" for name, state in self.health.states.items()
                )
                raise RouterError(f"no engine is reachable ({reasons}): start the engines first, or correct their urls")
            await asyncio.sleep(0.05)

    def _answers(self, name: str) -> bool:
        """Whether requests may be placed at the worker: in a split fleet only at those that answer."""
        return name not in self._prefill_workers and self.health.is_up(name)

    def _make_degraded(self) -> Degraded | None:
        if not isinstance(self._policy, DegradingPolicy):
            return None
        urls = {worker.name: worker.url for worker in self.config.workers}
        return Degraded(
            self._policy,
            self.dispatcher,
            self._session,
            url=lambda worker, path: URL(urls[worker] + path),
            waited=self.metrics.prefilled,
            timeout_seconds=self.config.timeouts.answer_seconds,
        )

    def _make_split(self) -> Split | None:
        config = self.config
        if not config.split.enabled:
            return None
        urls = {worker.name: worker.url for worker in config.workers}
        return Split(
            config.split,
            self._prefill_workers,
            self.ledger,
            self._session,
            url=lambda worker, path: URL(urls[worker] + path),
            health=self.health,
        )

    def _identities(self) -> Identities | None:
        """None where the tenant header of any client counts."""
        settings = self.config.identity
        if not settings.authenticates:
            return None
        return Identities(settings, self.config.tenants.header, self.identity_files)

    def _namespace_key_changed(self, key: bytes) -> None:
        if self._namespaces is not None:
            self._namespaces.key = key

    def _make_view(self) -> CacheView:
        settings = self.config.cache_view
        if settings.source == "none":
            return NoView()
        if settings.source == "history":
            return HistoryView(settings.history_blocks, ttl_seconds=settings.history_ttl_seconds, audit=self._audit)
        index = BlockIndex()
        for worker in self.config.workers:
            feeds = self._feeds[worker.name] = []
            for stream in event_streams(worker.name, worker.kv_events, worker.kv_replay):
                feeds.append(WorkerFeed(stream.cache, index, self.config.block_size, key=self._block_key))
                self._subscribers.append(
                    KvEventSubscriber(
                        worker.name, stream.endpoint, stream.replay_endpoint, feeds[-1], bind=worker.kv_bind
                    )
                )
        return EventView(index, self._feeds, self._audit)

    def _make_key_view(self) -> HistoryView | None:
        """Where requests with the same key went: engines' own events know nothing of keys."""
        settings = self.config.cache_view
        if not self.config.routing_key:
            return None
        return HistoryView(settings.history_blocks, ttl_seconds=settings.history_ttl_seconds)

    def _losses(self, name: str) -> CacheLosses:
        counters = [feed.counters for feed in self._feeds.get(name, ())]
        return CacheLosses(sum(each.cleared for each in counters), sum(each.removed_blocks for each in counters))

    def _start_tasks(self) -> None:
        for worker in self.config.workers:
            self._start(self.health.run(worker.name, self._session))
            if self._policy.needs.engine_load:
                self._start(poll_load(worker.name, worker.url, self._session, self.ledger))
        for subscriber in self._subscribers:
            self._start(subscriber.run())
        self._start(self._keep_models_fresh())
        if self.config.identity.secrets_file is not None or self.config.identity.jwt is not None:
            self._start(self.identity_files.keep_fresh(self._session))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a background task ended by a fault of the router", exc_info=error)

    def _worker_up(self, name: str) -> None:
        self.dispatcher.worker_up(name)
        self._start(self._ask_whether_cold(name))
        self._start(self._learn_models(name))

    def _worker_gone(self, name: str) -> None:
        self.dispatcher.worker_gone(name)

    async def _ask_whether_cold(self, name: str) -> None:
        await self._cold_engines.ask(name, self.health.states[name].config.url, self._session)

    async def _learn_models(self, name: str) -> None:
        """Names that engines serve may appear in metrics; names that only clients use may not."""
        (listing,) = await fetch_models(self._session, [self.health.states[name].config.url])
        self.models.learn(name, listing)
        self.metrics.known_models.update(self.models.names())

    async def _keep_models_fresh(self) -> None:
        """Adapters come and go while an engine runs."""
        while True:
            await asyncio.sleep(_MODELS_SECONDS)
            await asyncio.gather(*(self._learn_models(name) for name, up in self.health.up().items() if up))


def _refused(message: str, status: int, headers: Mapping[str, str] | None = None) -> web.Response:
    body = error_body(message, "router_rejected", status)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _unauthorized() -> web.Response:
    message = "this page needs the router's admin_token as a bearer token"
    return _refused(message, 401, {"WWW-Authenticate": "Bearer"})


def _tracing(endpoint: str | None) -> Tracing | None:
    if endpoint is None:
        return None
    from prefixwatch.router.records.tracing import Tracing  # noqa: PLC0415, without a collector the SDK isn't even loaded

    return Tracing(endpoint)
