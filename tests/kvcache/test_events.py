"""Decoding KV events: both wire forms of vLLM, SGLang's, and whatever else may arrive."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.kvcache.blocks import multimodal_key
from prefixwatch.kvcache.events.wire import (
    Cleared,
    EventBatch,
    EventDecodeError,
    Namespace,
    Removed,
    Stored,
    Tier,
    Unreadable,
    decode_batch,
)

TOKENS = tuple(range(1, 33))


def encode(*events: Any, rank: int | None = None) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def one(event: Any) -> Any:
    (decoded,) = decode_batch(encode(event)).events
    return decoded


def meaning(event: Any) -> Any:
    """What readers ask of an event, whichever form it came in."""
    if isinstance(event, Stored):
        try:
            tokens: Any = event.tokens().tolist()
        except EventDecodeError:
            tokens = "refused"
        return (
            event.block_hashes, event.parent_block_hash, tokens, event.block_size, event.tier, tuple(event.namespace()),
            event.tells_salts, dict(event.multimodal()), event.group_index, event.attention,
        )  # fmt: skip
    if isinstance(event, Removed):
        return event.block_hashes, event.tier, event.group_index
    return event


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
    expected: tuple[Any, ...] = (
        [7, 8], 6, list(TOKENS), 16, Tier.GPU, (None, "ada", None), True, {}, 0, "full_attention",
    )  # fmt: skip
    assert meaning(one(as_map)) == expected
    assert meaning(one(["BlockStored", *list(as_map.values())[1:]])) == expected


def test_the_oldest_array_form_is_read() -> None:
    stored = one(["BlockStored", [-5], None, [1, 2], 2, None])
    assert (stored.block_hashes, stored.parent_block_hash, stored.tokens().tolist()) == ([-5], None, [1, 2])
    assert one(["BlockRemoved", [-5]]).block_hashes == [-5]
    assert isinstance(one(["AllBlocksCleared"]), Cleared)


def test_a_batch_may_be_a_map() -> None:
    payload = msgspec.msgpack.encode({"ts": 2, "events": [{"type": "AllBlocksCleared"}], "data_parallel_rank": 3})
    batch = decode_batch(payload)
    assert (batch.ts, batch.data_parallel_rank, len(batch.events)) == (2.0, 3, 1)


def test_the_rank_is_read_in_every_form() -> None:
    assert decode_batch(encode({"type": "AllBlocksCleared"}, rank=3)).data_parallel_rank == 3
    assert decode_batch(encode(["AllBlocksCleared"], rank=3)).data_parallel_rank == 3


def test_block_ids_are_signed_unsigned_or_bytes() -> None:
    ids = [-(2**63), 2**64 - 1, b"\x00" * 32]
    assert one({"type": "BlockRemoved", "block_hashes": ids}).block_hashes == ids


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
    ("fields", "expected"),
    [
        ({"extra_keys": [["tenantA"], None]}, Namespace("tenantA")),
        ({"extra_keys": [["ada", "tenantA"], ["ada"]], "lora_name": "ada"}, Namespace("tenantA", "ada")),
        ({"extra_keys": [["ada", "ada"], ["ada"]], "lora_name": "ada"}, Namespace("ada", "ada")),
        (
            {"extra_keys": [[["lora", "ada", "/x"], ["cache_salt", "tenantA"]], [["lora", "ada", "/x"]]]},
            Namespace("tenantA", "ada"),
        ),
        ({"lora_id": 4}, Namespace(lora="lora_id=4")),
        ({"cache_salt": "tenantA"}, Namespace("tenantA")),
        ({"extra_key": "tenantA"}, Namespace(extra_key="tenantA")),
        ({"extra_key": "x", "cache_salt": "tenantA"}, Namespace("tenantA", extra_key="x")),
        ({}, Namespace()),
    ],
)
def test_the_namespace_comes_out(fields: dict[str, Any], expected: Namespace) -> None:
    """ai-dynamo/dynamo#8197 (IS06): without it an index merges tenants."""
    event = one(stored(**fields))
    assert (tuple(event.namespace()), event.multimodal()) == (tuple(expected), {})


