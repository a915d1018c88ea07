"""What each tenant has sent before: the one thing that tells its own reuse of a cache from another's.

Pure and bounded. A prompt's chain hashes go into its tenant's filters before it is sent, so requests still in flight
count as sent. A filter never forgets what it took and seldom claims more, so reuse that it can't explain is certain
to be another's; what had to be dropped makes the answer None, never smaller.

An engine also caches what it generates: the next turn of a chat finds its last answer there. So the end of each
prompt is kept with how far prompt and answer reach together; a later prompt that repeats it may own as much.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from kvcache.blocks import Hashes, Tokens

_FIRST_FILTER_BLOCKS = 16_384
_GROWTH = 4
_SLOTS_A_BLOCK = 16
"""Two of them are set: a full filter takes one strange block in 70 for its own."""
_ENDS_A_TENANT = 8192


class BlockFilter:
    """A Bloom filter of chain hashes, which are uniform, so their two halves do as hash functions.

    A byte a slot: setting bits would take three times as long.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.blocks = 0
        """About how many are in it."""
        slots = 1 << max(capacity_blocks * _SLOTS_A_BLOCK - 1, 63).bit_length()
        self._mask = slots - 1
        self._slots = np.zeros(slots, dtype=np.uint8)
        self._view = self._slots.data

    def __contains__(self, block: int) -> bool:
        return self._view[block & self._mask] == 1 == self._view[(block >> 32) & self._mask]

    def add(self, blocks: Hashes, *, fresh: int) -> None:
        """Add these, of which about so many are new."""
        self._slots[blocks.astype("<u8", copy=False).view("<u4") & np.uint32(self._mask)] = 1
        self.blocks += fresh

    def depth(self, blocks: Hashes) -> int:
        """Leading blocks that are in it. By bisection, which needs every added prompt to be in it from its start."""
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if int(blocks[middle - 1]) in self:
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(slots=True, eq=False)
class _End:
    """The end of a prompt that was sent, once or several times."""

    number: int
    """Of the first request that sent it."""
    tokens: int
    """The prompt's length."""
    open: int = 0
    """Requests whose answer isn't over."""
    reach_tokens: float = 0
    """Prompt and longest answer; infinite after an answer of unknown length."""


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """One request as it was sent, and what its tenant had sent until then."""

    number: int
    tenant: _Tenant
    tokens: Tokens
    blocks: Hashes
    block_size: int
    depth: int
    """Its leading blocks that the tenant had sent."""
    end: _End


_Rest = tuple[int, int]
"""How many tokens come behind a prompt's last full block, and a digest of them."""


