"""Reuse across tenants, with its cause and the requests that show it.

* `cross_tenant_hit`: an engine reused more of a prompt than its tenant had ever sent, and nobody here is known to have
  sent it.
* `salt_ignored`: what was reused had been sent under another salt: the engine doesn't keep salts apart.
* `salt_reused`: two tenants have the same salt, so their blocks are the same.
* `tenant_without_salt`: a tenant's requests carry no salt although several tenants use the engines.
* `salt_per_request`: each of a tenant's requests has a salt of its own, so nothing is ever reused.
* `stored_unsalted`, `stored_salt_shared`: two tenants' prompts run through the same blocks of an engine, which its KV
  events show to be stored without a salt, or under one that both have; see `exporters.isolation.shared_namespaces`.
* `fast_cold_prompt`: prompts that are cold for their tenant get their first token as soon as hits; see
  `kvcache.fast_first_tokens`.

Pure and bounded. Salts come as namespace roots (`kvcache.blocks.namespace_root`), never as text. Openings are compared
by digests of their tokens at a few lengths, whatever the salt, so that the request that filled a cache is found. A
finding of reuse is certain only if the worker was filled by nobody else than the requests that were passed here; the
caller knows that, or `exporters.isolation.verdicts`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from prefixwatch.kvcache.blocks import Tokens

OPENING_TOKENS = (64, 512, 4096)
"""Lengths at which openings are compared. A reuse of fewer tokens has no source that could be named."""
SALTS_IN_A_ROW = 8
"""Requests of a tenant, each with another salt, from which on its salts are said to be per request."""
_OPENINGS = 65_536
_SOURCES_PER_OPENING = 4

NOBODY, ANOTHER_TENANT = "nobody", "another_tenant"
"""Who had sent a prompt's opening before."""


class FindingKind(StrEnum):
    CROSS_TENANT_HIT = "cross_tenant_hit"
    SALT_IGNORED = "salt_ignored"
    SALT_REUSED = "salt_reused"
    TENANT_WITHOUT_SALT = "tenant_without_salt"
    SALT_PER_REQUEST = "salt_per_request"
    STORED_UNSALTED = "stored_unsalted"
    STORED_SALT_SHARED = "stored_salt_shared"
    FAST_COLD_PROMPT = "fast_cold_prompt"


@dataclass(frozen=True, slots=True)
class Finding:
    """`evidence`: ids of requests, the one that shows it first, then those that explain it."""

    kind: FindingKind
    tenant: str
    evidence: tuple[str, ...]
    other_tenant: str = ""
    """Whose blocks were reused, or who has the same salt; empty if unknown."""
    tokens: int = 0
    """Prompt tokens reused beyond the tenant's own; 0 where nothing was reused yet."""


class _Source(NamedTuple):
    tenant: str
    salt: int | None
    request: str


@dataclass(slots=True)
class _Tenant:
    request: str = ""
    """Its last one."""
    new_salts: int = 0
    """Requests in a row whose salts nobody had used before."""


class SentOpening(NamedTuple):
    """One request as it was sent."""

    request: str
    tenant: str
    salt: int | None
    digests: tuple[tuple[int, int], ...]
    """(length, digest) of its openings."""
    sent_by: str
    """Who had sent it before: `ANOTHER_TENANT` the longest of these openings, `NOBODY` even the shortest; empty
    otherwise."""


