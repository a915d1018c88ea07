"""From samples to a verdict that names what it rests on. Pure.

*Isolated* needs two things: the attacker's own repeats hit, so the cache is on, and a leak that looked like these hits
would have been found. Without either the finding is *inconclusive* and names what to raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from prefixwatch.loadgen.audit.plan import AuditSettings
from prefixwatch.loadgen.audit.samples import GPU_TIER, Arm, Probe, Samples
from prefixwatch.loadgen.audit.statistics import (
    DOUBT_LEVEL,
    LEAK_LEVEL,
    POWER,
    Floats,
    least_samples,
    rank_sum_p,
    resampled_power,
    separation,
)
from prefixwatch.slo.wilson import wilson

_HIT_SHARE = 0.1
"""Part of the shared prefix that must be reported as cached, beyond what cold probes report, to count as a hit."""
OUTER = "outer"

_SALT = "salt requests per tenant at the router, and switch off or empty tiers whose keys lack the salt"
_OWN_SALT = "let the router derive the salt from the authenticated tenant, and drop what clients send as cache_salt"

_Cached = Sequence[Sequence[int]]
"""Cached tokens of each cold probe, of each repeat of the attacker's own, and of each probe of the victim's."""


class State(StrEnum):
    """Of a finding, and of the whole audit."""

    LEAK = "leak"
    ISOLATED = "isolated"
    INCONCLUSIVE = "inconclusive"
    UNAVAILABLE = "unavailable"
    """The target doesn't show what this test needs; others may decide."""


EXIT_CODES = {State.ISOLATED: 0, State.LEAK: 1, State.INCONCLUSIVE: 3}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one test says of one tier."""

    test: str
    """`tokens`, `timing` or `order`."""
    tier: str
    """`all`, `gpu` or `outer`."""
    arm: Arm
    """`cross`, or `forged`."""
    state: State
    says: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the audit says."""

    state: State
    statement: str
    findings: Sequence[Finding]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.state]

    @property
    def remedies(self) -> list[str]:
        return list(dict.fromkeys(finding.remedy for finding in self.findings if finding.remedy))


def judge(samples: Samples, settings: AuditSettings) -> Verdict:
    """All tests that were asked for, and what they say together."""
    found: list[Finding] = []
    for arm in (Arm.CROSS, *([Arm.FORGED] if settings.forged else [])):
        if "tokens" in settings.tests:
            found += _token_findings(samples, arm, settings)
        if "timing" in settings.tests:
            found.append(_timing(samples, arm, settings, emptied=False))
            if settings.emptied:
                found.append(_timing(samples, arm, settings, emptied=True))
    if "order" in settings.tests:
        found.append(_order(samples, settings))
    state = _together([finding.state for finding in found])
    return Verdict(state, _statement(state, found, samples), found)


def _together(states: Sequence[State]) -> State:
    if State.LEAK in states:
        return State.LEAK
    if State.INCONCLUSIVE in states or State.ISOLATED not in states:
        return State.INCONCLUSIVE
    return State.ISOLATED


def _statement(state: State, findings: Sequence[Finding], samples: Samples) -> str:
    def named(wanted: State) -> str:
        return ", ".join(_name(finding) for finding in findings if finding.state is wanted)

    if state is State.LEAK:
        forged = all(finding.arm is Arm.FORGED for finding in findings if finding.state is State.LEAK)
        how = " by sending its salt" if forged else ""
        text = f"Leak: one tenant can see what another sent{how}. Shown by: {named(State.LEAK)}."
        if kept := named(State.ISOLATED):
            text += f" Isolated: {kept}."
    elif state is State.ISOLATED:
        text = f"Isolated. Shown by: {named(State.ISOLATED)}."
    else:
        text = f"Inconclusive: {named(State.INCONCLUSIVE) or 'nothing that was tested'} can't decide."
    if unavailable := named(State.UNAVAILABLE):
        text += f" Not tested: {unavailable}."
    return f"{text} Stopped early: {samples.stopped}." if samples.stopped else text


def _name(finding: Finding) -> str:
    tier = {"all": "all tiers", GPU_TIER: "GPU tier", OUTER: "outer tiers"}[finding.tier]
    forged = ", with the victim's salt" if finding.arm is Arm.FORGED else ""
    return f"{finding.test} ({tier}{forged})"


