"""The checklist before a launch: fourteen items, each judged by evidence. Pure: facts in, verdicts out.

An item for which there is no evidence is "not verifiable here", with the reason: it never passes for want of proof.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from prefixwatch.documents.durations import seconds
from prefixwatch.kvcache.blocks import block_hashes
from prefixwatch.router.config import PolicyConfig
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policy import Fleet, LoadReport, RouteRequest, Worker
from prefixwatch.stack.config import PrefixwatchConfig
from prefixwatch.stack.diagnose.preflight_hashing import judge_hashing

State = Literal["passed", "failed", "not verifiable here"]
BLOCK_TOLERANCE_TOKENS = 64
"""A repeat may miss its last block, or two; engines' blocks have 16 to 64 tokens as a rule."""


@dataclass(frozen=True, slots=True)
class ProbeFacts:
    """What small chats to the target showed. None is unknown: that answer didn't tell."""

    problem: str = ""
    """Why there is nothing; empty when there is."""
    prompt_tokens: int | None = None
    repeat_cached_tokens: int | None = None
    """Most that a second sending of a chat found cached, a second later."""
    half_cached_tokens: int | None = None
    """What a chat found that shares its first half with an earlier one."""
    other_tenant_cached_tokens: int | None = None
    """Most that another tenant's sending of the same chat found."""
    tenants: tuple[str, str] = ("", "")
    uncached_answered: bool | None = None
    """Whether a prompt that nobody holds is answered."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything there is to judge by; what is None wasn't given."""

    probes: ProbeFacts = ProbeFacts(problem="no --target to send probes to")
    config: PrefixwatchConfig | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Answers of `METRIC_QUERIES`; empty without --prometheus or --exporter."""
    tokens_equal: bool | None = None
    """Whether engines' /tokenize gives what the configured model folder does."""
    retention: str = ""
    """How long the Prometheus keeps samples, as it says; empty where it doesn't."""
    hash_algorithms: Mapping[str, str] = field(default_factory=dict)
    """By engine, how it hashes blocks; empty where it doesn't say."""
    tokens_why: str = "needs --config with fleet.targets and tokenizer.model_dir"


