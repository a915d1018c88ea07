"""The faults of a drill: how each is made, the alerts that are right for it, and the cause that must be named."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prefixwatch.router.config import PolicyConfig
from prefixwatch.stack.drill.stack import DrillSettings, DrillStack
from prefixwatch.stack.local.traffic import Traffic

Inject = Callable[[DrillStack, Traffic], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `alerts` must come at the webhook, `symptoms` may; no other alert is right."""

    title: str
    cause: str | None
    """Its id in runbooks/causes.yaml; None where nothing is wrong."""
    alerts: frozenset[str] = frozenset()
    symptoms: frozenset[str] = frozenset()
    settings: DrillSettings = field(default_factory=DrillSettings)
    traffic: Traffic = field(default_factory=Traffic)
    inject: Inject | None = None
    """None where the settings are the fault, from the start."""
    warm_seconds: float = 12.0
    """Traffic before the fault; there is none of it where the fault is there from the start."""


async def _rotate_half(stack: DrillStack, _traffic: Traffic) -> None:
    """A rotation that was cut off while it wrote over the file."""
    stack.secrets_file.write_text("namespace_key: 'the next key, of wh", encoding="utf-8")


async def _restart_first(stack: DrillStack, _traffic: Traffic) -> None:
    """Killed, gone for as long as a model takes to load at the drill's time scale, and back with an empty cache."""
    engine = stack.engines[0]
    engine.process.kill()
    await asyncio.sleep(_LOADING_SECONDS)
    engine.process = engine.process.again()


async def _lose_events(stack: DrillStack, _traffic: Traffic) -> None:
    for engine in stack.engines:
        engine.event_faults.drop_every = 5


async def _hold_streams(stack: DrillStack, _traffic: Traffic) -> None:
    stack.engines[0].router_faults.hold_finished_streams = True


async def _rename_metric(stack: DrillStack, _traffic: Traffic) -> None:
    """As vLLM did with its usage gauge, to a name that no version has had (vllm-project/production-stack#989)."""
    stack.engines[0].exporter_faults.rename_metrics = {"vllm:kv_cache_usage_perc": "vllm:kv_usage_fraction"}


async def _break_metrics_page(stack: DrillStack, _traffic: Traffic) -> None:
    stack.engines[0].exporter_faults.metrics_status = 500


async def _refuse(stack: DrillStack, _traffic: Traffic) -> None:
    stack.engines[0].router_faults.refuse_with_status = 429


async def _flood(_stack: DrillStack, traffic: Traffic) -> None:
    traffic.flood_per_second = 6.0  # twice the line of the alert, so that chance decides nothing


async def _heat(_stack: DrillStack, traffic: Traffic) -> None:
    traffic.hot_share = 0.9
    traffic.rate_per_second = 16.0
    traffic.output_tokens = 32


async def _kill_first(stack: DrillStack, _traffic: Traffic) -> None:
    stack.engines[0].process.kill()


_LOADING_SECONDS = 8.0
_FELT = frozenset(
    {"SloMostlyBad", "SloBudgetBurnFast", "SloBudgetBurnSlow", "SloBudgetExhausted", "SloTooFewEventsToJudge"}
)
"""What users feel is a symptom of whatever they feel."""


_CROWDED = frozenset(
    {
        "EvictionChurn",
        "PrefixBlocksNearCapacity",
        "PrefixHitRateLow",
        "PrefixMissCostHigh",
        "SessionMigrationsHigh",
        "SessionPrefixHitRateLow",
        "StickySessionCollisions",
    }
)
"""Symptoms of caches that serve less than they should."""
_SMALL: Mapping[str, Any] = {"capacity_blocks": 256, "max_model_len": 4096}


