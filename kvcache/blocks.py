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

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from kvcache.token_arrays import DEFAULT_BLOCK_SIZE, Hashes, Tokens, as_tokens

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "SEED",
    "Hashes",
    "Tokens",
    "as_tokens",
    "block_hashes",
    "chain",
    "content_hashes",
    "multimodal_key",
    "namespace_root",
]

SEED = 1337

_kernel: Callable[[Tokens, int, int | None, int], Hashes] | None
_content_kernel: Callable[[Tokens, int, int], Hashes] | None
try:
    from kvcache.xxh3_kernel import chain_hashes as _kernel
    from kvcache.xxh3_kernel import content_hashes as _content_kernel
except ImportError:  # numba is the optional extra "fast"
    _kernel = _content_kernel = None

_KERNEL_BLOCK_SIZES = (16, 32)


def multimodal_key(identifier: str | bytes, offset: int) -> int:
    """The u64 key of an image, audio clip or the like inside a block.

    `identifier` is the engine's digest of the item, `offset` where it starts, in tokens from the start of the
    block (negative: in an earlier block).
    """
    raw = identifier.encode() if isinstance(identifier, str) else identifier
    return xxh3_64_intdigest(raw + (offset % 2**64).to_bytes(8, "little"), SEED)


def namespace_root(salt: str | None = None, lora: str | None = None) -> int | None:
    """The chain's root for a tenant salt and a LoRA adapter; None for the public namespace.

    Fields are tagged and length-prefixed so that ("ab", "c") and ("a", "bc") differ.
    """
    if not salt and not lora:
        return None
    parts = bytearray()
    for tag, value in ((b"s", salt), (b"l", lora)):
        raw = (value or "").encode()
        parts += tag + len(raw).to_bytes(4, "little") + raw
    return xxh3_64_intdigest(bytes(parts), SEED)


def content_hashes(
    tokens: Tokens, block_size: int = DEFAULT_BLOCK_SIZE, multimodal: Mapping[int, Sequence[int]] | None = None
) -> Hashes:
    """Content hash of each full block; `multimodal` maps a block's position to the u64 keys inside it."""
    if _content_kernel is not None and not multimodal and block_size in _KERNEL_BLOCK_SIZES:
        return _content_kernel(as_tokens(tokens), block_size, SEED)
    data = memoryview(as_tokens(tokens).tobytes())
    width = 4 * block_size
    count = len(tokens) // block_size
    hashes = [xxh3_64_intdigest(data[k * width : (k + 1) * width], SEED) for k in range(count)]
    for position, keys in (multimodal or {}).items():
        if 0 <= position < count:
            block = bytes(data[position * width : (position + 1) * width])
            extra = b"".join(key.to_bytes(8, "little") for key in sorted(keys))
            hashes[position] = xxh3_64_intdigest(block + extra, SEED)
    return np.array(hashes, dtype=np.uint64)


def chain(contents: Sequence[int] | Hashes, root: int | None = None) -> Hashes:
    """Chain hashes of blocks with these content hashes, after `root` (a namespace, or the parent block)."""
    chained = np.empty(len(contents), dtype=np.uint64)
    previous = root
    for k, content in enumerate(int(c) for c in contents):
        if previous is not None:
            pair = previous.to_bytes(8, "little") + content.to_bytes(8, "little")
            previous = xxh3_64_intdigest(pair, SEED)
        else:
            previous = content
        chained[k] = previous
    return chained


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
    if _kernel is not None and not multimodal and block_size in _KERNEL_BLOCK_SIZES:
        return _kernel(as_tokens(tokens), block_size, root, SEED)
    return chain(content_hashes(tokens, block_size, multimodal), root)
