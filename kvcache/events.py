"""The KV-event wire format of vLLM and SGLang, decoded.

A payload is one msgpack batch, `[timestamp, events, data_parallel_rank]` (or the same as a map). An event is a
map with a `type`, as vLLM from 0.24 and SGLang write it, or an array with the type first, as vLLM up to 0.23
and older SGLang wrote it. Fields and event types that are not known here are counted and left out: engines add
some with nearly every release.

Events carry prompts (token ids) and tenants' salts in plain text; no `repr` and no error shows either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from kvcache.blocks import multimodal_key

BlockId = int | bytes
"""The engine's own name of a block: an integer (signed in SGLang, unsigned in vLLM) or a raw digest."""

MAX_TOKEN_ID = 2**32 - 1

_T = TypeVar("_T")


class EventDecodeError(ValueError):
    """A payload is not a batch of KV events; the message says what and where, without any content."""


class Tier(StrEnum):
    """Where a block lies, nearest first."""

    GPU = "gpu"
    CPU = "cpu"
    DISK = "disk"
    REMOTE = "remote"


_TIER_OF_MEDIUM = {
    "GPU": Tier.GPU,
    "CPU": Tier.CPU,
    "CPU_PINNED": Tier.CPU,
    "HOST": Tier.CPU,
    "DISK": Tier.DISK,
    "SSD": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.REMOTE,
    "REMOTE": Tier.REMOTE,
}


@dataclass(frozen=True, slots=True, repr=False)
class BlockStored:
    """A run of blocks, each the child of the one before it; the first one's parent is `parent_id`.

    `token_ids` has `len(block_ids) * block_size` entries, or none where a lower tier names blocks that the
    engine has described before. `salt` is only known on the first block of a prompt. `multimodal` maps a
    block's position in this run to its u64 keys, as `kvcache.blocks.block_hashes` takes them.
    """

    block_ids: tuple[BlockId, ...]
    parent_id: BlockId | None
    token_ids: tuple[int, ...]
    block_size: int
    tier: Tier = Tier.GPU
    salt: str | None = None
    lora: str | None = None
    multimodal: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    group_index: int | None = None
    attention: str | None = None

    def __repr__(self) -> str:
        return (
            f"BlockStored(blocks={len(self.block_ids)}, block_size={self.block_size}, tier={self.tier}, "
            f"salted={self.salt is not None}, lora={self.lora is not None}, multimodal={len(self.multimodal)}, "
            f"group_index={self.group_index}, attention={self.attention})"
        )


@dataclass(frozen=True, slots=True, repr=False)
class BlockRemoved:
    """Blocks that left a tier."""

    block_ids: tuple[BlockId, ...]
    tier: Tier = Tier.GPU
    group_index: int | None = None

    def __repr__(self) -> str:
        return f"BlockRemoved(blocks={len(self.block_ids)}, tier={self.tier}, group_index={self.group_index})"


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The engine dropped its whole prefix cache."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What one message says. `timestamp` is the engine's clock, in Unix seconds."""

    timestamp: float
    events: tuple[KvEvent, ...]
    data_parallel_rank: int | None = None
    unknown_events: int = 0
    unknown_fields: int = 0


class RawBatch(msgspec.Struct):
    """The envelope of a payload."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class _Stored(msgspec.Struct):
    """Fields in the order of the array form; the last two are SGLang's."""

    block_hashes: tuple[BlockId, ...]
    parent_block_hash: BlockId | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


class _Removed(msgspec.Struct):
    block_hashes: tuple[BlockId, ...]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct):
    """Has no field of interest."""


_Wire = _Stored | _Removed | _Cleared
_WIRE_TYPES: Mapping[str, type[_Stored] | type[_Removed] | type[_Cleared]] = {
    "BlockStored": _Stored,
    "BlockRemoved": _Removed,
    "AllBlocksCleared": _Cleared,
}
_ARRAY_FIELDS = {
    "BlockStored": _Stored.__struct_fields__[:10],
    "BlockRemoved": _Removed.__struct_fields__,
    "AllBlocksCleared": (),
}
_BATCH_FIELDS = RawBatch.__struct_fields__


def decode_batch(payload: bytes) -> EventBatch:
    """The events of one payload. Raises EventDecodeError."""
    batch, unknown_fields = raw_batch(payload)
    events: list[KvEvent] = []
    unknown_events = 0
    for position, item in enumerate(batch.events):
        where = f"event {position}"
        name, described, left_over = describe(item, where)
        wire_type = _WIRE_TYPES.get(name)
        if wire_type is None:
            unknown_events += 1
            continue
        unknown_fields += left_over + _unknown(described, wire_type)
        events.append(_event(convert(described, wire_type, f"{where} ({name})"), where))
    return EventBatch(batch.ts, tuple(events), batch.data_parallel_rank, unknown_events, unknown_fields)


def raw_batch(payload: bytes) -> tuple[RawBatch, int]:
    """A payload's batch, its events not looked into, and how many of its fields aren't known.

    Raises EventDecodeError.
    """
    try:
        raw = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError, TypeError) as error:
        raise EventDecodeError(f"a payload of {len(payload)} bytes is not msgpack: {error}") from error
    fields = dict(zip(_BATCH_FIELDS, raw, strict=False)) if isinstance(raw, list) else raw
    if not isinstance(fields, dict):
        raise EventDecodeError(f"a batch must be an array or a map, not {_kind(raw)}")
    batch = convert(fields, RawBatch, "batch")
    unknown_fields = max(len(raw) - len(_BATCH_FIELDS), 0) if isinstance(raw, list) else _unknown(raw, RawBatch)
    return batch, unknown_fields


