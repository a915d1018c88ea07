"""The live router: an OpenAI-compatible server in front of the engines.

python -m router.app --config router.yaml
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from documents import DocumentError, load
from kvcache.audit import IndexAudit
from kvcache.feed import WorkerFeed
from kvcache.index import BlockIndex
from kvcache.subscriber import KvEventSubscriber
from kvcache.tokenizer import Tokenizer, TokenizerError
from router.cache_view import CacheView, EventView, HistoryView, NoView
from router.cold_start import ColdEngines
from router.config import RouterConfig
from router.dispatch import CacheLosses, Dispatcher
from router.errors import RouterError, error_body
from router.health import HealthMonitor
from router.ledger import Ledger
from router.load import poll_load
from router.metrics import RouterMetrics
from router.models import fetch_models
from router.policies import make_policy
from router.policy import Policy
from router.prompt import CHAT, COMPLETIONS, PromptReader
from router.proxy import Proxy
from router.records import Recorder
from router.request_log import RequestLog
from router.upstream import forward_headers, upstream_session

if TYPE_CHECKING:
    from router.tracing import Tracing

try:
    import uvloop

    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
except ImportError:  # not on Windows
    new_event_loop = asyncio.new_event_loop


_OPEN_FILES = 65_536
_NUMBER_DIGITS = 18


class Router:
    """Everything behind the endpoints, put together from a configuration."""

    def __init__(self, config: RouterConfig, policy: Policy, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self._policy = policy
        self.ledger = Ledger()
        self.metrics = RouterMetrics(config.models)
        self.request_log = RequestLog(config.request_records.kept)
        self._cold_engines = ColdEngines(config.isolation)
        self._recorder = Recorder(config, policy.name, self.request_log, self._cold_engines)
        self._subscribers: list[KvEventSubscriber] = []
        self._feeds: dict[str, WorkerFeed] = {}
        self._audit = IndexAudit(config.cache_view.audit_share, exact=config.cache_view.exact, seed=config.policy.seed)
        self.view = self._make_view()
        self.health = HealthMonitor(
            config.workers, config.health, on_up=self._worker_up, on_gone=self._worker_gone
        )  # fmt: skip
        self.dispatcher = Dispatcher(
            policy,
            self.ledger,
            self.view,
            self.health.is_up,
            losses=self._losses,
            report_max_age_seconds=config.health.report_max_age_seconds,
        )
        self.metrics.watch(self.ledger, self.health.up, self.view.block_count, self._subscribers, self._audit)
        self._reader = PromptReader(
            tokenizer, block_size=config.block_size, tenants=config.tenants, adapters=frozenset(config.adapters)
        )
        self._tasks: set[asyncio.Task[None]] = set()

    async def running(self, app: web.Application) -> AsyncIterator[None]:
        """The connections and background tasks, for as long as the server runs."""
        tracing = _tracing(self.config.otlp_endpoint)
        async with upstream_session(self.config.timeouts) as self._session:
            self._proxy = Proxy(
                self.config,
                reader=self._reader,
                dispatcher=self.dispatcher,
                health=self.health,
                metrics=self.metrics,
                recorder=self._recorder,
                session=self._session,
                tracing=tracing,
            )
            if self._proxy.wants_blocks:
                await asyncio.to_thread(self._reader.warm_up)
            await asyncio.gather(*(self.health.probe(worker.name, self._session) for worker in self.config.workers))
            await asyncio.gather(*(self._ask_whether_cold(name) for name, up in self.health.up().items() if up))
            self._start_tasks()
            yield
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._proxy.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """`/v1/chat/completions` and `/v1/completions`."""
        return await self._proxy.handle(request)

    async def list_models(self, request: web.Request) -> web.Response:
        """`/v1/models`: the healthy engines' lists in one; 503 when no engine is healthy."""
        urls = [worker.url for worker in self.config.workers if self.health.is_up(worker.name)]
        models = await fetch_models(self._session, urls, forward_headers(request.headers))
        return web.json_response({"object": "list", "data": models}, status=200 if urls else 503)

    async def show_health(self, request: web.Request) -> web.Response:
        """`/health`: every worker's standing; 503 when none takes requests."""
        in_flight = self.ledger.in_flight()
        workers = [
            {
                "name": name,
                "url": state.config.url,
                "healthy": state.up,
                "reason": state.reason or None,
                "in_flight": in_flight.get(name, 0),
            }
            for name, state in self.health.states.items()
        ]
        healthy = any(worker["healthy"] for worker in workers)
        status = "ok" if healthy else "no healthy worker"
        return web.json_response({"status": status, "workers": workers}, status=200 if healthy else 503)

    async def show_requests(self, request: web.Request) -> web.Response:
        """`/router/requests?after=N`: the records after number N, a page at a time; see `RequestPage`."""
        after = request.query.get("after", "0")
        if not after.isdecimal() or len(after) > _NUMBER_DIGITS:
            message = f"after={after[:40]!r} is not the number of a record: give the last one that you have, or 0"
            body = error_body(message, "router_rejected", 400)
            return web.Response(status=400, body=body, content_type="application/json")
        page = self.request_log.page(int(after))
        return web.Response(body=msgspec.json.encode(page), content_type="application/json")

    async def show_metrics(self, request: web.Request) -> web.Response:
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

    def _make_view(self) -> CacheView:
        settings = self.config.cache_view
        if settings.source == "none":
            return NoView()
        if settings.source == "history":
            return HistoryView(settings.history_blocks, ttl_seconds=settings.history_ttl_seconds, audit=self._audit)
        index = BlockIndex()
        for worker in self.config.workers:
            feed = self._feeds[worker.name] = WorkerFeed(worker.name, index, self.config.block_size)
            self._subscribers.append(
                KvEventSubscriber(worker.name, worker.kv_events or "", worker.kv_replay, feed, bind=worker.kv_bind)
            )
        return EventView(index, self._feeds, self._audit)

    def _losses(self, name: str) -> CacheLosses:
        feed = self._feeds.get(name)
        return CacheLosses() if feed is None else CacheLosses(feed.counters.cleared, feed.counters.removed_blocks)

    def _start_tasks(self) -> None:
        for worker in self.config.workers:
            self._start(self.health.run(worker.name, self._session))
            if self._policy.needs.engine_load:
                self._start(poll_load(worker.name, worker.url, self._session, self.ledger))
        for subscriber in self._subscribers:
            self._start(subscriber.run())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _worker_up(self, name: str) -> None:
        self.dispatcher.worker_up(name)
        self._start(self._ask_whether_cold(name))
        self._start(self._learn_models(self.health.states[name].config.url))

    def _worker_gone(self, name: str) -> None:
        self.dispatcher.worker_gone(name)

    async def _ask_whether_cold(self, name: str) -> None:
        await self._cold_engines.ask(name, self.health.states[name].config.url, self._session)

    async def _learn_models(self, url: str) -> None:
        """Names that engines serve may appear in metrics; names that only clients use may not."""
        models = await fetch_models(self._session, [url])
        self.metrics.known_models.update(str(model["id"]) for model in models if "id" in model)


