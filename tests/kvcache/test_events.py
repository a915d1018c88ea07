"""Decoding KV events: both wire forms of vLLM, SGLang's, and whatever else may arrive."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.blocks import multimodal_key
from kvcache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventDecodeError,
    Tier,
    decode_batch,
)

TOKENS = tuple(range(1, 33))


def encode(*events: Any, rank: int | None = None) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def one(event: Any) -> Any:
    (decoded,) = decode_batch(encode(event)).events
    return decoded


def test_maps_and_arrays_say_the_same() -> None:
    as_map = {
        "type": "BlockStored",
        "block_hashes": [7, 8],
        "parent_block_hash": 6,
        "token_ids": list(TOKENS),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": "ada",
        "extra_keys": [["ada"], ["ada"]],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    expected = BlockStored((7, 8), 6, TOKENS, 16, Tier.GPU, lora="ada", group_index=0, attention="full_attention")
    assert one(as_map) == expected
    assert one(["BlockStored", *list(as_map.values())[1:]]) == expected


def test_the_oldest_array_form_is_read() -> None:
    assert one(["BlockStored", [-5], None, [1, 2], 2, None]) == BlockStored((-5,), None, (1, 2), 2)
    assert one(["BlockRemoved", [-5]]) == BlockRemoved((-5,))
    assert one(["AllBlocksCleared"]) == AllBlocksCleared()


def test_a_batch_may_be_a_map() -> None:
    payload = msgspec.msgpack.encode({"ts": 2, "events": [{"type": "AllBlocksCleared"}], "data_parallel_rank": 3})
    assert decode_batch(payload) == EventBatch(2.0, (AllBlocksCleared(),), 3)


def test_block_ids_are_signed_unsigned_or_bytes() -> None:
    ids = (-(2**63), 2**64 - 1, b"\x00" * 32)
    assert one({"type": "BlockRemoved", "block_hashes": list(ids)}).block_ids == ids


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("GPU", Tier.GPU),
        ("CPU", Tier.CPU),
        ("CPU_PINNED", Tier.CPU),
        ("DISK", Tier.DISK),
        ("EXTERNAL", Tier.REMOTE),
        ("holographic", Tier.REMOTE),
    ],
)
def test_media_become_tiers(medium: str | None, tier: Tier) -> None:
    assert one({"type": "BlockRemoved", "block_hashes": [1], "medium": medium}).tier is tier


@pytest.mark.parametrize(
    ("fields", "salt", "lora"),
    [
        ({"extra_keys": [["tenantA"], None]}, "tenantA", None),
        ({"extra_keys": [["ada", "tenantA"], ["ada"]], "lora_name": "ada"}, "tenantA", "ada"),
        ({"extra_keys": [["ada", "ada"], ["ada"]], "lora_name": "ada"}, "ada", "ada"),
        (
            {"extra_keys": [[["lora", "ada", "/x"], ["cache_salt", "tenantA"]], [["lora", "ada", "/x"]]]},
            "tenantA",
            "ada",
        ),
        ({"lora_id": 4}, None, "lora_id=4"),
        ({"cache_salt": "tenantA"}, "tenantA", None),
        ({"extra_key": "tenantA"}, "tenantA", None),
        ({"extra_key": "x", "cache_salt": "tenantA"}, "1:xtenantA", None),
        ({}, None, None),
    ],
)
def test_the_namespace_comes_out(fields: dict[str, Any], salt: str | None, lora: str | None) -> None:
    """ai-dynamo/dynamo#8197 (IS06): without it an index merges tenants."""
    event = one(stored(**fields))
    assert (event.salt, event.lora, event.multimodal) == (salt, lora, {})


def stored(**fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": list(TOKENS),
        "block_size": 16,
        **fields,
    }


def test_pictures_come_out_by_block() -> None:
    event = one(stored(extra_keys=[[["sha-1", 4], "tenantA"], [["sha-1", -12], ["mm", "sha-2", 3]]]))
    assert event.salt == "tenantA"
    assert event.multimodal == {
        0: (multimodal_key("sha-1", 4),),
        1: (multimodal_key("sha-1", -12), multimodal_key("sha-2", 3)),
    }


