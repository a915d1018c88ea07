"""From an engine's blocks to ours: the same tokens, hashed by `kvcache.blocks`, at our block size.

An engine block that is a multiple of ours is split. Where ours is the multiple, engine blocks are joined, and
one of ours counts only when all of its parts are there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from prefixwatch.kvcache.blocks import as_tokens
from prefixwatch.kvcache.events.wire import BlockId, Stored
from prefixwatch.kvcache.index.keyed_blocks import NAME_MASK, BlockKey, chain_states


class BlockSizeMismatch(ValueError):
    """The engine's block size and ours don't divide one another, so its blocks can't be counted in ours."""


class Unplaceable(ValueError):
    """An event starts inside one of our blocks at a point where the engine's sizes don't fit in."""


@dataclass(frozen=True, slots=True, repr=False)
class Part:
    """An engine block that begins or continues one of our blocks, with the parts before it (a prompt: no repr)."""

    before: Part | None
    block_id: BlockId
    tokens: array[int]
    keys: tuple[int, ...]


@dataclass(slots=True)
class Placement:
    """Where an engine block ends in our chain.

    `chain` is the hash (under a key: the state) of our last complete block up to its end, or the namespace's root, or
    None; `part` the tokens after that. `blocks` are ours that vanish when the engine block does, that is with the last
    of its `copies`: vLLM computes some blocks again that it has, keeps both, and reports when each one comes and goes.
    """

    chain: int | None
    part: Part | None = None
    blocks: tuple[int, ...] = ()
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Credit:
    """One of our blocks that is complete once all of these engine blocks are there."""

    block: int
    block_ids: tuple[BlockId, ...]


def check_block_size(worker: str, engine_tokens: int, our_tokens: int) -> None:
    """Raises BlockSizeMismatch where neither size divides the other."""
    if engine_tokens % our_tokens and our_tokens % engine_tokens:
        raise BlockSizeMismatch(
            f"worker {worker} caches blocks of {engine_tokens} tokens, this index counts blocks of {our_tokens}: "
            f"set block_size to {engine_tokens}, or to a divisor or a multiple of it"
        )


def place(
    event: Stored, tokens: array[int], parent: Placement, block_size: int, key: BlockKey | None = None
) -> tuple[list[Placement], list[Credit]]:
    """Placements of the event's blocks, in order, and which of our blocks they complete only together.

    `tokens` are the event's. Raises Unplaceable.
    """
    if event.block_size >= block_size:
        if parent.part is not None:
            raise Unplaceable(f"a block of {event.block_size} tokens starts inside one of {block_size}")
        return _split(event, tokens, parent, block_size, key), []
    return _join(event, tokens, parent, block_size, key)


def _split(
    event: Stored, tokens: array[int], parent: Placement, block_size: int, key: BlockKey | None
) -> list[Placement]:
    each = event.block_size // block_size
    keys = {
        position * each + piece: keys for position, keys in event.multimodal().items() for piece in range(each)
    }  # a multimodal item's length isn't published, so it sets apart every piece of its block
    states = chain_states(as_tokens(tokens), block_size, parent.chain, keys, key)
    if each == 1:
        return [Placement(state, None, (state & NAME_MASK,)) for state in states]
    groups = (states[k : k + each] for k in range(0, len(states), each))
    return [Placement(group[-1], None, tuple(state & NAME_MASK for state in group)) for group in groups]


def _join(
    event: Stored, tokens: array[int], parent: Placement, block_size: int, key: BlockKey | None
) -> tuple[list[Placement], list[Credit]]:
    placements: list[Placement] = []
    credits: list[Credit] = []
    chain, part, multimodal = parent.chain, parent.part, event.multimodal()
    for k, block_id in enumerate(event.block_hashes):
        own = tokens[k * event.block_size : (k + 1) * event.block_size]
        part = Part(part, block_id, own, multimodal.get(k, ()))
        parts = list(_unroll(part))
        gathered = sum(len(p.tokens) for p in parts)
        if gathered > block_size:
            raise Unplaceable(f"blocks of {event.block_size} tokens straddle one of {block_size}")
        if gathered == block_size:
            joined = as_tokens([token for p in parts for token in p.tokens])
            media = [each for p in parts for each in p.keys]
            chain = chain_states(joined, block_size, chain, {0: media} if media else None, key)[0]
            credits.append(Credit(chain & NAME_MASK, tuple(p.block_id for p in parts)))
            part = None
        placements.append(Placement(chain, part))
    return placements, credits


def _unroll(part: Part) -> Iterator[Part]:
    backwards: list[Part] = []
    step: Part | None = part
    while step is not None:
        backwards.append(step)
        step = step.before
    return reversed(backwards)