_NAMES = st.none() | st.text(alphabet="ab:1\x00sle", max_size=6)


@given(st.tuples(_NAMES, _NAMES, _NAMES), st.tuples(_NAMES, _NAMES, _NAMES))
def test_no_two_namespaces_have_one_root(one: Any, other: Any) -> None:
    """Crafted salts don't land in another's namespace, nor in that of an adapter or extra key of the same name (N24);
    an empty part is the same as none."""
    same = tuple(part or None for part in one) == tuple(part or None for part in other)
    assert (Namespace(*one).root() == Namespace(*other).root()) == same


def test_an_extra_key_is_not_a_salt_of_the_same_text() -> None:
    roots = {one(stored(**fields)).namespace().root() for fields in (
        {"cache_salt": "b", "extra_key": "a"}, {"cache_salt": "1:ab"}, {"cache_salt": "ab"}, {"extra_key": "ab"},
        {"extra_key": "b"}, {"cache_salt": "b"}, {"lora_name": "b"}, {},
    )}  # fmt: skip
    assert len(roots) == 8


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
    assert event.namespace().salt == "tenantA"
    assert event.multimodal() == {
        0: (multimodal_key("sha-1", 4),),
        1: (multimodal_key("sha-1", -12), multimodal_key("sha-2", 3)),
    }


def test_extra_keys_of_no_known_shape_still_set_a_block_apart() -> None:
    embedded = one(stored(extra_keys=[None, [b"\x01\x02"]]))
    assert len(embedded.multimodal()[1]) == 1
    assert embedded.multimodal() != one(stored(extra_keys=[None, [b"\x01\x03"]])).multimodal()


def test_later_releases_add_fields_and_events() -> None:
    batch = decode_batch(
        encode(
            stored(ownership="ENGINE", locality="LOCAL"),
            {"type": "BlockPromoted", "block_hashes": [1]},
            ["BlockRemoved", [9], "GPU", None, "extra", "more"],
        )
    )
    assert [type(event).__name__ for event in batch.events] == ["_StoredFields", "Removed"]
    assert batch.unknown_events == 1


def test_what_later_releases_append_to_arrays_is_no_salt() -> None:
    """SGLang's salt is a map's field; whatever a later vLLM appends to its arrays must not be taken for one."""
    event = ["BlockStored", [1], None, [1, 2], 2, None, "GPU", None, None, 0, "full_attention", "ENGINE", "LOCAL"]
    found = one(event)
    assert (tuple(found.namespace()), found.attention) == ((None, None, None), "full_attention")


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "0 bytes is not msgpack"),
        (b"\xc1", "not msgpack"),
        (b"\x91" * 5000 + b"\xc0", "not msgpack"),
        (msgspec.msgpack.encode("hello"), "must be an array or a map, not str"),
        (msgspec.msgpack.encode([1.0]), "batch: .*events"),
    ],
)
def test_a_payload_that_is_not_a_batch_says_what_is_wrong(payload: bytes, reason: str) -> None:
    with pytest.raises(EventDecodeError, match=reason):
        decode_batch(payload)


@pytest.mark.parametrize(
    ("event", "type_", "reason"),
    [
        (7, "", "event 1 must be a map or a non-empty array, not int"),
        ([], "", "event 1 must be a map or a non-empty array, not list"),
        ({"block_hashes": [1]}, "", "event 1 has no type: expected a text such as BlockStored, not nothing"),
        ({"type": "BlockRemoved"}, "BlockRemoved", "event 1 (BlockRemoved): Object missing required field"),
        ({"type": "BlockRemoved", "block_hashes": "x"}, "BlockRemoved", "event 1 (BlockRemoved): Expected `array`"),
    ],
)
def test_one_event_that_cannot_be_read_leaves_the_others(event: Any, type_: str, reason: str) -> None:
    first, broken, last = decode_batch(encode({"type": "AllBlocksCleared"}, event, stored())).events
    assert isinstance(first, Cleared)
    assert isinstance(last, Stored)
    assert isinstance(broken, Unreadable)
    assert broken.type == type_
    assert broken.reason.startswith(reason)


