"""The chain of `kvcache.blocks`, compiled: XXH3-64 for exactly the input sizes that the chain needs.

Blocks of 16 or 32 tokens are inputs of 64 or 128 bytes (XXH3's 17–128 byte path), a chain link is an input
of 16 bytes (its 9–16 byte path). Constants and formulas: the XXH3 part of xxHash's specification. The
library's `xxh3_64_intdigest` is the reference; tests hold both to the same values.

Each function has its signature: it is compiled (or loaded from the cache) when this module is imported, and an array of
any other type or dimension is refused instead of being compiled for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_SECRET_HEAD = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
)
_SECRET = np.frombuffer(_SECRET_HEAD, dtype="<u8")
_LINK_FLIP_LO = _SECRET[3] ^ _SECRET[4]
_LINK_FLIP_HI = _SECRET[5] ^ _SECRET[6]

_PRIME64_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME_MX1 = np.uint64(0x165667919E3779F9)
_LINK_BYTES = np.uint64(16)
_U32 = np.uint64(32)
_U37 = np.uint64(37)


@intrinsic
def _multiply_and_fold(typing_context: Any, a: Any, b: Any) -> Any:
    """Low half XOR high half of the 128-bit product."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        wide, word = ir.IntType(128), ir.IntType(64)
        left, right = (builder.zext(argument, wide) for argument in arguments)
        product = builder.mul(left, right)
        high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), word)
        return builder.xor(builder.trunc(product, word), high)

    return types.uint64(types.uint64, types.uint64), build


@intrinsic
def _swap_bytes(typing_context: Any, a: Any) -> Any:
    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bswap(arguments[0])

    return types.uint64(types.uint64), build


@njit(cache=True, nogil=True, inline="always")
def _avalanche(h: Any) -> Any:
    h ^= h >> _U37
    h *= _PRIME_MX1
    return h ^ (h >> _U32)


@njit("uint64(uint64[::1], int64, int64, uint64)", cache=True, nogil=True)
def _content(words: Any, first: int, count: int, seed: Any) -> Any:
    """XXH3-64 of `count` (8 or 16) little-endian words, i.e. 64 or 128 bytes: pairs from both ends inwards."""
    acc = np.uint64(8 * count) * _PRIME64_1
    for pair in range(count // 4):
        head, tail, secret = first + 2 * pair, first + count - 2 * (pair + 1), 4 * pair
        acc += _multiply_and_fold(
            words[head] ^ (_SECRET[secret] + seed), words[head + 1] ^ (_SECRET[secret + 1] - seed)
        )
        acc += _multiply_and_fold(
            words[tail] ^ (_SECRET[secret + 2] + seed), words[tail + 1] ^ (_SECRET[secret + 3] - seed)
        )
    return _avalanche(acc)


@njit("uint64(uint64, uint64, uint64)", cache=True, nogil=True)
def link(previous: Any, content: Any, seed: Any) -> Any:
    """XXH3-64 of the 16 bytes `previous ‖ content`."""
    low = previous ^ (_LINK_FLIP_LO + seed)
    high = content ^ (_LINK_FLIP_HI - seed)
    return _avalanche(_LINK_BYTES + _swap_bytes(low) + high + _multiply_and_fold(low, high))


@njit("uint64[::1](uint64[::1], int64, boolean, uint64, uint64)", cache=True, nogil=True)
def _chain(words: Any, words_per_block: int, has_root: bool, root: Any, seed: Any) -> Any:
    count = len(words) // words_per_block
    hashes = np.empty(count, dtype=np.uint64)
    previous = root
    for k in range(count):
        content = _content(words, k * words_per_block, words_per_block, seed)
        previous = link(previous, content, seed) if (k > 0 or has_root) else content
        hashes[k] = previous
    return hashes


@njit("uint64[::1](uint64[::1], int64, uint64)", cache=True, nogil=True)
def _contents(words: Any, words_per_block: int, seed: Any) -> Any:
    hashes = np.empty(len(words) // words_per_block, dtype=np.uint64)
    for k in range(len(hashes)):
        hashes[k] = _content(words, k * words_per_block, words_per_block, seed)
    return hashes


def content_hashes(tokens: npt.NDArray[np.uint32], block_size: int, seed: int) -> npt.NDArray[np.uint64]:
    """Content hash of each full block of 16 or 32 tokens; see `kvcache.blocks.content_hashes`."""
    hashes: npt.NDArray[np.uint64] = _contents(_words(tokens, block_size), block_size // 2, np.uint64(seed))
    return hashes


def _words(tokens: npt.NDArray[np.uint32], block_size: int) -> npt.NDArray[np.uint64]:
    full = len(tokens) - len(tokens) % block_size
    # The signatures take aligned and writable arrays only.
    return np.require(tokens[:full].view(np.uint64), requirements=("ALIGNED", "WRITEABLE"))


def chain_hashes(
    tokens: npt.NDArray[np.uint32], block_size: int, root: int | None, seed: int
) -> npt.NDArray[np.uint64]:
    """Chain hash of each full block of 16 or 32 tokens; see `kvcache.blocks.block_hashes`."""
    hashes: npt.NDArray[np.uint64] = _chain(
        _words(tokens, block_size), block_size // 2, root is not None, np.uint64(root or 0), np.uint64(seed)
    )
    return hashes
