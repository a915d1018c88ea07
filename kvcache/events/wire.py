"""The KV-event wire format of vLLM and SGLang: the one decoder for all that read events.

A payload is one msgpack batch, `[timestamp, events, data_parallel_rank]` (or the same as a map). An event is a map with
a `type`, as vLLM from 0.24 and SGLang write it, or an array with the type first, as vLLM up to 0.23 and older SGLang
wrote it. Unknown fields and event types are left out: engines add some with nearly every release.

Payloads whose events all have one of these two forms are decoded by a typed decoder in one go, which reads hundreds of
thousands of blocks per second. Any other payload is read event by event, so that one event that can't be read does not
spoil the others.

Events carry prompts (token ids) and tenants' salts in plain text; no `repr` and no error shows either.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from prefixwatch.kvcache.blocks import multimodal_key, namespace_root
from prefixwatch.kvcache.events.variants import usual

BlockId = int | bytes
"""The engine's own name of a block: an integer (signed in SGLang, unsigned in vLLM) or a raw digest. A text is read as
its bytes."""

MAX_TOKEN_ID = 2**32 - 1


class EventDecodeError(ValueError):
    """A payload or event can't be read. The message says what is wrong and where, without any content."""


class Tier(StrEnum):
    """Where a block is, nearest first."""

    GPU = "gpu"
    CPU = "cpu"
    DISK = "disk"
    REMOTE = "remote"


_TIER_OF_MEDIUM: dict[str | None, Tier] = {
    None: Tier.GPU,
    **dict.fromkeys(("GPU", "DEVICE", "HBM", "VRAM", "CUDA", "ROCM", "NPU", "XPU", "TPU", "HPU"), Tier.GPU),
    **dict.fromkeys(("CPU", "CPUPINNED", "HOST", "HOSTPINNED", "DRAM"), Tier.CPU),
    **dict.fromkeys(("DISK", "SSD", "NVME", "STORAGE", "FILE"), Tier.DISK),
    **dict.fromkeys(("EXTERNAL", "REMOTE"), Tier.REMOTE),
}


@lru_cache(maxsize=256)
def tier_of(medium: str | None) -> Tier:
    """The tier of a medium, written in any case with or without `_` and `-`. An unknown medium counts as remote: never
    as something that the GPU holds."""
    name = None if medium is None else medium.upper().replace("_", "").replace("-", "")
    return _TIER_OF_MEDIUM.get(name, Tier.REMOTE)


class Namespace(NamedTuple):
    """What an engine keeps apart whatever the tokens are."""

    salt: str | None = None
    lora: str | None = None
    extra_key: str | None = None
    """SGLang's own; it may name an adapter, whose blocks aren't others'."""

    def __repr__(self) -> str:
        return "Namespace()"

    def root(self) -> int | None:
        return namespace_root(self.salt, self.lora, self.extra_key)