def test_an_unreadable_event_still_says_which_group_it_is_of() -> None:
    broken = one(stored(token_ids="x", group_idx=2, kv_cache_spec_kind="mamba", medium="CPU"))
    assert (broken.group_index, broken.attention, broken.tier, broken.harmless) == (2, "mamba", Tier.CPU, True)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"token_ids": [1, 2, 3]}, "3 token ids do not fill 2 blocks of 16"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"token_ids": [2**32] * 32}, "a token id is outside"),
        ({"token_ids": [-1] * 32}, "a token id is outside"),
    ],
)
def test_tokens_that_do_not_fit_are_refused_where_they_are_asked_for(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(EventDecodeError, match=reason):
        one(stored(**fields)).tokens()


def test_no_token_and_no_salt_is_ever_shown() -> None:
    event = one(
        stored(extra_keys=[["s3cret", ["sha-picture", 1]], None], lora_name="adapter-x", token_ids=[98765] * 32)
    )
    assert repr(event) == "Stored(blocks=2, block_size=16, tier=gpu)"
    assert repr(event.namespace()) == "Namespace()"
    batch = repr(decode_batch(encode(stored(cache_salt="s3cret"), {"type": "BlockRemoved", "block_hashes": [4711]})))
    assert "s3cret" not in batch
    assert "4711" not in batch
    refused = one(stored(token_ids=[98765, "98766"], cache_salt="s3cret"))
    assert "9876" not in repr(refused)
    assert "s3cret" not in repr(refused)


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
        batch = decode_batch(payload)
        assert isinstance(batch, EventBatch)
        assert len([meaning(event) for event in batch.events]) == len(batch.events)


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
    },
)
OF_SGLANG = {"cache_salt": st.none() | st.just("pepper"), "extra_key": st.none() | st.just("key")}
REMOVED = st.fixed_dictionaries({"type": st.just("BlockRemoved"), "block_hashes": IDS}, optional={"medium": st.none()})
CLEARED = st.just({"type": "AllBlocksCleared"})
ORDER = ["type", *Stored.__struct_encode_fields__]


@settings(max_examples=200, deadline=None)
@given(st.lists(STORED | REMOVED | CLEARED, min_size=1))
def test_every_form_is_understood_alike(events: list[Any]) -> None:
    """Maps, arrays and batches as maps; and both ways of decoding, for an event of an unknown type among the others
    makes the batch be read event by event."""
    expected = [meaning(event) for event in decode_batch(encode(*events)).events]
    assert len(expected) == len(events)
    arrays = [_as_array(event) for event in events]
    for batch in (
        [1.5, [*events, {"type": "Later"}], 0],
        [1.5, arrays, 0],
        [1.5, [["Later"], *arrays], 0],
        {"ts": 1.5, "events": events},
    ):
        found = decode_batch(msgspec.msgpack.encode(batch)).events
        assert [_without_class(meaning(event)) for event in found] == [_without_class(one) for one in expected]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.builds(lambda a, b: {**a, **b}, STORED, st.fixed_dictionaries({}, optional=OF_SGLANG)), min_size=1))
def test_the_fields_that_only_maps_have_are_read_both_ways(events: list[Any]) -> None:
    quick = decode_batch(encode(*events)).events
    one_by_one = decode_batch(encode(*events, {"type": "Later"})).events
    assert [meaning(event) for event in quick] == [meaning(event) for event in one_by_one]


def _without_class(event: Any) -> Any:
    return "cleared" if isinstance(event, Cleared) else event


def _as_array(event: dict[str, Any]) -> list[Any]:
    last = max((k for k, name in enumerate(ORDER) if name in event), default=0)
    if event["type"] == "BlockRemoved":
        return ["BlockRemoved", event["block_hashes"], *([event["medium"]] if "medium" in event else [])]
    return [event.get(name) for name in ORDER[: last + 1]]
