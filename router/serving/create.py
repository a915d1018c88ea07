"""The router as an aiohttp application: what a configuration needs is checked, and the endpoints get their paths."""

from __future__ import annotations

from aiohttp import web

from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.degradation.policy import DegradingPolicy
from prefixwatch.router.errors import RouterError
from prefixwatch.router.exchange.endpoints import OPERATIONS
from prefixwatch.router.policy import Policy
from prefixwatch.router.serving.degraded import PREFILLS
from prefixwatch.router.serving.router import Router
from prefixwatch.router.sessions.moving import MovingPolicy

ROUTER = web.AppKey("router", Router)


def create_app(config: RouterConfig, *, policy: Policy, tokenizer: Tokenizer | None = None) -> web.Application:
    """The router as an aiohttp application; run it with `handler_cancellation=True`, so that clients who leave are
    noticed. Raises RouterError when the policy needs what the configuration doesn't give.
    """
    if config.moves.enabled:
        policy = _moving(config, policy, tokenizer)
    if config.degradation.enabled:
        policy = _degrading(config, policy, tokenizer)
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
    if config.routing_key and needs.events:
        raise RouterError(
            f"policy {policy.name} needs KV events, which name the blocks of what was sent: leave out routing_key"
        )
    if config.split.enabled and (tokenizer is None or config.cache_view.source == "none"):
        raise RouterError("split sends prompts by what is cached: set model_dir, and cache_view.source to a view")
    if config.split.enabled and not (needs.cache_view or config.always_predict):
        config = config.model_copy(update={"always_predict": True})
    router = Router(config, policy, tokenizer)
    app = web.Application()
    app[ROUTER] = router
    app.cleanup_ctx.append(router.running)
    for path in OPERATIONS:
        app.router.add_post(path, router.complete)
    app.router.add_get("/v1/models", router.list_models)
    app.router.add_get("/health", router.show_health)
    app.router.add_get("/metrics", router.show_metrics)
    app.router.add_get("/router/requests", router.show_requests)
    app.router.add_get("/router/workers", router.show_workers)
    app.router.add_route("*", "/router/workers/{name}/drain", router.drain)
    app.router.add_get(PREFILLS + "/{key}", router.poll_prefill)
    return app


def _moving(config: RouterConfig, policy: Policy, tokenizer: Tokenizer | None) -> Policy:
    if tokenizer is None or config.cache_view.source == "none":
        raise RouterError(
            "moves are priced by what workers hold: set model_dir, and cache_view.source to 'events' or 'history'"
        )
    own = config.moves
    return MovingPolicy(policy, overload_seconds=own.overload_seconds, sessions=own.sessions)


def _degrading(config: RouterConfig, policy: Policy, tokenizer: Tokenizer | None) -> Policy:
    if tokenizer is None or config.cache_view.source == "none":
        raise RouterError(
            "degradation separates hits from misses by their tokens: set model_dir, and cache_view.source to 'events' "
            "or 'history'"
        )
    return DegradingPolicy(policy, config.degradation)