class Stored(msgspec.Struct, gc=False, rename={"group_index": "group_idx", "attention": "kv_cache_spec_kind"}):
    """A run of blocks, each the child of the one before it; the first one's parent is `parent_block_hash`.

    Fields are in the order of the array form. `token_ids` has `len(block_hashes) * block_size` entries, or none where a
    lower tier names blocks that the engine has described before: `tokens()` checks it.
    """

    block_hashes: list[BlockId]
    parent_block_hash: BlockId | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    """Of adapters from 1 on; the base model has none, or 0."""
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_index: int | None = None
    attention: str | None = None

    def __repr__(self) -> str:
        return f"Stored(blocks={len(self.block_hashes)}, block_size={self.block_size}, tier={self.tier})"

    @property
    def tier(self) -> Tier:
        return tier_of(self.medium)

    def tokens(self) -> array[int]:
        """The token ids, 32 bits each. Raises EventDecodeError where they don't fit, or don't fill the blocks."""
        blocks, size, ids = len(self.block_hashes), self.block_size, self.token_ids
        if size < 1:
            raise EventDecodeError(f"BlockStored: block_size must be at least 1 token, got {size}")
        if ids and len(ids) != blocks * size:
            raise EventDecodeError(f"BlockStored: {len(ids)} token ids do not fill {blocks} blocks of {size}")
        try:
            return array("I", ids)
        except OverflowError:
            raise EventDecodeError(f"BlockStored: a token id is outside 0 … {MAX_TOKEN_ID}") from None

    def namespace(self) -> Namespace:
        """The namespace of these blocks. The salt is only known on the first blocks of a prompt."""
        keys = self._keys()
        lora = self.lora_name or (f"lora_id={self.lora_id}" if (self.lora_id or 0) > 0 else None) or keys.lora
        return Namespace(self._salt() or keys.salt, lora, self._extra_key())

    @property
    def tells_salts(self) -> bool:
        """Whether the event would name a salt if its blocks had one: vLLM lists for each block what made its hash
        differ, in releases that list it at all; SGLang only names a salt that there is."""
        return self.extra_keys is not None or self._salt() is not None

    def multimodal(self) -> Mapping[int, tuple[int, ...]]:
        """The u64 keys of images and the like by position of their block, as `kvcache.blocks.block_hashes` takes
        them."""
        return self._keys().multimodal

    def _keys(self) -> ExtraKeys:
        if not self.extra_keys or not any(self.extra_keys):
            return _NO_KEYS
        return extra_keys(self.extra_keys, self.lora_name, first_of_prompt=self.parent_block_hash is None)

    def _salt(self) -> str | None:
        return None

    def _extra_key(self) -> str | None:
        return None


class Removed(msgspec.Struct, gc=False, rename={"group_index": "group_idx"}):
    """Blocks that left a tier."""

    block_hashes: list[BlockId]
    medium: str | None = None
    group_index: int | None = None

    def __repr__(self) -> str:
        return f"Removed(blocks={len(self.block_hashes)}, tier={self.tier})"

    @property
    def tier(self) -> Tier:
        return tier_of(self.medium)


class Cleared(msgspec.Struct, gc=False):
    """The engine dropped its whole prefix cache."""


class Unreadable(NamedTuple):
    """An event that breaks the format, with what could be read of it."""

    type: str
    """`BlockStored`, `BlockRemoved`, `AllBlocksCleared`; empty if even that can't be read."""
    reason: str
    group_index: int | None = None
    attention: str | None = None
    medium: str | None = None

    @property
    def tier(self) -> Tier:
        return tier_of(self.medium)

    @property
    def harmless(self) -> bool:
        """Whether leaving it out only makes the index claim less than the engine holds."""
        return self.type == "BlockStored"


Event = Stored | Removed | Cleared | Unreadable


class EventBatch(msgspec.Struct, gc=False):
    """One payload. `ts` is the engine's clock in Unix seconds."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None
    unknown_events: int = 0


class _Metadata(msgspec.Struct, gc=False):
    """What SGLang says of the request that stored the blocks, where there is something to say."""

    cache_salt: str | None = None
    extra_key: str | None = None


_NO_METADATA = _Metadata()


class _StoredFields(Stored):
    """With the fields that SGLang adds; in the array form it puts the metadata where vLLM has the adapter's name."""

    cache_salt: str | None = None
    extra_key: str | None = None
    metadata: _Metadata | None = None

    def _salt(self) -> str | None:
        return self.cache_salt or (self.metadata or _NO_METADATA).cache_salt

    def _extra_key(self) -> str | None:
        return self.extra_key or (self.metadata or _NO_METADATA).extra_key


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
    data_parallel_rank: int | None = None