class IsolationWatch:
    """Remembers who sent which openings under which salt.

    At most `tenants` tenants: the one that was idle longest is forgotten first.
    """

    def __init__(self, tenants: int = 10_000) -> None:
        self._limit = tenants
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._sources: OrderedDict[int, tuple[_Source, ...]] = OrderedDict()
        """By the digest of an opening, its last senders."""
        self._by_salt: OrderedDict[int, _Source] = OrderedDict()

    def sent(self, request: str, tenant: str, salt: int | None, tokens: Tokens) -> tuple[SentOpening, Finding | None]:
        """A request is being sent. Return what to pass to `answered`, and what its salt shows by itself.

        Without tokens only the salt is judged.
        """
        own = _Source(tenant, salt, request)
        finding = self._judge_salt(own) if tenant else None
        digests = _digests(tokens)
        sent_by = ""
        sources: tuple[_Source, ...] | None = None
        for position, (_, digest) in enumerate(digests):
            sources = self._sources.get(digest)
            if sources is None:
                self._sources[digest] = (own,)
                sent_by = sent_by if position else NOBODY
            else:
                self._sources[digest] = (*_without(sources, tenant, salt)[1 - _SOURCES_PER_OPENING :], own)
                self._sources.move_to_end(digest)
        if sources and any(each.tenant != tenant for each in sources):
            sent_by = ANOTHER_TENANT
        while len(self._sources) > _OPENINGS:
            self._sources.popitem(last=False)
        return SentOpening(request, tenant, salt, digests, sent_by), finding

    def answered(
        self, opening: SentOpening, cached_tokens: int | None, own_tokens: int | None, block_size: int
    ) -> Finding | None:
        """What an engine's report of its cached tokens shows. None where all of it is the tenant's own, or unknown.

        `own_tokens`: what the tenant itself had sent of the prompt (`kvcache.tenant_memory`).
        """
        if cached_tokens is None or own_tokens is None or cached_tokens < own_tokens + block_size:
            return None
        beyond = cached_tokens - own_tokens
        comparable = [digest for length, digest in opening.digests if own_tokens < length <= cached_tokens]
        found = next((source for key in reversed(comparable) if (source := self._source(opening, key))), None)
        if found is None:
            return Finding(FindingKind.CROSS_TENANT_HIT, opening.tenant, (opening.request,), tokens=beyond)
        kind = FindingKind.SALT_IGNORED
        if found.salt == opening.salt:
            kind = FindingKind.TENANT_WITHOUT_SALT if opening.salt is None else FindingKind.SALT_REUSED
        other = found.tenant if found.tenant != opening.tenant else ""
        return Finding(kind, opening.tenant, (opening.request, found.request), other, beyond)

    def _source(self, opening: SentOpening, digest: int) -> _Source | None:
        """Who else sent this opening: another tenant, or this one under another salt; the latest."""
        sources = _without(self._sources.get(digest, ()), opening.tenant, opening.salt)
        others = [source for source in sources if source.tenant != opening.tenant]
        found = others or sources
        return found[-1] if found else None

    def _judge_salt(self, own: _Source) -> Finding | None:
        """What the salts of this tenant's requests, or the lack of one, show."""
        tenant, found = self._tenant(own.tenant), None
        if own.salt is None:
            tenant.new_salts = 0
            other = next((name for name in reversed(self._tenants) if name != own.tenant), None)
            if other is not None:
                evidence = own.request, self._tenants[other].request
                found = Finding(FindingKind.TENANT_WITHOUT_SALT, own.tenant, evidence, other)
        else:
            before = self._by_salt.get(own.salt)
            tenant.new_salts = tenant.new_salts + 1 if before is None else 0
            if before is not None and before.tenant != own.tenant:
                evidence = own.request, before.request
                found = Finding(FindingKind.SALT_REUSED, own.tenant, evidence, before.tenant)
            elif tenant.new_salts >= SALTS_IN_A_ROW:
                found = Finding(FindingKind.SALT_PER_REQUEST, own.tenant, (own.request, tenant.request))
            self._by_salt[own.salt] = own
            self._by_salt.move_to_end(own.salt)
            if len(self._by_salt) > _OPENINGS:
                self._by_salt.popitem(last=False)
        tenant.request = own.request
        return found

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant()
            if len(self._tenants) > self._limit:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(name)
        return tenant


def _without(sources: tuple[_Source, ...], tenant: str, salt: int | None) -> tuple[_Source, ...]:
    """The sources but those of this tenant under this salt."""
    if len(sources) == 1 and sources[0].salt == salt and sources[0].tenant == tenant:  # most openings
        return ()
    return tuple([each for each in sources if each.salt != salt or each.tenant != tenant])


def _digests(tokens: Tokens) -> tuple[tuple[int, int], ...]:
    data, most = tokens.data.cast("B"), len(tokens)
    return tuple([(length, xxh3_64_intdigest(data[: 4 * length])) for length in OPENING_TOKENS if length <= most])
