"""KV-event payloads decoded straight into their fields, for who reads hundreds of thousands of blocks a second.

The two forms that engines write, all events as maps or all as arrays, are decoded by a typed decoder in one go;
whatever else there is takes the way of `kvcache.events`, event by event. Both check the same and refuse the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from kvcache.blocks import namespace_root
from kvcache.events import (
    BlockId,
    EventDecodeError,
    convert,
    describe,
    extra_keys,
    namespace,
    raw_batch,
)


class Stored(msgspec.Struct, gc=False, rename={"group_index": "group_idx", "attention": "kv_cache_spec_kind"}):
    """A `BlockStored` as it is on the wire, in the order of the array form."""

    block_hashes: list[BlockId]
    parent_block_hash: BlockId | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_index: int | None = None
    attention: str | None = None

    def __repr__(self) -> str:
        return f"Stored(blocks={len(self.block_hashes)})"  # token ids and salts are never shown

    def tokens(self) -> array[int]:
        """Its token ids, 32 bits each. Raises EventDecodeError where they can't be, or don't fill the blocks."""
        blocks, size, ids = len(self.block_hashes), self.block_size, self.token_ids
        if size < 1:
            raise EventDecodeError(f"BlockStored: block_size must be at least 1 token, got {size}")
        if ids and len(ids) != blocks * size:
            raise EventDecodeError(f"BlockStored: {len(ids)} token ids do not fill {blocks} blocks of {size}")
        try:
            return array("I", ids)
        except OverflowError:
            raise EventDecodeError("BlockStored: a token id is outside 0 … 2^32 - 1") from None

    def roots(self) -> tuple[int | None, int | None]:
        """The namespace of a prompt that begins with these blocks, and the one that it would be in without its salt;
        None for the public one.

        SGLang's extra key stays with both: it may name an adapter, whose blocks aren't others'.
        """
        entries = self.extra_keys if self.extra_keys and any(self.extra_keys) else ()
        keys = extra_keys(entries, self.lora_name, first_of_prompt=True)
        lora = self.lora_name or (f"lora_id={self.lora_id}" if self.lora_id is not None else None) or keys.lora
        salt, extra_key = self._salt() or keys.salt, self._extra_key()
        root = namespace_root(namespace(salt, extra_key), lora)
        return root, namespace_root(extra_key, lora) if salt else root

    @property
    def tells_salts(self) -> bool:
        """Whether it would say so if its blocks were salted: vLLM says of each block what made its hash differ, in
        releases that say it at all; SGLang only names the salt that there is."""
        return self.extra_keys is not None or self._salt() is not None

    def _salt(self) -> str | None:
        return None

    def _extra_key(self) -> str | None:
        return None

    def multimodal(self) -> Mapping[int, tuple[int, ...]]:
        """The u64 keys of pictures and the like, by position of their block."""
        if not self.extra_keys or not any(self.extra_keys):
            return {}
        first = self.parent_block_hash is None
        return extra_keys(self.extra_keys, self.lora_name, first_of_prompt=first).multimodal


class Removed(msgspec.Struct, gc=False, rename={"group_index": "group_idx"}):
    """A `BlockRemoved`."""

    block_hashes: list[BlockId]
    medium: str | None = None
    group_index: int | None = None


class Cleared(msgspec.Struct, gc=False):
    """An `AllBlocksCleared`."""


Event = Stored | Removed | Cleared


class WireBatch(msgspec.Struct, gc=False):
    """One payload. `ts` is the engine's clock in Unix seconds."""

    ts: float
    events: list[Event]
    unknown_events: int = 0


class _StoredFields(Stored):
    """With the fields that SGLang adds, which the array form doesn't have."""

    cache_salt: str | None = None
    extra_key: str | None = None

    def _salt(self) -> str | None:
        return self.cache_salt

    def _extra_key(self) -> str | None:
        return self.extra_key


_TYPES: Mapping[str, type[Stored] | type[Removed] | type[Cleared]] = {
    "BlockStored": _StoredFields,
    "BlockRemoved": Removed,
    "AllBlocksCleared": Cleared,
}


class _StoredMap(_StoredFields, tag="BlockStored", tag_field="type"):
    pass


class _RemovedMap(Removed, tag="BlockRemoved", tag_field="type"):
    pass


class _ClearedMap(Cleared, tag="AllBlocksCleared", tag_field="type"):
    pass


class _StoredArray(Stored, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(Removed, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(Cleared, tag="AllBlocksCleared", array_like=True):
    pass


class _Maps(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredMap | _RemovedMap | _ClearedMap]


class _Arrays(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]


_MAPS, _ARRAYS = msgspec.msgpack.Decoder(_Maps), msgspec.msgpack.Decoder(_Arrays)


def decode_wire(payload: bytes) -> WireBatch:
    """The events of one payload. Raises EventDecodeError."""
    for decoder in (_MAPS, _ARRAYS):
        try:
            batch = decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError):
            continue
        return WireBatch(batch.ts, batch.events)  # type: ignore[arg-type]  # a list of subclasses, only read
    return _by_event(payload)


def _by_event(payload: bytes) -> WireBatch:
    raw, _ = raw_batch(payload)
    batch = WireBatch(raw.ts, [])
    for position, item in enumerate(raw.events):
        name, fields, _ = describe(item, f"event {position}")
        if name in _TYPES:
            batch.events.append(convert(fields, _TYPES[name], f"event {position} ({name})"))
        else:
            batch.unknown_events += 1
    return batch