FAULTS: Mapping[str, Fault] = {
    "none": Fault("nothing is wrong", None),
    "hot-prefix": Fault(
        "nine of ten requests open with one prompt, and the policy looks at caches alone",
        "hot_prefix",
        frozenset({"WorkerHotspot"}),
        _FELT | frozenset({"WorkerKvSkew", "PrefillWaitLong", "WorkerSlow"}),
        settings=DrillSettings(policy=PolicyConfig(name="kvaware")),
        traffic=Traffic(tenants=("acme",)),
        inject=_heat,
    ),
    "cache-too-small": Fault(
        "caches hold less than the working set",
        "cache_too_small",
        frozenset({"EvictionChurn"}),
        _FELT | _CROWDED,
        settings=DrillSettings(engine=_SMALL),
        traffic=Traffic(openings=12),
    ),
    "engine-restart": Fault(
        "an engine is killed and comes back with an empty cache",
        "engine_restarted",
        frozenset({"TargetDown"}),
        _FELT | frozenset({"ScrapeFaults", "WorkerHotspot"}),
        inject=_restart_first,
    ),
    "engine-gone": Fault(
        "an engine is killed and stays away",
        "target_unreachable",
        frozenset({"TargetDown"}),
        _FELT | frozenset({"ScrapeFaults", "WorkerHotspot"}),
        inject=_kill_first,
    ),
    "event-gap": Fault(
        "every fifth batch of KV events is lost, without replay",
        "event_gap",
        frozenset({"IndexStale"}),
        frozenset(
            {
                "RouterBlind",
                "DataQualityMisleading",
                "AffinityAdmissionLow",
                "StickySessionCollisions",
                "SessionMigrationsHigh",
            }
        ),
        settings=DrillSettings(proxied=frozenset({"events"})),
        inject=_lose_events,
    ),
    "salt-dropped": Fault(
        "two of three tenants have lost their salt",
        "salt_dropped",
        frozenset({"IsolationViolation"}),
        _FELT | frozenset({"IsolationSuspected", "SloZeroToleranceBroken"}),
        settings=DrillSettings(salted_tenants=("acme",)),
    ),
    "salt-ignored": Fault(
        "the engines share blocks between tenants whatever their salts",
        "salt_ignored",
        frozenset({"IsolationViolation"}),
        _FELT | frozenset({"IsolationSuspected", "SloZeroToleranceBroken"}),
        settings=DrillSettings(engine={"ignore_cache_salt": True}),
    ),
    "salt-per-request": Fault(
        "clients choose their salts, another one for each request",
        "salts_too_fine",
        frozenset({"SaltsMisconfigured"}),
        _FELT | _CROWDED | {"AffinityAdmissionLow"},
        settings=DrillSettings(salted_tenants=()),
        traffic=Traffic(salt_per_request=True),
    ),
    "identity-file": Fault(
        "a rotation leaves half a secrets file",
        "identity_file_unusable",
        frozenset({"IdentityFileUnusable"}),
        settings=DrillSettings(salted_tenants=(), secrets={"namespace_key": "a drill's own key, of no use elsewhere"}),
        inject=_rotate_half,
    ),
    "router-blind": Fault(
        "the router listens for KV events where nobody publishes",
        "router_blind",
        frozenset({"RouterBlind"}),
        _FELT
        | frozenset(
            {"StickySessionCollisions", "SessionMigrationsHigh", "PrefixHitRateLow", "SessionPrefixHitRateLow"}
        ),
        settings=DrillSettings(router_hears_events=False),
    ),
    "stuck-in-flight": Fault(
        "a proxy keeps the finished streams of one engine open",
        "in_flight_leak",
        frozenset({"InFlightLeak"}),
        _FELT | frozenset({"WorkerHotspot", "StickySessionCollisions", "SessionMigrationsHigh"}),
        settings=DrillSettings(proxied=frozenset({"router"})),
        inject=_hold_streams,
    ),
    "slow-worker": Fault(
        "one engine's steps take ten times as long",
        "slow_worker",
        frozenset({"WorkerSlow"}),
        _FELT | frozenset({"WorkerHotspot", "StickySessionCollisions", "SessionMigrationsHigh"}),
        settings=DrillSettings(first_engine={"slow_factor": 10.0}),  # slow even beside peers on a crowded machine
    ),
    "tokenizer-mismatch": Fault(
        "the engines' chat template begins with the time, the router's doesn't",
        "tokenizer_mismatch",
        frozenset({"TokenizerMismatch"}),
        _FELT | _CROWDED,
        settings=DrillSettings(engine_template_prefix="{{ strftime_now('%H:%M:%S') }} ", cache_view="history"),
    ),
    "metric-renamed": Fault(
        "an engine upgrade renames a metric",
        "metric_renamed",
        frozenset({"MetricFamilyMissing"}),
        settings=DrillSettings(proxied=frozenset({"exporter"})),
        inject=_rename_metric,
    ),
    "metrics-page-broken": Fault(
        "an engine's metrics page answers 500 while it serves",
        "metrics_endpoint_failing",
        frozenset({"MetricsEndpointFailing"}),
        frozenset({"TargetDown", "DataQualityMisleading"}),
        settings=DrillSettings(proxied=frozenset({"exporter"})),
        inject=_break_metrics_page,
    ),
    "tenant-flood": Fault(
        "one tenant sends a flood of long prompts, each its own",
        "tenant_flood",
        frozenset({"TenantFlood"}),
        _FELT | _CROWDED | {"TenantCacheOneSided"},
        traffic=Traffic(rate_per_second=6.0, flood_words=1500),
        warm_seconds=70.0,  # an hour on the rules' clock, which the alert looks back to
        inject=_flood,
    ),
    "affinity-lost": Fault(
        "the router places round robin",
        "affinity_lost",
        frozenset({"StickySessionCollisions"}),
        _FELT
        | frozenset({"AffinityAdmissionLow", "SessionMigrationsHigh", "SessionPrefixHitRateLow", "PrefixHitRateLow"}),
        settings=DrillSettings(policy=PolicyConfig(name="round_robin")),
    ),
    "refusals": Fault(
        "one engine turns every request away",
        "engine_refuses",
        frozenset({"RequestsRefused"}),
        _FELT | {"RequestsFailing"},
        traffic=Traffic(rate_per_second=20.0),
        settings=DrillSettings(proxied=frozenset({"router"})),
        inject=_refuse,
    ),
}
