"""Block hashes under a key: another key gives others, and the index serves events and prompts as without one."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.kvcache.blocks import as_tokens, block_hashes, namespace_root
from prefixwatch.kvcache.events.feed import WorkerFeed
from prefixwatch.kvcache.events.wire import Namespace
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.kvcache.index.keyed_blocks import BlockKey, chain_states, names
from tests.kvcache.conftest import Wire

KEY, OTHER = BlockKey("one secret of at least 32 characters"), BlockKey("another secret of at least 32 characters")
_IDS = st.lists(st.integers(0, 3), max_size=40)
_TEXT = st.text(max_size=6) | st.none()
_NAMESPACE = st.tuples(_TEXT, _TEXT, _TEXT)


def blocks(tokens: list[int], key: BlockKey = KEY, salt: str | None = None, size: int = 4) -> list[int]:
    made: list[int] = names(key.states(as_tokens(tokens), size, key.root(salt))).tolist()
    return made


@given(_IDS, _IDS)
def test_equal_openings_have_equal_hashes_and_only_they(one: list[int], other: list[int]) -> None:
    """As without a key: against the tokens themselves, block by block."""
    same = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))) // 4
    pairs = [a == b for a, b in zip(blocks(one), blocks(other), strict=False)]
    assert pairs == [k < same for k in range(len(pairs))]


@given(_IDS, _NAMESPACE, _NAMESPACE)
def test_another_key_or_namespace_shares_no_hash(tokens: list[int], one: Any, other: Any) -> None:
    ids = as_tokens(tokens)
    plain = set(block_hashes(ids, 4, root=namespace_root(*one)).tolist())
    first = set(names(KEY.states(ids, 4, KEY.root(*one))).tolist())
    second = set(names(OTHER.states(ids, 4, OTHER.root(*one))).tolist())
    assert not first & second
    assert not first & plain
    same_namespace = Namespace(*(part or None for part in one)) == Namespace(*(part or None for part in other))
    assert (KEY.root(*one) == KEY.root(*other)) is same_namespace


@given(_IDS, st.dictionaries(st.integers(0, 8), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=3)))
def test_images_count_in_their_block_and_in_what_follows(tokens: list[int], media: dict[int, list[int]]) -> None:
    ids, root = as_tokens(tokens), KEY.root()
    bare, pictured = KEY.states(ids, 4, root), KEY.states(ids, 4, root, media)
    first = min(media, default=len(bare))
    assert [a == b for a, b in zip(bare, pictured, strict=True)] == [k < first for k in range(len(bare))]
    assert pictured == KEY.states(ids, 4, root, {k: list(reversed(keys)) for k, keys in media.items()})


@given(_IDS, st.integers(0, 10))
def test_a_chain_goes_on_from_the_state_of_any_block(tokens: list[int], cut: int) -> None:
    ids = as_tokens(tokens)
    whole = chain_states(ids, 4, KEY.root("salt"), None, KEY)
    cut = min(cut, len(whole))
    rest = chain_states(ids[4 * cut :], 4, whole[cut - 1] if cut else KEY.root("salt"), None, KEY)
    assert whole == whole[:cut] + rest


def test_crafted_collisions_of_the_public_hash_are_none_under_the_key() -> None:
    """A client that chooses its salt could look for one with another's root, 64 bits of a public hash. Not here."""
    assert KEY.root("salt").bit_length() > 64
    assert KEY.root("salt") != OTHER.root("salt")
    assert "secret" not in repr(KEY)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(4, 4), (8, 4), (4, 8)]))
def test_the_index_holds_under_a_key_what_it_holds_without(seed: int, sizes: tuple[int, int]) -> None:
    """Engine blocks that are one of ours, two of ours, or half of one; runs, branches, salts, removals and clears."""
    rng, wire = random.Random(seed), Wire()
    engine, ours = sizes
    plain_index, keyed_index = BlockIndex(), BlockIndex()
    feeds = WorkerFeed("w", plain_index, ours), WorkerFeed("w", keyed_index, ours, key=KEY)
    sent: list[tuple[list[int], str | None]] = []
    known: list[int] = []
    for sequence in range(20):
        tokens = [rng.randrange(3) for _ in range(8 * rng.randrange(1, 5))]
        salt = rng.choice([None, "a", "b"])
        ids = [sequence * 100 + k for k in range(len(tokens) // engine)]
        keys = [[salt] if salt and not k else None for k in range(len(ids))]
        events = [wire.stored(ids, tokens, None, engine, extra_keys=keys)]
        if known and rng.random() < 0.4:
            events.append(wire.removed([rng.choice(known)]))
        if rng.random() < 0.05:
            events, known, ids = [{"type": "AllBlocksCleared"}], [], []
        payload = wire.batch(*events)
        for feed in feeds:
            feed.apply(sequence, payload, 0.0)
        known += ids
        sent.append((tokens, salt))
    for tokens, salt in sent:
        plain = block_hashes(as_tokens(tokens), ours, root=namespace_root(salt))
        keyed = names(KEY.states(as_tokens(tokens), ours, KEY.root(salt)))
        assert plain_index.depths_by_walk(plain) == keyed_index.depths_by_walk(keyed)
    assert plain_index.block_count("w") == keyed_index.block_count("w")