def _token_findings(samples: Samples, arm: Arm, settings: AuditSettings) -> list[Finding]:
    """Of all tiers, by the answers; and of GPU and outer tiers, by the engines' counters."""
    arms = (Arm.COLD, Arm.OWN, arm)
    found = [_tokens("all", arm, [_by_answers(samples.of(each)) for each in arms], settings)]
    tiered = [probe for probe in samples.probes if probe.tiers is not None]
    if not tiered:
        reason = "no engine's counters say which tier served a hit: name the engines with --engine"
        return [*found, *(Finding("tokens", tier, arm, State.UNAVAILABLE, reason) for tier in (GPU_TIER, OUTER))]
    for tier, emptied in ((GPU_TIER, False), (OUTER, settings.emptied)):
        cached = [_by_tier(samples.of(each, emptied=emptied), tier) for each in arms]
        found.append(_tokens(tier, arm, cached, settings))
    return found


def _tokens(tier: str, arm: Arm, cached: _Cached, settings: AuditSettings) -> Finding:
    cold, own, crossed = cached

    def finding(state: State, says: str, remedy: str = "") -> Finding:
        return Finding("tokens", tier, arm, state, says, remedy, figures)

    figures: dict[str, Any] = {"probes": len(crossed), "own_probes": len(own)}
    if not crossed or not own:
        why = "answers don't report cached tokens" if tier == "all" else "no probe's hit could be assigned to a tier"
        return finding(State.UNAVAILABLE, f"{why[0].upper()}{why[1:]}.", "")
    least = max(cold, default=0) + _HIT_SHARE * settings.shared_part * settings.prompt_tokens
    crossed_hits, own_hits = (sum(tokens >= least for tokens in each) for each in (crossed, own))
    figures |= {
        "hits": crossed_hits,
        "own_hits": own_hits,
        "most_cached_tokens": max(crossed),
        "own_most_cached_tokens": max(own),
        "cold_most_cached_tokens": max(cold, default=0),
    }
    if crossed_hits:
        return finding(
            State.LEAK,
            f"{crossed_hits} of {len(crossed)} probes of what the victim sent reused up to {max(crossed):,} cached "
            f"tokens; cold probes reused at most {max(cold, default=0):,}.",
            _OWN_SALT if arm is Arm.FORGED else _SALT,
        )
    if not own_hits:
        if tier == OUTER and not settings.emptied:
            return finding(
                State.UNAVAILABLE,
                "No probe of either tenant was served by an outer tier: there is none, or the GPU tier served all.",
            )
        return finding(
            State.INCONCLUSIVE,
            "The attacker's own repeats didn't hit: the cache is off, prompts are shorter than a block, or repeats "
            "reach another replica.",
            "switch prefix caching on, or raise --prompt-tokens, --pause or --victim-requests",
        )
    share = (wilson(own_hits, len(own)) or (0.0, 1.0))[0]
    power = 1 - (1 - share) ** len(crossed)
    figures["power"] = power
    if power < POWER:
        return finding(
            State.INCONCLUSIVE,
            f"No hit in {len(crossed)} probes, but only {own_hits} of {len(own)} own repeats hit: power {power:.2f}.",
            "raise --samples or --victim-requests",
        )
    return finding(
        State.ISOLATED,
        f"0 of {len(crossed)} probes of what the victim sent hit; {own_hits} of {len(own)} own repeats did "
        f"(power {power:.4f}).",
    )