def test_extra_keys_of_no_known_shape_still_set_a_block_apart() -> None:
    embedded = one(stored(extra_keys=[None, [b"\x01\x02"]]))
    assert len(embedded.multimodal[1]) == 1
    assert embedded.multimodal != one(stored(extra_keys=[None, [b"\x01\x03"]])).multimodal


def test_later_releases_add_fields_and_events() -> None:
    batch = decode_batch(
        encode(
            stored(ownership="ENGINE", locality="LOCAL"),
            {"type": "BlockPromoted", "block_hashes": [1]},
            ["BlockRemoved", [9], "GPU", None, "extra", "more"],
        )
    )
    assert [type(event) for event in batch.events] == [BlockStored, BlockRemoved]
    assert (batch.unknown_events, batch.unknown_fields) == (1, 4)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "0 bytes is not msgpack"),
        (b"\xc1", "not msgpack"),
        (b"\x91" * 5000 + b"\xc0", "not msgpack"),
        (msgspec.msgpack.encode("hello"), "must be an array or a map, not str"),
        (msgspec.msgpack.encode([1.0]), "batch: .*events"),
        (encode(7), "event 0 must be a map or a non-empty array, not int"),
        (encode([]), "event 0 must be"),
        (encode({"block_hashes": [1]}), "event 0 has no type"),
        (encode({"type": "BlockRemoved"}), r"event 0 \(BlockRemoved\): .*block_hashes"),
        (encode({"type": "BlockRemoved", "block_hashes": "x"}), "Expected `array`"),
        (
            encode(["AllBlocksCleared"], ["BlockStored", [1], None, [1, 2, 3], 2, None]),
            "event 1 .*3 token ids do not fill",
        ),
        (encode(["BlockStored", [1], None, [], 0, None]), "block_size must be at least 1"),
        (encode(["BlockStored", [1], None, [2**32], 1, None]), "a token id is outside"),
    ],
)
def test_a_payload_that_is_no_batch_says_what_is_wrong(payload: bytes, reason: str) -> None:
    with pytest.raises(EventDecodeError, match=reason):
        decode_batch(payload)


def test_no_token_and_no_salt_is_ever_shown() -> None:
    event = one(
        stored(extra_keys=[["s3cret", ["sha-picture", 1]], None], lora_name="adapter-x", token_ids=[98765] * 32)
    )
    assert repr(event) == (
        "BlockStored(blocks=2, block_size=16, tier=gpu, salted=True, lora=True, multimodal=1, "
        "group_index=None, attention=None)"
    )
    batch = repr(decode_batch(encode(stored(cache_salt="s3cret"), {"type": "BlockRemoved", "block_hashes": [4711]})))
    assert "s3cret" not in batch
    assert "4711" not in batch
    with pytest.raises(EventDecodeError) as refused:
        decode_batch(encode(stored(token_ids=[98765, "98766"], cache_salt="s3cret")))
    assert "9876" not in str(refused.value)


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
)
ANYTHING = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])},
    optional={
        "block_hashes": st.lists(st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=4), max_size=2) | ANYTHING,
        "parent_block_hash": ANYTHING,
        "token_ids": st.lists(st.integers(0, 9), max_size=4) | ANYTHING,
        "block_size": st.integers(-1, 3) | ANYTHING,
        "extra_keys": st.lists(st.none() | st.lists(ANYTHING, max_size=3), max_size=3),
        "medium": st.none() | st.text(max_size=3),
        "cache_salt": ANYTHING,
    },
)


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=40) | st.lists(FIELDS | ANYTHING, max_size=3).map(lambda events: encode(*events)))
def test_any_payload_is_decoded_or_refused(payload: bytes) -> None:
    with suppress(EventDecodeError):
        assert isinstance(decode_batch(payload), EventBatch)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=8, max_size=32), min_size=1, max_size=4, unique=True
    ),
    st.integers(1, 32),
    st.data(),
)
def test_what_an_engine_stores_is_what_comes_out(ids: list[int | bytes], block_size: int, data: st.DataObject) -> None:
    count = len(ids) * block_size
    tokens = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count))
    event = one(
        {
            "type": "BlockStored",
            "block_hashes": ids,
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": block_size,
        }
    )
    assert event == BlockStored(tuple(ids), None, tuple(tokens), block_size)
