"""The quick decoder against the thorough one: the same payloads taken, refused, and understood alike."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.blocks import namespace_root
from kvcache.event_wire import Cleared, Removed, Stored, decode_wire
from kvcache.events import BlockRemoved, BlockStored, EventDecodeError, decode_batch

IDS = st.lists(st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=1, max_size=8), max_size=3)
STORED = st.fixed_dictionaries(
    {
        "type": st.just("BlockStored"),
        "block_hashes": IDS,
        "parent_block_hash": st.none() | st.integers(0, 9),
        "token_ids": st.lists(st.integers(-1, 2**32), max_size=6),
        "block_size": st.integers(0, 3),
    },
    optional={
        "lora_id": st.none() | st.integers(0, 3),
        "medium": st.none() | st.sampled_from(["GPU", "CPU"]),
        "lora_name": st.none() | st.just("ada"),
        "extra_keys": st.none()
        | st.lists(st.none() | st.lists(st.sampled_from(["salt", "ada", ["pic", 3]]), max_size=2)),
        "group_idx": st.none() | st.integers(0, 2),
        "kv_cache_spec_kind": st.none() | st.just("full_attention"),
        "cache_salt": st.none() | st.just("pepper"),
        "extra_key": st.none() | st.just("key"),
        "ownership": st.just("ENGINE"),
    },
)
REMOVED = st.fixed_dictionaries({"type": st.just("BlockRemoved"), "block_hashes": IDS}, optional={"medium": st.none()})
EVENTS = st.lists(
    STORED | REMOVED | st.sampled_from([{"type": "AllBlocksCleared"}, {"type": "Later"}, ["AllBlocksCleared"]])
)
ORDER = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
ORDER += ["extra_keys", "group_idx", "kv_cache_spec_kind"]


def understood(payload: bytes) -> list[Any]:
    """What the quick decoder makes of a payload, in the thorough one's words."""
    found: list[Any] = []
    batch = decode_wire(payload)
    for event in batch.events:
        if isinstance(event, Stored):
            tokens = tuple(event.tokens())
            root = event.roots()[0] if event.parent_block_hash is None else None
            found.append((tuple(event.block_hashes), event.parent_block_hash, tokens, root, dict(event.multimodal())))
        elif isinstance(event, Removed):
            found.append(tuple(event.block_hashes))
        else:
            assert isinstance(event, Cleared)
            found.append("cleared")
    return [batch.ts, batch.unknown_events, *found]


def expected(payload: bytes) -> list[Any]:
    found: list[Any] = []
    batch = decode_batch(payload)
    for event in batch.events:
        if isinstance(event, BlockStored):
            root = namespace_root(event.salt, event.lora) if event.parent_id is None else None
            found.append((event.block_ids, event.parent_id, event.token_ids, root, dict(event.multimodal)))
        else:
            found.append(event.block_ids if isinstance(event, BlockRemoved) else "cleared")
    return [batch.timestamp, batch.unknown_events, *found]


def outcome(read: Any, payload: bytes) -> Any:
    try:
        return read(payload)
    except EventDecodeError:
        return "refused"


@settings(max_examples=200, deadline=None)
@given(EVENTS, st.sampled_from(["maps", "arrays", "batch as a map"]))
def test_both_decoders_understand_the_same(events: list[Any], form: str) -> None:
    if form == "arrays":
        events = [_as_array(event) if isinstance(event, dict) else event for event in events]
    batch: Any = {"ts": 7.5, "events": events} if form == "batch as a map" else [7.5, events, 0]
    payload = msgspec.msgpack.encode(batch)
    assert outcome(understood, payload) == outcome(expected, payload)


def _as_array(event: dict[str, Any]) -> list[Any]:
    last = max((k for k, name in enumerate(ORDER) if name in event), default=0)
    return [event.get(name) for name in ORDER[: last + 1]]


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=40))
def test_bytes_of_any_kind_are_decoded_or_refused(payload: bytes) -> None:
    assert (outcome(understood, payload) == "refused") == (outcome(expected, payload) == "refused")


def test_an_arrays_further_fields_are_no_salt() -> None:
    """SGLang's salt is a map's field; whatever a later vLLM appends to its arrays must not be taken for one."""
    event = ["BlockStored", [1], None, [1, 2], 2, None, "GPU", None, None, 0, "full_attention", "ENGINE", "LOCAL"]
    (stored,) = decode_wire(msgspec.msgpack.encode([1.0, [event], 0])).events
    assert isinstance(stored, Stored)
    assert (stored.roots(), stored.attention) == ((None, None), "full_attention")


def test_neither_tokens_nor_salts_are_shown() -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [98765],
        "block_size": 1,
    }
    (stored,) = decode_wire(msgspec.msgpack.encode([1.0, [{**event, "cache_salt": "s3cret"}], 0])).events
    assert (repr(stored), stored.roots()) == ("Stored(blocks=1)", (namespace_root("s3cret"), None))  # type: ignore[union-attr]
    with pytest.raises(EventDecodeError) as refused:
        decode_wire(
            msgspec.msgpack.encode([1.0, [{**event, "token_ids": [98765, "98766"], "cache_salt": "s3cret"}], 0])
        )
    assert "9876" not in str(refused.value)
    assert "s3cret" not in str(refused.value)
