"""Prompts that a log has as token ids, as block ids: equal ids mean equal tokens up to and including the block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from prefixwatch.kvcache.blocks import block_hashes

TOKEN_BLOCK = 16
"""Tokens per block id."""


def block_ids_of(tokens: Sequence[int]) -> tuple[int, ...]:
    """One id for every `TOKEN_BLOCK` tokens, the last one for a partial block too."""
    ids = np.asarray(tokens, dtype=np.uint32)
    full: list[int] = block_hashes(ids, TOKEN_BLOCK).tolist()
    rest = ids[len(full) * TOKEN_BLOCK :].tobytes()
    if not rest:
        return tuple(full)
    before = full[-1] if full else 0
    return (*full, xxh3_64_intdigest(before.to_bytes(8, "little") + rest))