def _timing(samples: Samples, arm: Arm, settings: AuditSettings, *, emptied: bool) -> Finding:
    def finding(state: State, says: str, remedy: str = "") -> Finding:
        return Finding("timing", OUTER if emptied else "all", arm, state, says, remedy, figures)

    cold, own, crossed = (_seconds(samples.of(each, emptied=emptied)) for each in (Arm.COLD, Arm.OWN, arm))
    figures: dict[str, Any] = {"probes": len(crossed), "own_probes": len(own), "cold_probes": len(cold)}
    least = least_samples(LEAK_LEVEL)
    if min(map(len, (cold, own, crossed))) < least:
        return finding(
            State.INCONCLUSIVE,
            f"{min(map(len, (cold, own, crossed)))} samples per arm can't reach p < {LEAK_LEVEL:g}.",
            f"raise --samples to {least} or more",
        )
    between, control = separation(crossed, cold), separation(own, cold)
    power = resampled_power(own, cold, np.random.default_rng(0))
    figures |= {
        "p_value": between.p_value,
        "auc": between.auc,
        "auc_low": between.auc_low,
        "auc_high": between.auc_high,
        "median_seconds": between.median_first,
        "cold_median_seconds": between.median_second,
        "own_median_seconds": control.median_first,
        "own_p_value": control.p_value,
        "own_auc": control.auc,
        "power": power,
    }
    shown = f"p = {between.p_value:.2g}, AUC {between.auc:.2f} ({between.auc_low:.2f} … {between.auc_high:.2f})"
    if between.p_value < LEAK_LEVEL:
        return finding(
            State.LEAK,
            f"Probes of what the victim sent are faster than cold ones: {shown}; medians "
            f"{between.median_first * 1e3:.1f} and {between.median_second * 1e3:.1f} ms.",
            _OWN_SALT if arm is Arm.FORGED else _SALT,
        )
    if emptied and control.p_value >= LEAK_LEVEL:
        return finding(
            State.UNAVAILABLE,
            f"With the engines' caches emptied own repeats aren't faster than cold probes (p = {control.p_value:.2g}): "
            "no outer tier served them.",
        )
    if power < POWER:
        return finding(
            State.INCONCLUSIVE,
            f"Own repeats differ too little from cold probes (p = {control.p_value:.2g}, AUC {control.auc:.2f}): a "
            f"leak like them would be found with probability {power:.2f} only.",
            "raise --samples or --prompt-tokens, or audit while the target is idle; see that prefix caching is on",
        )
    if between.p_value < DOUBT_LEVEL:
        return finding(
            State.INCONCLUSIVE,
            f"Probes of what the victim sent look faster than cold ones, without certainty: {shown}.",
            "raise --samples and run it again",
        )
    return finding(
        State.ISOLATED,
        f"Probes of what the victim sent are as slow as cold ones: {shown}; own repeats are faster "
        f"(p = {control.p_value:.2g}, AUC {control.auc:.2f}, power {power:.2f}).",
    )


def _order(samples: Samples, settings: AuditSettings) -> Finding:
    def finding(state: State, says: str, remedy: str = "") -> Finding:
        return Finding("order", "all", Arm.CROSS, state, says, remedy, figures)

    crossed, own = samples.ranks(Arm.CROSS), samples.ranks(Arm.OWN)
    batch = settings.order_batch
    figures: dict[str, Any] = {"rounds": len(crossed), "batch": batch}
    if not crossed or not own:
        return finding(State.INCONCLUSIVE, "No batch was answered whole.", "raise --max-seconds or --order-rounds")
    p_value, own_p_value = rank_sum_p(crossed, batch), rank_sum_p(own, batch)
    figures |= {
        "p_value": p_value,
        "own_p_value": own_p_value,
        "mean_rank": float(np.mean(crossed)),
        "own_mean_rank": float(np.mean(own)),
    }
    shown = f"mean rank {np.mean(crossed):.1f} of {batch} in {len(crossed)} batches (p = {p_value:.2g})"
    if p_value < LEAK_LEVEL:
        return finding(
            State.LEAK,
            f"What the victim sent is answered first: {shown}.",
            "salt requests per tenant, and schedule in order of arrival rather than by longest prefix match",
        )
    if own_p_value >= LEAK_LEVEL:
        return finding(
            State.UNAVAILABLE,
            f"Own repeats aren't answered first either (mean rank {np.mean(own):.1f}, p = {own_p_value:.2g}): the "
            "order of answers doesn't follow the cache at this load. A larger --order-batch tests more.",
        )
    if p_value < DOUBT_LEVEL:
        return finding(State.INCONCLUSIVE, f"Without certainty: {shown}.", "raise --order-rounds and run it again")
    return finding(
        State.ISOLATED,
        f"What the victim sent isn't answered earlier than cold prompts: {shown}; own repeats are: mean rank "
        f"{np.mean(own):.1f} (p = {own_p_value:.2g}).",
    )


def _by_answers(probes: Sequence[Probe]) -> list[int]:
    return [probe.cached_tokens for probe in probes if probe.cached_tokens is not None]


def _by_tier(probes: Sequence[Probe], tier: str) -> list[int]:
    """Hit tokens in the GPU tier, or in all others together."""
    return [
        sum(tokens for name, tokens in probe.tiers.items() if (name == GPU_TIER) is (tier == GPU_TIER))
        for probe in probes
        if probe.tiers is not None
    ]


def _seconds(probes: Sequence[Probe]) -> Floats:
    return np.array([probe.seconds for probe in probes])
