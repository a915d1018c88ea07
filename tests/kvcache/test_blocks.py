"""Block hashes: equal chains mean equal openings, in one namespace, and nothing else does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.kvcache import blocks
from prefixwatch.kvcache.blocks import (
    TokenIdsError,
    as_tokens,
    block_hashes,
    chain,
    content_hashes,
    multimodal_key,
    namespace_root,
)

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())["dynamo_xxh3"]
TOKEN = st.integers(0, 2**32 - 1)
ROOT = st.none() | st.integers(0, 2**64 - 1)


def test_hashes_equal_the_published_vectors() -> None:
    tokens = as_tokens(range(1, 49))
    assert content_hashes(tokens, 16).tolist() == GOLDEN["content"]
    assert block_hashes(tokens, 16).tolist() == GOLDEN["chain"]


@settings(max_examples=150, deadline=None)
@given(st.lists(TOKEN, max_size=200), st.sampled_from([1, 2, 16, 32, 64]), ROOT)
def test_compiled_and_library_chains_are_the_same(tokens: list[int], block_size: int, root: int | None) -> None:
    array = as_tokens(tokens)
    expected = chain(content_hashes(array, block_size), root)
    assert block_hashes(array, block_size, root=root).tolist() == expected.tolist()
    assert len(expected) == len(tokens) // block_size


@pytest.mark.parametrize("block_size", [16, 32])
def test_arrays_of_any_layout_hash_alike(block_size: int) -> None:
    plain = np.arange(1, 130, dtype=np.uint32)
    expected = block_hashes(plain, block_size).tolist()
    padded = np.arange(0, 130, dtype=np.uint32)
    misaligned = np.frombuffer(b"xxx" + plain.tobytes(), dtype=np.uint8)[3:].view(np.uint32)
    layouts: dict[str, Any] = {
        "strided": np.repeat(plain, 2)[::2],
        "offset by 4 bytes": padded[1:],
        "read-only and misaligned": misaligned,
        "64-bit": plain.astype(np.int64),
        "list": plain.tolist(),
    }
    for name, ids in layouts.items():
        assert block_hashes(as_tokens(ids), block_size).tolist() == expected, name
    assert block_hashes(as_tokens([]), block_size).tolist() == []


@pytest.mark.parametrize("ids", [[-1], [2**32], np.array([-1]), np.array([2**32 + 7])])
def test_ids_beyond_32_bits_are_refused_rather_than_wrapped(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="2\\^32"):
        as_tokens(ids)


def test_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        block_hashes(as_tokens([1]), 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(TOKEN, max_size=80), st.lists(TOKEN, max_size=80), st.sampled_from([4, 16]))
def test_chains_agree_exactly_as_far_as_the_prompts_do(a: list[int], b: list[int], block_size: int) -> None:
    common = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    left, right = block_hashes(as_tokens(a), block_size).tolist(), block_hashes(as_tokens(b), block_size).tolist()
    shared = common // block_size
    assert left[:shared] == right[:shared]
    assert set(left[shared:]).isdisjoint(right[shared:])


def test_prompts_of_equal_length_differ_by_content() -> None:
    """vllm-project/router#237 (RT09): token-id prompts were keyed by their length."""
    up, down = as_tokens(range(1, 129)), as_tokens(range(128, 0, -1))
    assert set(block_hashes(up).tolist()).isdisjoint(block_hashes(down).tolist())
    assert block_hashes(as_tokens([12] * 16))[0] != block_hashes(as_tokens([123] * 16))[0]


def test_a_partial_last_block_is_no_match() -> None:
    """kvcache-ai/Mooncake#4164 (RT12): 3 blocks of 16 were reported of a prompt of 40 tokens."""
    blocks = block_hashes(as_tokens(range(40)), 16)
    assert len(blocks) == 2
    assert len(blocks) * 16 <= 40


def test_namespaces_share_no_block() -> None:
    """ai-dynamo/dynamo#8197 (IS06): an index without the salt predicts hits that can't happen."""
    tokens = as_tokens(range(64))
    roots = [
        namespace_root(),
        namespace_root("a"),
        namespace_root("b"),
        namespace_root(lora="a"),
        namespace_root("a", "b"),
        namespace_root("ab"),
        namespace_root("b", "a"),
    ]
    seen = [set(block_hashes(tokens, root=root).tolist()) for root in roots]
    assert len(set().union(*seen)) == sum(len(hashes) for hashes in seen)


def test_an_empty_salt_is_the_public_namespace() -> None:
    assert namespace_root("", "") is None


def test_a_picture_sets_its_block_and_all_later_ones_apart() -> None:
    tokens = as_tokens(range(64))
    plain = block_hashes(tokens).tolist()
    pictured = block_hashes(tokens, multimodal={1: [multimodal_key("sha", 3)]}).tolist()
    other = block_hashes(tokens, multimodal={1: [multimodal_key("sha", 4)]}).tolist()
    assert pictured[0] == plain[0] == other[0]
    assert not set(pictured[1:]) & set(plain)
    assert not set(pictured[1:]) & set(other)


def test_the_order_of_pictures_inside_a_block_does_not_matter() -> None:
    tokens = as_tokens(range(16))
    assert block_hashes(tokens, multimodal={0: [5, 9]}) == block_hashes(tokens, multimodal={0: [9, 5]})


def test_a_chain_continues_from_its_parent() -> None:
    tokens = as_tokens(range(160))
    whole = block_hashes(tokens).tolist()
    assert block_hashes(tokens[64:], root=whole[3]).tolist() == whole[4:]


def nested(depth: int) -> Any:
    ids: Any = list(range(32))
    for _ in range(depth):
        ids = [ids]
    return ids


@pytest.mark.parametrize(
    "ids",
    [*(nested(depth) for depth in (1, 2, 9, 20, 31, 64, 90)), [[1], [1, 2]], [1, [2]], [1.5], ["1"], [None], [True]],
)
def test_anything_but_a_flat_list_of_integers_is_refused(ids: Any) -> None:
    """A prompt nested 9 deep froze a router for 93 seconds (H1): each depth was compiled for."""
    with pytest.raises(TokenIdsError, match="token ids must be"):
        as_tokens(ids)


def test_kernels_compile_for_nothing_else() -> None:
    pytest.importorskip("numba")
    from prefixwatch.kvcache import xxh3_kernel  # noqa: PLC0415  # only with numba

    with pytest.raises(TypeError, match="No matching definition"):
        xxh3_kernel._chain(np.zeros((2, 8), dtype=np.uint64), 8, False, np.uint64(0), np.uint64(0))


@settings(max_examples=60, deadline=None)
@given(st.lists(TOKEN, max_size=200), st.sampled_from([1, 2, 16, 32, 64]), ROOT)
def test_without_numba_hashes_are_the_same(tokens: list[int], block_size: int, root: int | None) -> None:
    array = as_tokens(tokens)
    expected = block_hashes(array, block_size, root=root)
    assert blocks._chain_of_tokens(array, block_size, root).tolist() == expected.tolist()


@pytest.mark.parametrize("module", ["exporters.app", "router.serving.app", "kvcache.events.feed"])
def test_importing_loads_no_compiler(module: str) -> None:
    """numba is 60 MB of memory and half a second; an exporter without KV events never hashes."""
    script = f"import sys, prefixwatch.{module}; print([name for name in ('numba', 'llvmlite') if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
