"""Why prompts that could share text don't: what each kind of difference costs, and the reuse without it. Pure.

A kind's loss is what it would still cost if all others were mended: the reuse of a cache without limit with all kinds
mended, less that with all but this one. Kinds hide each other (an id behind a time stamp gains nothing alone), so
losses don't add up; the last row has all together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from prefixwatch.kvcache.blocks import Tokens, block_hashes, namespace_root
from prefixwatch.kvcache.prompts.mending import KINDS, ChatPrompt, mended
from prefixwatch.kvcache.reuse import reuse_profile

Encode = Callable[[ChatPrompt], Tokens]
ALL = "all of these"


@dataclass(frozen=True, slots=True)
class SentPrompt:
    """A prompt with its text, and whose it was."""

    prompt: ChatPrompt
    tokens: Tokens
    tenant: str = ""
    model: str = ""
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class Cause:
    """One kind of difference; lengths in tokens."""

    kind: str
    title: str
    remedy: str
    requests: int
    """Prompts that have it."""
    lost_tokens: int
    """Reuse that it would still cost if all other kinds were mended."""
    ratio_after: float | None
    """Share of prompt tokens that a cache without limit reuses once this kind alone is mended."""


@dataclass(frozen=True, slots=True)
class TenantReuse:
    tenant: str
    requests: int
    prompt_tokens: int
    hit_ratio: float | None
    ratio_after: float | None
    """With every kind mended."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    hit_ratio: float | None
    causes: list[Cause]
    """Those that cost something, the dearest first; the last is all together, where there are several."""
    tenants: list[TenantReuse]
    by_block_size: dict[int, float | None]
    """Reuse of a cache without limit, by tokens per block."""


BLOCK_SIZES = (16, 32, 64, 128)


def diagnose(prompts: Sequence[SentPrompt], encode: Encode, block_size: int) -> Diagnosis:
    """The causes of lost reuse in these prompts, in their order."""
    before = _Reuse.of(prompts, [p.tokens for p in prompts], block_size)
    tokens, changed = _mended_tokens(prompts, encode, list(KINDS))
    after = _Reuse.of(prompts, tokens, block_size)
    found = []
    for name, kind in KINDS.items():
        tokens, requests = _mended_tokens(prompts, encode, [name])
        if requests:
            alone = _Reuse.of(prompts, tokens, block_size)
            rest, _ = _mended_tokens(prompts, encode, [other for other in KINDS if other != name])
            lost = after.total - _Reuse.of(prompts, rest, block_size).total
            found.append(Cause(name, kind.title, kind.remedy, requests, lost, alone.ratio))
    found += _namespaces(prompts, block_size, before)
    found = sorted((cause for cause in found if cause.lost_tokens > 0), key=lambda cause: -cause.lost_tokens)
    if len([cause for cause in found if cause.kind in KINDS]) > 1:
        lost = after.total - before.total
        found.append(Cause(ALL, "all that the prompts' authors can mend", "", changed, lost, after.ratio))
    return Diagnosis(
        hit_ratio=before.ratio,
        causes=found,
        tenants=_by_tenant(prompts, before, after),
        by_block_size={
            size: _Reuse.of(prompts, [p.tokens for p in prompts], size).ratio
            for size in sorted({block_size, *BLOCK_SIZES})
        },
    )


@dataclass(frozen=True, slots=True)
class _Reuse:
    hits: list[int]
    lengths: list[int]

    @classmethod
    def of(
        cls, prompts: Sequence[SentPrompt], tokens: Sequence[Tokens], block_size: int, *, shared: bool = False
    ) -> _Reuse:
        """`shared`: as if all had one model and no salt."""
        roots = [None if shared else namespace_root(p.salt, p.model or None) for p in prompts]
        blocks = [block_hashes(own, block_size, root=root) for own, root in zip(tokens, roots, strict=True)]
        reused = reuse_profile(blocks).reused_blocks * block_size
        lengths = [len(own) for own in tokens]
        return cls(np.minimum(reused, lengths).tolist(), lengths)

    @property
    def total(self) -> int:
        return sum(self.hits)

    @property
    def ratio(self) -> float | None:
        return self.total / sum(self.lengths) if sum(self.lengths) else None


def _mended_tokens(prompts: Sequence[SentPrompt], encode: Encode, kinds: Sequence[str]) -> tuple[list[Tokens], int]:
    """Token ids of the prompts without these kinds, and how many prompts had one of them."""
    found, changed = [], 0
    for sent in prompts:
        better = mended(sent.prompt, kinds)
        same = better == sent.prompt
        changed += not same
        found.append(sent.tokens if same else encode(better))
    return found, changed


def _namespaces(prompts: Sequence[SentPrompt], block_size: int, before: _Reuse) -> list[Cause]:
    """What models and salts keep apart: the price of several models or tokenizers, and of isolation."""
    if len({(p.model, p.salt) for p in prompts}) < 2:
        return []
    after = _Reuse.of(prompts, [p.tokens for p in prompts], block_size, shared=True)
    models, salts = len({p.model for p in prompts}) > 1, len({p.salt for p in prompts}) > 1
    title = " and ".join([*(["models or adapters"] if models else []), *(["cache salts"] if salts else [])])
    remedy = "serve equal prompts by one model" if not salts else "the price of isolation; share salts within a tenant"
    return [Cause("namespace", f"different {title}", remedy, len(prompts), after.total - before.total, after.ratio)]


def _by_tenant(prompts: Sequence[SentPrompt], before: _Reuse, after: _Reuse) -> list[TenantReuse]:
    rows: dict[str, list[int]] = defaultdict(list)
    for position, sent in enumerate(prompts):
        rows[sent.tenant or "-"].append(position)
    found = []
    for tenant, own in rows.items():
        tokens, later = sum(before.lengths[k] for k in own), sum(after.lengths[k] for k in own)
        hits, mended_hits = sum(before.hits[k] for k in own), sum(after.hits[k] for k in own)
        found.append(
            TenantReuse(
                tenant, len(own), tokens, hits / tokens if tokens else None, mended_hits / later if later else None
            )
        )
    return sorted(found, key=lambda reuse: -reuse.prompt_tokens)
