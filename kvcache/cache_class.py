"""The one definition of hit, partial hit and miss: how much of what could be reused of a prompt an engine reused.

* `hit`: all full blocks that could be reused were reused. `partial`: some. `miss`: none. `unknown`: the engine did not
  report its cached tokens.
* What could be reused is the *reusable* part where somebody knows it: the load test's plan, or the router's own record
  of what was sent before. Otherwise it is the *whole prompt*. The basis is reported with each class.
* An engine that reuses tokens although nothing was known to be reusable shows that the knowledge was incomplete: the
  basis is the whole prompt then.

Engines compute at least the last prompt token, so a prompt of exactly k blocks can reuse k - 1 of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Texts = npt.NDArray[np.object_]

HIT, PARTIAL, MISS, UNKNOWN = "hit", "partial", "miss", "unknown"
CACHE_CLASSES = (HIT, PARTIAL, MISS)
REUSABLE, WHOLE_PROMPT = "reusable", "whole_prompt"
BASES = (REUSABLE, WHOLE_PROMPT)


class CacheClass(NamedTuple):
    """A request's class, and what it was measured against."""

    name: str
    basis: str
    """`reusable` or `whole_prompt`; empty for an unknown class."""


def reusable_part(tokens: int, prompt_tokens: int, block_size: int) -> int:
    """Tokens in full blocks that an engine can reuse of a prompt whose first `tokens` are cached."""
    return max(0, min(tokens, prompt_tokens - 1)) // block_size * block_size


def cache_class(
    prompt_tokens: int | None, cached_tokens: int | None, block_size: int, reusable_tokens: int | None = None
) -> CacheClass:
    """The class of one request. `reusable_tokens`: the opening of the prompt that could have been reused, if known."""
    if cached_tokens is None or prompt_tokens is None:
        return CacheClass(UNKNOWN, "")
    if cached_tokens <= 0:
        return CacheClass(MISS, WHOLE_PROMPT if reusable_tokens is None else REUSABLE)
    known = reusable_part(reusable_tokens or 0, prompt_tokens, block_size)
    limit = known or reusable_part(prompt_tokens, prompt_tokens, block_size)
    return CacheClass(HIT if cached_tokens >= limit else PARTIAL, REUSABLE if known else WHOLE_PROMPT)


def cache_classes(
    prompt_tokens: Floats, cached_tokens: Floats, block_size: int, reusable_tokens: Floats
) -> tuple[Texts, Texts]:
    """Classes and bases of many requests at once, as `cache_class` gives them. NaN is unknown."""
    known = np.nan_to_num(reusable_parts(reusable_tokens, prompt_tokens, block_size))
    limit = np.where(known > 0, known, reusable_parts(prompt_tokens, prompt_tokens, block_size))
    reused = cached_tokens > 0
    by_record = np.where(reused, known > 0, ~np.isnan(reusable_tokens))
    unknown = np.isnan(cached_tokens) | np.isnan(prompt_tokens)
    names = np.full(len(prompt_tokens), MISS, dtype=object)
    names[reused] = PARTIAL
    names[reused & (cached_tokens >= limit)] = HIT
    names[unknown] = UNKNOWN
    bases = np.full(len(prompt_tokens), WHOLE_PROMPT, dtype=object)
    bases[by_record] = REUSABLE
    bases[unknown] = ""
    return names, bases


def reusable_parts(tokens: Floats, prompt_tokens: Floats, block_size: int) -> Floats:
    """`reusable_part` of many prompts at once; NaN where either is NaN."""
    blocks = np.floor(np.minimum(tokens, prompt_tokens - 1) / block_size)
    return np.asarray(np.maximum(0.0, blocks * block_size), dtype=np.float64)