ROUTER = web.AppKey("router", Router)


def create_app(config: RouterConfig, *, policy: Policy, tokenizer: Tokenizer | None = None) -> web.Application:
    """The router as an aiohttp application; run it with `handler_cancellation=True`, so that clients who leave are
    noticed. Raises RouterError when the policy needs what the configuration doesn't give.
    """
    needs = policy.needs
    if needs.truth:
        raise RouterError(
            f"policy {policy.name} needs to know the engines' true state: run it with prefixwatch simulate"
        )
    if tokenizer is None and (needs.tokens or needs.cache_view or config.always_predict):
        raise RouterError(f"policy {policy.name} looks at tokens: set model_dir to the folder of the served model")
    if needs.cache_view and config.cache_view.source == "none":
        raise RouterError(f"policy {policy.name} looks at caches: set cache_view.source to 'events' or 'history'")
    if needs.events and config.cache_view.source != "events":
        raise RouterError(f"policy {policy.name} needs KV events: set cache_view.source to 'events'")
    router = Router(config, policy, tokenizer)
    app = web.Application(client_max_size=config.max_body_bytes)
    app[ROUTER] = router
    app.cleanup_ctx.append(router.running)
    app.router.add_post(CHAT, router.complete)
    app.router.add_post(COMPLETIONS, router.complete)
    app.router.add_get("/v1/models", router.list_models)
    app.router.add_get("/health", router.show_health)
    app.router.add_get("/metrics", router.show_metrics)
    app.router.add_get("/router/requests", router.show_requests)
    return app


async def serve(config: RouterConfig, *, ready: Callable[[str], None] = lambda address: None) -> None:
    """Run the router until cancelled; `ready` is called with its address once it takes requests.

    Raises RouterError, with one message that says what to do, when it can't start.
    """
    try:
        policy = make_policy(config.policy.name, seed=config.policy.seed, options=config.policy.options)
        tokenizer = Tokenizer(config.model_dir) if config.model_dir is not None else None
    except (ValueError, TokenizerError) as error:
        raise RouterError(str(error)) from error
    app = create_app(config, policy=policy, tokenizer=tokenizer)
    _raise_file_limit()
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            raise RouterError(
                f"can't listen on {config.host}:{config.port}: {error.strerror}; "
                "stop what runs there or choose another port (0 picks a free one)"
            ) from error
        await app[ROUTER].wait_for_workers()  # until then /health and requests answer 503
        gc.collect()
        gc.freeze()  # what was imported stays for good; walking it again would stop every stream for tens of ms
        ready(_address(runner, config))
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m router.app", description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="YAML or JSON file, see router/config.py")
    arguments = parser.parse_args()
    try:
        config = load(arguments.config, RouterConfig)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_until_signalled(config))
    except (DocumentError, RouterError) as error:
        print(f"router: {error}", file=sys.stderr)
        return 2
    return 0


async def _until_signalled(config: RouterConfig) -> None:
    serving = asyncio.create_task(
        serve(config, ready=lambda address: print(f"router ready on {address}", flush=True))
    )  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def _raise_file_limit() -> None:
    """Each stream takes two sockets; the usual soft limits (256 on macOS, 1,024) would cap the fleet."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _tracing(endpoint: str | None) -> Tracing | None:
    if endpoint is None:
        return None
    from router.tracing import Tracing  # noqa: PLC0415, without a collector the SDK isn't even loaded

    return Tracing(endpoint)


def _address(runner: web.AppRunner, config: RouterConfig) -> str:
    port = runner.addresses[0][1] if runner.addresses else config.port
    return f"http://{config.host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
