"""Token blocks and their chained hashes.

A prompt is cut into full blocks of `block_size` tokens. A block's *content hash* is XXH3-64 over its token
ids (u32 little-endian, seed 1337); its *chain hash* also covers every block before it, so two equal chain
hashes mean two equal openings:

    chain[0] = content[0]                              (or XXH3(root ‖ content[0]) inside a namespace)
    chain[k] = XXH3-64(chain[k-1] as LE8 ‖ content[k] as LE8, seed 1337)

A namespace (tenant salt, LoRA adapter) is a root in front of the chain: other namespace, no shared hash.
Multimodal keys are sorted and appended as u64 to the tokens of the block they fall into.

The scheme is NVIDIA Dynamo's (`compute_block_hash_for_seq`, lib/kv-router), so its indexers can be compared
with ours number by number; engines' own block ids are never matched, they are re-hashed from token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from struct import Struct
from types import ModuleType

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

DEFAULT_BLOCK_SIZE = 16
"""Tokens."""

SEED = 1337

Tokens = npt.NDArray[np.uint32]
Hashes = npt.NDArray[np.uint64]

_KERNEL_BLOCK_SIZES = (16, 32)
_pack_pair = Struct("<QQ").pack


class TokenIdsError(ValueError):
    """Something that should be a flat list of token ids isn't one."""


def as_tokens(ids: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """Token ids as the array that all hashing takes: one dimension, unsigned 32-bit, contiguous, little-endian.

    Raises TokenIdsError for anything but a flat list of integers, and for an id that 32 bits can't hold: wrapped
    around, it would collide with another's.
    """
    try:
        given = np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise TokenIdsError("token ids must be a flat list of integers") from error
    if given.ndim != 1:
        raise TokenIdsError(f"token ids must be a flat list of integers, not nested {given.ndim} deep")
    if not given.size:
        return np.empty(0, dtype="<u4")
    if given.dtype.kind not in "iu" or (given.dtype != np.uint32 and not (given.min() >= 0 and given.max() < 2**32)):
        raise TokenIdsError("token ids must be integers from 0 to 2^32 - 1")
    return np.ascontiguousarray(given, dtype="<u4")


@cache
def _kernel() -> ModuleType | None:
    """The compiled hashes, loaded when something is first hashed; None without numba, the optional extra "fast"."""
    try:
        from prefixwatch.kvcache import xxh3_kernel  # noqa: PLC0415  # numba takes 60 MB
    except ImportError:
        return None
    return xxh3_kernel


def multimodal_key(identifier: str | bytes, offset: int) -> int:
    """The u64 key of an image, audio clip or the like inside a block.

    `identifier` is the engine's digest of the item, `offset` where it starts, in tokens from the start of the
    block (negative: in an earlier block).
    """
    raw = identifier.encode() if isinstance(identifier, str) else identifier
    return xxh3_64_intdigest(raw + (offset % 2**64).to_bytes(8, "little"), SEED)


def namespace_root(salt: str | None = None, lora: str | None = None, extra_key: str | None = None) -> int | None:
    """The chain's root for a tenant salt, a LoRA adapter and SGLang's extra key; None for the public namespace."""
    framed = framed_namespace(salt, lora, extra_key)
    return None if framed is None else xxh3_64_intdigest(framed, SEED)


def framed_namespace(salt: str | None = None, lora: str | None = None, extra_key: str | None = None) -> bytes | None:
    """The parts of a namespace as bytes, tagged and length-prefixed so that ("ab", "c") and ("a", "bc") differ."""
    if not salt and not lora and not extra_key:
        return None
    parts = bytearray()
    for tag, value in ((b"s", salt), (b"l", lora), *(((b"e", extra_key),) if extra_key else ())):
        raw = (value or "").encode("utf-8", "surrogatepass")
        parts += tag + len(raw).to_bytes(4, "little") + raw
    return bytes(parts)


def content_hashes(
    tokens: Tokens, block_size: int = DEFAULT_BLOCK_SIZE, multimodal: Mapping[int, Sequence[int]] | None = None
) -> Hashes:
    """Content hash of each full block; `multimodal` maps a block's position to the u64 keys inside it."""
    kernel = _kernel() if block_size in _KERNEL_BLOCK_SIZES else None
    if kernel is None:
        width, data = 4 * block_size, memoryview(tokens.tobytes())
        ends = range(width, len(data) + 1, width)
        hashes = np.array([xxh3_64_intdigest(data[end - width : end], SEED) for end in ends], dtype=np.uint64)
    else:
        hashes = kernel.content_hashes(tokens, block_size, SEED)
    for position, keys in (multimodal or {}).items():
        if 0 <= position < len(hashes):
            block = tokens[position * block_size : (position + 1) * block_size]
            extra = b"".join(key.to_bytes(8, "little") for key in sorted(keys))
            hashes[position] = xxh3_64_intdigest(block.tobytes() + extra, SEED)
    return hashes


def chain(contents: Hashes, root: int | None = None) -> Hashes:
    """Chain hashes of blocks with these content hashes, after `root` (a namespace, or the parent block)."""
    chained = []
    previous = root
    for content in contents.tolist():
        previous = content if previous is None else xxh3_64_intdigest(_pack_pair(previous, content), SEED)
        chained.append(previous)
    return np.array(chained, dtype=np.uint64)


def block_hashes(
    tokens: Tokens,
    block_size: int = DEFAULT_BLOCK_SIZE,
    *,
    root: int | None = None,
    multimodal: Mapping[int, Sequence[int]] | None = None,
) -> Hashes:
    """Chain hash of each full block of `tokens`; a trailing partial block has none.

    `root` is a `namespace_root`, or the chain hash of the block before the first token.
    Raises ValueError for a block size below 1.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1 token, got {block_size}")
    ids = as_tokens(tokens)
    if not multimodal:
        kernel = _kernel() if block_size in _KERNEL_BLOCK_SIZES else None
        if kernel is not None:
            hashes: Hashes = kernel.chain_hashes(ids, block_size, root, SEED)
            return hashes
        return _chain_of_tokens(ids, block_size, root)
    return chain(content_hashes(ids, block_size, multimodal), root)


def _chain_of_tokens(tokens: Tokens, block_size: int, root: int | None) -> Hashes:
    """`chain` of `content_hashes` in one loop, which takes half the time."""
    width, data = 4 * block_size, memoryview(tokens.tobytes())
    chained = []
    previous = root
    for end in range(width, len(data) + 1, width):
        content = xxh3_64_intdigest(data[end - width : end], SEED)
        previous = content if previous is None else xxh3_64_intdigest(_pack_pair(previous, content), SEED)
        chained.append(previous)
    return np.array(chained, dtype=np.uint64)