METRIC_QUERIES: Mapping[str, str] = {
    "session_hit_ratio": (
        "sum(increase(prefixwatch_session_hit_tokens_total[$window])) "
        "/ (sum(increase(prefixwatch_session_prompt_tokens_total[$window])) > 1000)"
    ),
    "hit_token_series": "count(prefixwatch_prefix_hit_tokens_total)",
    "ttft_classes": "count(sum by (cache) (prefixwatch_ttft_seconds_count) > 0)",
    "max_over_mean": "max(prefixwatch_hotspot_max_over_mean)",
    "missed_batches": "sum(increase(prefixwatch_kv_event_batches_missed_total[$window]))",
    "predicted_over_delivered": (
        "sum(increase(prefixwatch_predicted_hit_tokens_total[$window])) "
        "/ (sum(increase(prefixwatch_delivered_hit_tokens_total[$window])) > 1000)"
    ),
    "break_even_tokens": "max(prefixwatch_kv_transfer_break_even_tokens)",
    "longest_window_days": "max(prefixwatch:slo_period:days)",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the checklist."""

    name: str
    state: State
    evidence: str
    """What was seen, or why nothing could be."""


def checklist(facts: Facts) -> list[Item]:
    """All of them, in the order in which a launch should settle them."""
    return [Item(name, *check(facts)) for name, check in _ITEMS.items()]


_Verdict = tuple[State, str]


def _unverifiable(why: str) -> _Verdict:
    return "not verifiable here", why


def _judged(ok: bool, evidence: str) -> _Verdict:
    return ("passed" if ok else "failed"), evidence


def _prompt_order(facts: Facts) -> _Verdict:
    ratio = facts.metrics.get("session_hit_ratio")
    if ratio is None:
        return _unverifiable(
            "needs real traffic with sessions: the application writes the prompts; ask again with --prometheus after a "
            "rehearsal"
        )
    return _judged(ratio >= 0.8, f"later turns of sessions reuse {ratio:.0%} of their prompts (80 % wanted)")


def _dynamic_fields_late(facts: Facts) -> _Verdict:
    probes = facts.probes
    if probes.repeat_cached_tokens is None or probes.prompt_tokens is None:
        return _unverifiable(probes.problem or "the target doesn't report cached tokens")
    cached, tokens = probes.repeat_cached_tokens, probes.prompt_tokens
    seen = f"the same chat a second later finds {cached} of {tokens} tokens cached"
    if cached >= tokens - BLOCK_TOLERANCE_TOKENS:
        return "passed", f"{seen}: nothing that changes stands early in template or gateway"
    return "failed", (
        f"{seen}: something that changes stands early (a date in the template?), caching is off, or the repeat went to "
        "another worker"
    )


def _block_level(facts: Facts) -> _Verdict:
    probes = facts.probes
    if probes.half_cached_tokens is None or probes.prompt_tokens is None:
        return _unverifiable(probes.problem or "the target doesn't report cached tokens")
    share = probes.half_cached_tokens / probes.prompt_tokens
    return _judged(
        0.3 <= share <= 0.7, f"a chat that shares half its prompt finds {share:.0%} of it cached (about a half wanted)"
    )


def _load(facts: Facts) -> _Verdict:
    if facts.config is None:
        return _unverifiable("needs --config with the router's policy")
    policy = facts.config.router.policy
    needs = make_policy(policy.name, seed=policy.seed, options=policy.options).needs
    looks = needs.cache_view or needs.tokens or needs.text
    weighs = weighs_load(policy)
    if looks and weighs is None:
        return _unverifiable(f"policy {policy.name} keeps its own account of load: `prefixwatch simulate` shows it")
    return _judged(
        looks and weighs is True,
        f"policy {policy.name} {'looks' if looks else 'does not look'} at prompts or caches, and in trials "
        f"{'leaves' if weighs else 'does not leave'} an overloaded worker and "
        f"{'leaves' if weighs_memory(policy) else 'does not leave'} one that is full but otherwise equal",
    )


def _weak_consistency(facts: Facts) -> _Verdict:
    missed, ratio = facts.metrics.get("missed_batches"), facts.metrics.get("predicted_over_delivered")
    if missed is None and ratio is None:
        return _unverifiable("needs metrics of traffic: event batches missed, and expected against delivered tokens")
    parts = []
    if missed is not None:
        parts.append(f"{missed:.0f} event batches were lost for good")
    if ratio is not None:
        parts.append(f"the router expects {ratio:.2f} times what engines deliver")
    return _judged(not missed and (ratio is None or 0.5 <= ratio <= 2), ", ".join(parts))


def _hit_tokens_recorded(facts: Facts) -> _Verdict:
    series = facts.metrics.get("hit_token_series")
    if series:
        return _judged(True, f"{series:.0f} series of prefixwatch_prefix_hit_tokens_total")
    if facts.metrics:
        return _judged(False, "no series of prefixwatch_prefix_hit_tokens_total: does the exporter reach the engines?")
    if facts.probes.repeat_cached_tokens is not None:
        return _judged(True, "answers report cached tokens in usage.prompt_tokens_details")
    return _unverifiable("needs --prometheus or --exporter, or a target that reports cached tokens")


def _ttft_split(facts: Facts) -> _Verdict:
    if not facts.metrics:
        return _unverifiable("needs --prometheus or --exporter")
    classes = facts.metrics.get("ttft_classes") or 0
    return _judged(classes >= 2, f"TTFT is kept for {classes:.0f} of hit, partial and miss (at least 2 wanted)")


def _hotspot_protection(facts: Facts) -> _Verdict:
    ratio = facts.metrics.get("max_over_mean")
    if ratio is None:
        return _unverifiable("needs metrics of a fleet under load: at least a request running on average")
    return _judged(ratio <= 1.5, f"under load the busiest worker has {ratio:.2f} times the mean (1.5 at most)")


def _transfer_break_even(facts: Facts) -> _Verdict:
    tokens = facts.metrics.get("break_even_tokens")
    if tokens is None:
        return _unverifiable("no KV transfer is measured: nothing is moved between workers or tiers here")
    return _judged(tokens <= 8192, f"moving KV pays from {tokens:.0f} tokens on (8192 at most)")


def _tenant_salt(facts: Facts) -> _Verdict:
    probes = facts.probes
    config = facts.config
    configured = config.tenants if config and config.router.identity.secrets_file is None else []
    unsalted = [tenant.name for tenant in configured if tenant.salt is None]
    if unsalted:
        return _judged(False, f"tenants without a salt: {', '.join(unsalted)}")
    if probes.other_tenant_cached_tokens is None:
        return _unverifiable(probes.problem or "the target doesn't report cached tokens")
    first, second = probes.tenants
    if probes.other_tenant_cached_tokens >= BLOCK_TOLERANCE_TOKENS:
        return _judged(
            False, f"tenant {second} found {probes.other_tenant_cached_tokens} tokens cached of what {first} sent"
        )
    if not probes.repeat_cached_tokens:
        return _unverifiable("no tenant found anything cached, not even its own: with caching off this proves nothing")
    return _judged(True, f"tenant {second} found nothing of what {first} sent, and {first} found its own")


def _hashing(facts: Facts) -> _Verdict:
    config = facts.config
    several = config is None or len(config.tenants) > 1 or config.router.identity.authenticates
    safe, evidence = judge_hashing(facts.hash_algorithms, several_tenants=several)
    return _unverifiable(evidence) if safe is None else _judged(safe, evidence)


def _tokenizer(facts: Facts) -> _Verdict:
    if facts.tokens_equal is None:
        return _unverifiable(facts.tokens_why)
    return _judged(facts.tokens_equal, facts.tokens_why)


def _fallback(facts: Facts) -> _Verdict:
    if facts.probes.uncached_answered is None:
        return _unverifiable(facts.probes.problem)
    answered = "answered" if facts.probes.uncached_answered else "not answered"
    return _judged(
        facts.probes.uncached_answered,
        f"prompts that no cache holds are {answered}; a router that lost its index is a drill: "
        "`prefixwatch drill router-blind`",
    )


def _budgets_kept(facts: Facts) -> _Verdict:
    """A budget of 30 days in a Prometheus that keeps 15 is the budget of half its window, and nothing shows it."""
    days = facts.metrics.get("longest_window_days")
    if days is None:
        return _unverifiable("needs --prometheus with the rules of `prefixwatch slo build` loaded")
    kept = facts.retention.partition(" ")[0]
    try:
        kept_days = seconds(kept) / 86_400
    except ValueError:
        return _unverifiable(
            f"the longest objective has a window of {days:g} days, and this store doesn't say what it keeps"
        )
    return _judged(
        kept_days >= days,
        f"Prometheus keeps {facts.retention}, and the longest objective has a window of {days:g} days "
        "(--storage.tsdb.retention.time)",
    )


_ITEMS: Mapping[str, Callable[[Facts], _Verdict]] = {
    "Prompt order is stable": _prompt_order,
    "Dynamic fields stand late": _dynamic_fields_late,
    "Prefixes match by block": _block_level,
    "The router considers load": _load,
    "The index copes with weak consistency": _weak_consistency,
    "Hit tokens are recorded": _hit_tokens_recorded,
    "TTFT is split by hit and miss": _ttft_split,
    "Hotspots are guarded against": _hotspot_protection,
    "Transfers pay": _transfer_break_even,
    "Tenants are salted": _tenant_salt,
    "Block hashes can't be forged": _hashing,
    "Tokenizer and template agree": _tokenizer,
    "It works without the cache": _fallback,
    "Error budgets are kept": _budgets_kept,
}


_TRIALS = 20
_TOKENS = 1024
_BLOCK_SIZE = 16
_MOST = 0.9


LOAD_BLIND = frozenset({"round_robin", "session", "prefixaware", "kvaware"})
"""Policies that look at no load by design."""


def weighs_load(config: PolicyConfig) -> bool | None:
    """Whether nearly all of some prompts go to the idle worker; chance alone, or a ring, sends it half of them.

    None for a policy that keeps books of its own, which a trial of single decisions doesn't fill.
    """
    if config.name in LOAD_BLIND:
        return False
    holder = Worker(
        "holder",
        in_flight=200,
        prefill_tokens=400_000,
        served=200,
        report=LoadReport(0.0, running=128, waiting=72, kv_usage_ratio=0.99, waiting_uncached_tokens=400_000),
    )
    idle = Worker("idle", report=LoadReport(0.0, running=0, waiting=0, kv_usage_ratio=0.0, waiting_uncached_tokens=0))
    return True if _leaves(config, holder, idle, holds=True) else None


def weighs_memory(config: PolicyConfig) -> bool:
    """Whether nearly all of some prompts go to the worker with free KV memory, of two that differ in nothing else."""
    full, roomy = (
        Worker(name, report=LoadReport(0.0, running=8, waiting=0, kv_usage_ratio=usage, kv_capacity_tokens=100_000))
        for name, usage in (("full", 0.99), ("roomy", 0.3))
    )
    return _leaves(config, full, roomy, holds=False)


def _leaves(config: PolicyConfig, left: Worker, other: Worker, *, holds: bool) -> bool:
    """Whether the trials go to `other`; with `holds`, `left` has their whole prompts cached."""
    policy = make_policy(config.name, seed=config.seed, options=config.options)
    tokens = np.arange(_TOKENS, dtype=np.uint32)
    blocks = block_hashes(tokens, _BLOCK_SIZE)
    fleet = Fleet([left, other], lambda _request: {left.name: len(blocks)} if holds else {}, 0.0, "events")
    trials = (
        RouteRequest(
            f"r{number}", _TOKENS, tokens, blocks, _BLOCK_SIZE, 16, session=f"s{number}", text=f"prompt {number}"
        )
        for number in range(_TRIALS)
    )
    return sum(policy.choose(request, fleet).worker == other.name for request in trials) >= _MOST * _TRIALS