class _Tenant:
    """One tenant's filters, newest last, and the ends of its prompts by their last full block (0: none)."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._filters = [BlockFilter(min(_FIRST_FILTER_BLOCKS, capacity_blocks))]
        self._ends: OrderedDict[int, dict[_Rest, _End]] = OrderedDict()
        self._end_count = 0
        self.forgot_blocks = False
        self._forgot_short_end = False
        self._forgot_end = False

    def depth(self, blocks: Hashes) -> int:
        """Leading blocks that were sent; all of them count as sent from now on.

        They are added whole, also where most seem to be known: one wrongly taken as known would be missed later.
        """
        if self._filters[-1].blocks >= self._filters[-1].capacity_blocks:
            self._add_filter()
        depths = [known.depth(blocks) for known in self._filters]
        self._filters[-1].add(blocks, fresh=len(blocks) - depths[-1])
        return max(depths)

    def _add_filter(self) -> None:
        """Room for more; the oldest filter goes when the others hold enough by themselves."""
        if sum(known.capacity_blocks for known in self._filters[1:]) >= self._capacity_blocks:
            self._filters.pop(0)
            self.forgot_blocks = True
        self._filters.append(BlockFilter(min(self._filters[-1].capacity_blocks * _GROWTH, self._capacity_blocks)))

    def open_end(self, number: int, tokens: Tokens, blocks: Hashes, block_size: int) -> _End:
        """Remember where this prompt ends; its answer is on its way."""
        key = int(blocks[-1]) if len(blocks) else 0
        rest = _rest(tokens, len(blocks) * block_size, len(tokens))
        ends = self._ends.setdefault(key, {})
        self._ends.move_to_end(key)
        end = ends.get(rest)
        if end is None:
            end = ends[rest] = _End(number, len(tokens))
            self._end_count += 1
            if self._end_count > _ENDS_A_TENANT:
                self._drop_oldest_ends()
        end.open += 1
        return end

    def _drop_oldest_ends(self) -> None:
        key, dropped = self._ends.popitem(last=False)
        self._end_count -= len(dropped)
        if key == 0:
            self._forgot_short_end = True
        else:
            self._forgot_end = True

    def may_continue_forgotten(self, depth: int) -> bool:
        """Whether a prompt with so many known blocks may repeat one whose end was dropped."""
        return self._forgot_short_end or (self._forgot_end and depth > 0)

    def reach_tokens(self, sent: Sent) -> float:
        """How far earlier prompts that this one repeats to their end reach with their answers; 0 without any."""
        reach = 0.0
        for position, key in enumerate((0, *sent.blocks[: sent.depth].tolist())):
            ends = self._ends.get(key)
            if ends is None:
                continue
            begin = position * sent.block_size
            for length in range(begin, min(begin + sent.block_size, len(sent.tokens) + 1)):
                end = ends.get(_rest(sent.tokens, begin, length))
                if end is not None and end.number < sent.number:
                    reach = math.inf if end.open else max(reach, end.reach_tokens)
        return reach


class TenantMemory:
    """What tenants have sent. Tenants beyond the limit aren't remembered, but for those that are known by name."""

    def __init__(self, blocks_per_tenant: int, tenants: int, known: Iterable[str] = ()) -> None:
        self._blocks_per_tenant = blocks_per_tenant
        self._known = frozenset(known)
        self._room = tenants
        self._tenants: dict[str, _Tenant] = {}
        self._number = 0

    def __len__(self) -> int:
        """Tenants remembered."""
        return len(self._tenants)

    def sent(self, tenant: str, tokens: Tokens, blocks: Hashes, block_size: int) -> Sent | None:
        """A prompt is about to be sent; None for a tenant there is no room for."""
        memory = self._tenant(tenant)
        if memory is None:
            return None
        self._number += 1
        end = memory.open_end(self._number, tokens, blocks, block_size)
        return Sent(self._number, memory, tokens, blocks, block_size, memory.depth(blocks), end)

    def sent_unread(self, tenant: str) -> None:
        """A prompt was sent whose tokens aren't known: from now on the tenant may own what nobody remembers."""
        memory = self._tenant(tenant)
        if memory is not None:
            memory.forgot_blocks = True

    def answered(self, sent: Sent, output_tokens: int | None, cached_tokens: int | None) -> int | None:
        """The request is over: how much of its opening its tenant had sent, or been answered, before; in tokens.

        None when that can't be known: what was dropped, and an answer that isn't over or of unknown length, may have
        filled the cache with anything. Answers are only looked into where the sent blocks alone don't explain
        `cached_tokens`.
        """
        memory, end = sent.tenant, sent.end
        end.open -= 1
        own_tokens: float = sent.depth * sent.block_size
        certain = sent.depth == len(sent.blocks) or not memory.forgot_blocks
        if cached_tokens is None or cached_tokens >= own_tokens + sent.block_size:
            own_tokens = max(own_tokens, memory.reach_tokens(sent))
            certain = certain and math.isfinite(own_tokens) and not memory.may_continue_forgotten(sent.depth)
        end.reach_tokens = max(end.reach_tokens, math.inf if output_tokens is None else end.tokens + output_tokens)
        return min(int(own_tokens), len(sent.tokens)) if certain else None

    def _tenant(self, name: str) -> _Tenant | None:
        memory = self._tenants.get(name)
        if memory is None and (name in self._known or len(self._tenants) < self._room):
            memory = self._tenants[name] = _Tenant(self._blocks_per_tenant)
        return memory


def _rest(tokens: Tokens, begin: int, end: int) -> _Rest:
    return end - begin, xxh3_64_intdigest(tokens[begin:end].tobytes())
