"""Block hashes under a secret key, for an index that several tenants write to.

XXH3 with a public seed, as in `kvcache.blocks`, is quick and not cryptographic: whoever knows the seed can look for two
prompts with one hash, and the index then believes that a worker holds what it doesn't. Here a block's state is BLAKE2b
(RFC 7693) with the key, of 128 bits:

    state[0] = BLAKE2b(key, root ‖ tokens ‖ keys of images and the like)      root: 128 bits of the namespace
    state[k] = BLAKE2b(key, state[k-1] ‖ tokens ‖ …)

Without the key no collision can be prepared, nor a hash be guessed. Two of n blocks have equal states with a
probability of n²/2^129. The index has room for 64 bits, a state's first half, so two of n are called the same with
n²/2^65; then one block is taken for another, but not what follows it, as states stay different.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from prefixwatch.kvcache.blocks import Hashes, Tokens, block_hashes, framed_namespace

NAME_MASK = 2**64 - 1
"""A state's part that the index knows the block by."""
_STATE_BYTES = 16
_PUBLIC = b"public"
"""The namespace of blocks without salt, adapter and extra key: none of `framed_namespace` begins so."""


class BlockKey:
    """Hashes blocks under a secret of at least 32 characters. No `repr` shows it."""

    def __init__(self, secret: str) -> None:
        key = hashlib.blake2b(secret.encode("utf-8", "surrogatepass"), person=b"block hash key").digest()
        self._blocks = hashlib.blake2b(digest_size=_STATE_BYTES, key=key, person=b"block")
        self._roots = hashlib.blake2b(digest_size=_STATE_BYTES, key=key, person=b"root")

    def root(self, salt: str | None = None, lora: str | None = None, extra_key: str | None = None) -> int:
        """The state before the first block of this namespace."""
        return self._state(self._roots, framed_namespace(salt, lora, extra_key) or _PUBLIC)

    def states(
        self, tokens: Tokens, block_size: int, root: int, multimodal: Mapping[int, Sequence[int]] | None = None
    ) -> list[int]:
        """The state after each full block. `root` is a namespace's, or the state after the block before the first;
        `multimodal` as in `kvcache.blocks.block_hashes`."""
        width, data = 4 * block_size, memoryview(tokens.tobytes())
        previous, states = root.to_bytes(_STATE_BYTES, "little"), []
        for position, end in enumerate(range(width, len(data) + 1, width)):
            block = self._blocks.copy()
            block.update(previous)
            block.update(data[end - width : end])
            if multimodal and position in multimodal:
                block.update(b"".join(key.to_bytes(8, "little") for key in sorted(multimodal[position])))
            previous = block.digest()
            states.append(int.from_bytes(previous, "little"))
        return states

    @staticmethod
    def _state(begun: hashlib.blake2b, data: bytes) -> int:
        one = begun.copy()
        one.update(data)
        return int.from_bytes(one.digest(), "little")


def names(states: Sequence[int]) -> Hashes:
    """What the index knows these blocks by."""
    return np.array([state & NAME_MASK for state in states], dtype=np.uint64)


def chain_states(
    tokens: Tokens,
    block_size: int,
    root: int | None,
    multimodal: Mapping[int, Sequence[int]] | None,
    key: BlockKey | None,
) -> list[int]:
    """As `BlockKey.states`; without a key the hashes of `kvcache.blocks.block_hashes`."""
    if key is None or root is None:
        return block_hashes(tokens, block_size, root=root, multimodal=multimodal).tolist()  # type: ignore[no-any-return]
    return key.states(tokens, block_size, root, multimodal)