def describe(item: Any, where: str) -> tuple[str, dict[str, Any], int]:
    """An event's type, its fields by name, and how many fields of an array have no name here.

    Raises EventDecodeError.
    """
    if isinstance(item, dict):
        described = dict(item)
        name, left_over = described.pop("type", None), 0
    elif isinstance(item, list) and item:
        name, values = item[0], item[1:]
        names = _ARRAY_FIELDS.get(name, ()) if isinstance(name, str) else ()
        described, left_over = dict(zip(names, values, strict=False)), max(len(values) - len(names), 0)
    else:
        raise EventDecodeError(f"{where} must be a map or a non-empty array, not {_kind(item)}")
    if not isinstance(name, str):
        raise EventDecodeError(f"{where} has no type: expected a text such as BlockStored, not {_kind(name)}")
    return name, described, left_over


def convert(fields: Mapping[str, Any], to: type[_T], where: str) -> _T:
    """Fields as a struct. Raises EventDecodeError."""
    try:
        return msgspec.convert(fields, type=to)
    except msgspec.ValidationError as error:
        raise EventDecodeError(f"{where}: {error}") from error


def _unknown(fields: Mapping[str, Any], wire_type: type[msgspec.Struct]) -> int:
    return sum(1 for name in fields if name not in wire_type.__struct_fields__)


def _event(wire: _Wire, where: str) -> KvEvent:
    if isinstance(wire, _Stored):
        return _stored(wire, where)
    if isinstance(wire, _Removed):
        return BlockRemoved(wire.block_hashes, tier_of(wire.medium), wire.group_idx)
    return AllBlocksCleared()


def _stored(wire: _Stored, where: str) -> BlockStored:
    blocks, tokens, block_size = len(wire.block_hashes), wire.token_ids, wire.block_size
    if block_size < 1:
        raise EventDecodeError(f"{where} (BlockStored): block_size must be at least 1 token, got {block_size}")
    if tokens and len(tokens) != blocks * block_size:
        raise EventDecodeError(
            f"{where} (BlockStored): {len(tokens)} token ids do not fill {blocks} blocks of {block_size}"
        )
    if tokens and not (min(tokens) >= 0 and max(tokens) <= MAX_TOKEN_ID):
        raise EventDecodeError(f"{where} (BlockStored): a token id is outside 0 … {MAX_TOKEN_ID}")
    lora = wire.lora_name or (f"lora_id={wire.lora_id}" if wire.lora_id is not None else None)
    keys = extra_keys(wire.extra_keys or (), wire.lora_name, first_of_prompt=wire.parent_block_hash is None)
    return BlockStored(
        block_ids=wire.block_hashes,
        parent_id=wire.parent_block_hash,
        token_ids=tokens,
        block_size=block_size,
        tier=tier_of(wire.medium),
        salt=namespace(wire.cache_salt or keys.salt, wire.extra_key),
        lora=lora or keys.lora,
        multimodal=keys.multimodal,
        group_index=wire.group_idx,
        attention=wire.kv_cache_spec_kind,
    )


@dataclass(slots=True, repr=False)
class ExtraKeys:
    salt: str | None = None
    lora: str | None = None
    multimodal: dict[int, tuple[int, ...]] = field(default_factory=dict)


def extra_keys(per_block: Sequence[list[Any] | None], lora: str | None, *, first_of_prompt: bool) -> ExtraKeys:
    """What made the engine hash these blocks differently.

    vLLM lists, in order: the LoRA name, `[identifier, offset]` of each multimodal item, the salt (first block
    of a prompt only), digests of prompt embeddings. Its hashing code tags the entries by a leading word
    ("lora", "mm", "cache_salt"); events have carried them bare so far, so both are read. An entry of no known
    shape becomes a key of its block, which keeps it apart from blocks without.
    """
    found = ExtraKeys()
    for position, entries in enumerate(per_block):
        keys: list[int] = []
        for place, entry in enumerate(entries or ()):
            match entry:
                case ["lora", str(name), *_]:
                    found.lora = name
                case ["cache_salt", str(salt)]:
                    found.salt = salt
                case ["mm", str() | bytes() as identifier, int(offset)]:
                    keys.append(multimodal_key(identifier, offset))
                case [str() | bytes() as identifier, int(offset)]:
                    keys.append(multimodal_key(identifier, offset))
                case str() if place == 0 and entry == lora:
                    found.lora = lora
                case str() if first_of_prompt and position == 0:
                    found.salt = entry
                case _:
                    keys.append(multimodal_key(msgspec.msgpack.encode(entry), 0))
        if keys:
            found.multimodal[position] = tuple(keys)
    return found


def namespace(salt: str | None, extra_key: str | None) -> str | None:
    """SGLang keeps apart by a salt, an extra key, or both; one text stands for the pair."""
    if extra_key and salt:
        return f"{len(extra_key)}:{extra_key}{salt}"
    return salt or extra_key or None


def tier_of(medium: str | None) -> Tier:
    """A medium that is not known is counted as remote: never as something the GPU holds."""
    return Tier.GPU if medium is None else _TIER_OF_MEDIUM.get(medium.upper(), Tier.REMOTE)


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
