"""The routing policies, by name: one file each, with its formula, defaults, tie rule and source.

Other packages add their own with the entry-point group `prefixwatch.policies`; see docs/policies.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import entry_points
from typing import Any

from prefixwatch.documents.hints import did_you_mean
from prefixwatch.router.errors import RouterError
from prefixwatch.router.policies.affinity import Affinity
from prefixwatch.router.policies.aibrix_prefix_cache import AibrixPrefixCache
from prefixwatch.router.policies.canary.policy import Canary
from prefixwatch.router.policies.dynamo.kv import DynamoKv
from prefixwatch.router.policies.flexlb.decode import FlexLbDecode
from prefixwatch.router.policies.flexlb.formula import FlexLbFormula
from prefixwatch.router.policies.flexlb.learning import FlexLbLearning
from prefixwatch.router.policies.least_load import LeastLoad
from prefixwatch.router.policies.llmd.approx import LlmdApprox
from prefixwatch.router.policies.llmd.precise import LlmdPrecise
from prefixwatch.router.policies.mooncake import Mooncake
from prefixwatch.router.policies.oracle import Oracle
from prefixwatch.router.policies.power_of_two import PowerOfTwo
from prefixwatch.router.policies.preble.policy import Preble
from prefixwatch.router.policies.production_stack.kvaware import KvAware
from prefixwatch.router.policies.production_stack.loadaware import LoadAware
from prefixwatch.router.policies.production_stack.loadaware_tokens import LoadAwareTokens
from prefixwatch.router.policies.production_stack.prefixaware import PrefixAware
from prefixwatch.router.policies.production_stack.session import Session
from prefixwatch.router.policies.round_robin import RoundRobin
from prefixwatch.router.policies.score import Score
from prefixwatch.router.policies.sglang.cache_aware import CacheAware
from prefixwatch.router.policies.sglang.cache_aware_v1 import CacheAwareV1
from prefixwatch.router.policies.sglang.prefix_hash import PrefixHash
from prefixwatch.router.policies.sglang.prefix_hash_v1 import PrefixHashV1
from prefixwatch.router.policies.spec import parse_spec
from prefixwatch.router.policies.topology import Topology
from prefixwatch.router.policy import Policy

PLUGIN_GROUP = "prefixwatch.policies"
_OWN: Mapping[str, type[Policy]] = {
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
        Topology,
        Oracle,
        Canary,
    )
}


def _with_plugins() -> Mapping[str, type[Policy]]:
    """Our own policies and those of installed packages. Raises RouterError for a plug-in that isn't a policy."""
    policies = dict(_OWN)
    for entry in entry_points(group=PLUGIN_GROUP):
        where = f"plug-in {entry.name} = {entry.value} of package {entry.dist.name if entry.dist else 'unknown'}"
        try:
            policy = entry.load()
        except Exception as error:  # code of others: it may raise anything
            raise RouterError(f"{where} can't be imported: {error!r}; correct or uninstall the package") from error
        if not (isinstance(policy, type) and issubclass(policy, Policy)):
            raise RouterError(f"{where} is not a subclass of prefixwatch.router.policy.Policy")
        if policy.name in policies:
            raise RouterError(f"{where}: another policy is called '{policy.name}'; give it another name")
        policies[policy.name] = policy
    return policies


POLICIES = _with_plugins()


def policy_class(name: str) -> type[Policy]:
    """The policy of this name, or of a spec such as `loadaware{beta=0.5}`. Raises ValueError for an unknown one."""
    name = parse_spec(name).name
    policy = POLICIES.get(name)
    if policy is None:
        raise ValueError(f"unknown policy '{name}': {did_you_mean(name, POLICIES)}")
    return policy


def make_policy(name: str, *, seed: int = 0, options: Mapping[str, Any] | None = None) -> Policy:
    """A fresh policy of this name or spec; `options` win over those of the spec.

    Raises ValueError for an unknown name, an unknown option or an option of the wrong type.
    """
    spec = parse_spec(name)
    policy = policy_class(name)(seed=seed, **{**spec.options, **(options or {})})
    policy.label = spec.label
    return policy


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
