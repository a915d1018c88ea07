"""The routing policies, by name: one file each, with its formula, defaults, tie rule and source."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from router.policies.affinity import Affinity
from router.policies.aibrix_prefix_cache import AibrixPrefixCache
from router.policies.cache_aware import CacheAware
from router.policies.cache_aware_v1 import CacheAwareV1
from router.policies.dynamo_kv import DynamoKv
from router.policies.flexlb_decode import FlexLbDecode
from router.policies.flexlb_formula import FlexLbFormula
from router.policies.flexlb_learning import FlexLbLearning
from router.policies.kvaware import KvAware
from router.policies.least_load import LeastLoad
from router.policies.llmd_approx import LlmdApprox
from router.policies.llmd_precise import LlmdPrecise
from router.policies.loadaware import LoadAware
from router.policies.loadaware_tokens import LoadAwareTokens
from router.policies.mooncake import Mooncake
from router.policies.oracle import Oracle
from router.policies.power_of_two import PowerOfTwo
from router.policies.preble import Preble
from router.policies.prefix_hash import PrefixHash
from router.policies.prefix_hash_v1 import PrefixHashV1
from router.policies.prefixaware import PrefixAware
from router.policies.round_robin import RoundRobin
from router.policies.score import Score
from router.policies.session import Session
from router.policy import Policy

POLICIES: Mapping[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        RoundRobin,
        LeastLoad,
        PowerOfTwo,
        Session,
        PrefixHash,
        PrefixHashV1,
        CacheAware,
        CacheAwareV1,
        PrefixAware,
        KvAware,
        LoadAware,
        LoadAwareTokens,
        FlexLbFormula,
        FlexLbLearning,
        FlexLbDecode,
        DynamoKv,
        LlmdPrecise,
        LlmdApprox,
        Preble,
        AibrixPrefixCache,
        Mooncake,
        Affinity,
        Score,
        Oracle,
    )
}


def make_policy(name: str, *, seed: int = 0, options: Mapping[str, Any] | None = None) -> Policy:
    """A fresh policy. Raises ValueError for an unknown name, an unknown option or an option of the wrong type."""
    policy = POLICIES.get(name)
    if policy is None:
        close = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"unknown policy '{name}'{hint}; known policies: {', '.join(POLICIES)}")
    return policy(seed=seed, **(options or {}))


def describe() -> list[dict[str, Any]]:
    """What `prefixwatch policies` prints: one entry a policy, JSON-ready."""
    return [_description(policy) for policy in POLICIES.values()]


def _description(policy: type[Policy]) -> dict[str, Any]:
    needs = policy.needs
    return {
        "name": policy.name,
        "summary": (policy.__doc__ or "").strip().splitlines()[0],
        "source": policy.source,
        "needs": {
            "tokens": needs.tokens,
            "text": needs.text,
            "events": needs.events,
            "load": needs.engine_load,
            "history": needs.cache_view and not needs.events,
        },
        "deterministic": policy.deterministic,
        "defaults": asdict(policy.Options()),
        "reasons": list(policy.reasons),
    }
