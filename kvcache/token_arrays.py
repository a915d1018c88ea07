"""Token ids and block hashes as arrays; apart from the hashing, whose compiled kernel takes a while to load."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

DEFAULT_BLOCK_SIZE = 16
"""Tokens."""

Tokens = npt.NDArray[np.uint32]
Hashes = npt.NDArray[np.uint64]


def as_tokens(ids: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """Token ids as the array that all hashing takes: unsigned 32-bit, contiguous, little-endian.

    Raises ValueError for an id that 32 bits can't hold: wrapped around, it would collide with another's.
    """
    if isinstance(ids, np.ndarray) and ids.dtype != np.uint32 and ids.size and not _fits(ids):
        raise ValueError("token ids must lie in 0 … 2^32 - 1")
    try:
        return np.ascontiguousarray(ids, dtype="<u4")
    except OverflowError as error:
        raise ValueError("token ids must lie in 0 … 2^32 - 1") from error


def _fits(ids: npt.NDArray[np.integer]) -> bool:
    return bool(ids.min() >= 0) and bool(ids.max() < 2**32)