class _Arrays(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    data_parallel_rank: int | None = None


class _Envelope(msgspec.Struct):
    """A batch whose events haven't been looked into."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


_TYPES: Mapping[str, type[Stored] | type[Removed] | type[Cleared]] = {
    "BlockStored": _StoredFields,
    "BlockRemoved": Removed,
    "AllBlocksCleared": Cleared,
}
_ARRAY_FIELDS = {
    "BlockStored": Stored.__struct_encode_fields__,
    "BlockRemoved": Removed.__struct_encode_fields__,
}
_MAPS, _ARRAYS = msgspec.msgpack.Decoder(_Maps), msgspec.msgpack.Decoder(_Arrays)


def decode_batch(payload: bytes) -> EventBatch:
    """The events of one payload; those that can't be read are `Unreadable`. Raises EventDecodeError where the payload
    is not a batch at all."""
    for decoder in (_MAPS, _ARRAYS):
        try:
            batch = decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError):
            continue
        return EventBatch(batch.ts, batch.events, batch.data_parallel_rank)  # type: ignore[arg-type]  # subclasses
    return _by_event(payload)


def _by_event(payload: bytes) -> EventBatch:
    try:
        raw = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError, TypeError) as error:
        raise EventDecodeError(f"a payload of {len(payload)} bytes is not msgpack: {error}") from error
    fields = dict(zip(_Envelope.__struct_fields__, raw, strict=False)) if isinstance(raw, list) else raw
    if not isinstance(fields, dict):
        raise EventDecodeError(f"a batch must be an array or a map, not {_kind(raw)}")
    try:
        envelope = msgspec.convert(fields, _Envelope)
    except msgspec.ValidationError as error:
        raise EventDecodeError(f"batch: {error}") from error
    batch = EventBatch(envelope.ts, [], envelope.data_parallel_rank)
    for position, item in enumerate(envelope.events):
        event = _event(item, f"event {position}")
        if event is None:
            batch.unknown_events += 1
        else:
            batch.events.append(event)
    return batch


def _event(item: Any, where: str) -> Event | None:
    """One event; None for a type that isn't known."""
    name: Any = None
    if isinstance(item, dict):
        fields = dict(item)
        name = fields.pop("type", None)
    elif isinstance(item, list) and item:
        name, values = item[0], item[1:]
        fields = dict(zip(_ARRAY_FIELDS.get(name, ()) if isinstance(name, str) else (), values, strict=False))
    else:
        return Unreadable("", f"{where} must be a map or a non-empty array, not {_kind(item)}")
    if not isinstance(name, str):
        return Unreadable("", f"{where} has no type: expected a text such as BlockStored, not {_kind(name)}")
    if name not in _TYPES:
        return None
    try:
        return msgspec.convert(usual(fields), _TYPES[name])
    except msgspec.ValidationError as error:
        group, attention, medium = (fields.get(key) for key in ("group_idx", "kv_cache_spec_kind", "medium"))
        return Unreadable(
            name,
            f"{where} ({name}): {error}",
            group if isinstance(group, int) else None,
            attention if isinstance(attention, str) else None,
            medium if isinstance(medium, str) else None,
        )


class ExtraKeys(NamedTuple):
    """What made an engine hash blocks differently."""

    salt: str | None = None
    lora: str | None = None
    multimodal: Mapping[int, tuple[int, ...]] = {}  # never written to

    def __repr__(self) -> str:
        return "ExtraKeys()"


_NO_KEYS = ExtraKeys()


def extra_keys(per_block: Sequence[list[Any] | None], lora: str | None, *, first_of_prompt: bool) -> ExtraKeys:
    """What made the engine hash these blocks differently.

    vLLM lists, in order: the LoRA name, `[identifier, offset]` of each multimodal item, the salt (first block of a
    prompt only), digests of prompt embeddings. Its hashing code tags the entries by a leading word ("lora", "mm",
    "cache_salt"); events have carried them bare so far, so both are read. An entry of an unknown shape becomes a key of
    its block, which keeps it apart from blocks without.
    """
    salt = found_lora = None
    multimodal: dict[int, tuple[int, ...]] = {}
    for position, entries in enumerate(per_block):
        keys: list[int] = []
        for place, entry in enumerate(entries or ()):
            match entry:
                case ["lora", str(name), *_]:
                    found_lora = name
                case ["cache_salt", str(text)]:
                    salt = text
                case ["mm", str() | bytes() as identifier, int(offset)]:
                    keys.append(multimodal_key(identifier, offset))
                case [str() | bytes() as identifier, int(offset)]:
                    keys.append(multimodal_key(identifier, offset))
                case str() if place == 0 and entry == lora:
                    found_lora = lora
                case str() if first_of_prompt and position == 0:
                    salt = entry
                case _:
                    keys.append(multimodal_key(msgspec.msgpack.encode(entry), 0))
        if keys:
            multimodal[position] = tuple(keys)
    return ExtraKeys(salt, found_lora, multimodal)


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
