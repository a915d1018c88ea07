"""What each tenant has sent before: the one thing that distinguishes its own reuse of a cache from another's.

Pure and bounded. A prompt's chain hashes are remembered before it is sent, so requests still in flight count as sent.
Within the memory's window the answer is exact (`kvcache.block_memory`). Beyond it, an opening counts as the tenant's
own where a filter says that it may have been sent: that is wrong for one strange opening in 70 at most, and then only
misses somebody else's reuse. Reuse that isn't explained is certain to be another's; where neither is known the answer
is None.

An engine also caches what it generates: the next turn of a chat finds its last answer there. So the end of each
prompt is kept with how far prompt and answer reach together; a later prompt that repeats it may own as much.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from prefixwatch.kvcache.block_memory import BlockMemory, Owner
from prefixwatch.kvcache.blocks import Hashes, Tokens

_ENDS = 65_536
"""Of all tenants together."""


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


@dataclass(slots=True, eq=False)
class Sent:
    """One request as it was sent, and what its tenant had sent until then."""

    number: int
    tenant: _Tenant
    tokens: Tokens
    blocks: Hashes
    block_size: int
    depth: int
    """Its leading blocks that the tenant is known to have sent."""
    bound: int
    """Its leading blocks that the tenant may have sent."""
    end: _End


@dataclass(slots=True, eq=False)
class _Tenant:
    """One tenant's chains, and the ends of its prompts by their last full block (0: none) and the tokens behind it."""

    owner: Owner
    unread: bool = False
    """A prompt was sent whose tokens aren't known: the tenant may own what nobody remembers."""
    forgot_short_end: bool = False
    forgot_end: bool = False
    ends: OrderedDict[int, dict[bytes, _End]] = field(default_factory=OrderedDict)
    end_count: int = 0

    def open_end(self, number: int, tokens: Tokens, blocks: Hashes, block_size: int) -> _End:
        """Remember where this prompt ends; its answer is on its way."""
        key = int(blocks[-1]) if len(blocks) else 0
        rest = tokens[len(blocks) * block_size :].tobytes()
        ends = self.ends.setdefault(key, {})
        self.ends.move_to_end(key)
        end = ends.get(rest)
        if end is None:
            end = ends[rest] = _End(number, len(tokens))
            self.end_count += 1
        end.open += 1
        return end

    def drop_oldest_ends(self) -> int:
        """How many were dropped."""
        key, dropped = self.ends.popitem(last=False)
        self.end_count -= len(dropped)
        if key == 0:
            self.forgot_short_end = True
        else:
            self.forgot_end = True
        return len(dropped)

    def may_continue_forgotten(self, depth: int) -> bool:
        """Whether a prompt with this number of known blocks may repeat one whose end was dropped."""
        return self.forgot_short_end or (self.forgot_end and depth > 0)

    def reach_tokens(self, sent: Sent) -> float:
        """How far earlier prompts that this one repeats to their end reach with their answers; 0 without any."""
        reach = 0.0
        for position, key in enumerate((0, *sent.blocks[: sent.depth].tolist())):
            ends = self.ends.get(key)
            if ends is None:
                continue
            begin = position * sent.block_size
            for length in range(begin, min(begin + sent.block_size, len(sent.tokens) + 1)):
                end = ends.get(sent.tokens[begin:length].tobytes())
                if end is not None and end.number < sent.number:
                    reach = math.inf if end.open else max(reach, end.reach_tokens)
        return reach


class TenantMemory:
    """What tenants have sent: at most `blocks` blocks of all of them together.

    Tenants beyond the limit aren't remembered, except for those that are known by name.
    """

    def __init__(self, blocks: int, tenants: int, known: Iterable[str] = ()) -> None:
        self._memory = BlockMemory(blocks)
        self._known = frozenset(known)
        self._room = tenants
        self._tenants: dict[str, _Tenant] = {}
        self._number = 0
        self._ends = 0

    def __len__(self) -> int:
        """Tenants remembered."""
        return len(self._tenants)

    @property
    def blocks(self) -> int:
        """Blocks remembered, with what their prompts cost; never above the bound."""
        return self._memory.blocks

    def sent(self, tenant: str, tokens: Tokens, blocks: Hashes, block_size: int) -> Sent | None:
        """A prompt is about to be sent; None for a tenant there is no room for."""
        memory = self._tenant(tenant)
        if memory is None:
            return None
        self._number += 1
        depth, bound = self._memory.add(memory.owner, blocks)
        ends = memory.end_count
        end = memory.open_end(self._number, tokens, blocks, block_size)
        self._ends += memory.end_count - ends
        if self._ends > _ENDS:
            self._drop_ends(memory)
        return Sent(self._number, memory, tokens, blocks, block_size, depth, bound, end)

    def sent_unread(self, tenant: str) -> None:
        """A prompt was sent whose tokens aren't known: from now on the tenant may own what nobody remembers."""
        memory = self._tenant(tenant)
        if memory is not None:
            memory.unread = True

    def _drop_ends(self, current: _Tenant) -> None:
        """As with blocks: whoever has more than an equal share gives way."""
        share = _ENDS // len(self._tenants)
        above = current if current.end_count > share else max(self._tenants.values(), key=lambda each: each.end_count)
        self._ends -= above.drop_oldest_ends()

    def answered(self, sent: Sent, output_tokens: int | None, cached_tokens: int | None) -> int | None:
        """The request is over: how much of its opening its tenant had sent, or been answered, before; in tokens.

        None when that can't be known: what was dropped, and an answer that isn't over or of unknown length, may have
        filled the cache with anything. Answers are only looked into where the sent blocks alone don't explain
        `cached_tokens`.
        """
        memory, end = sent.tenant, sent.end
        end.open -= 1
        own_tokens: float = sent.depth * sent.block_size
        certain = sent.depth == len(sent.blocks) or not (memory.unread or memory.owner.lost or memory.owner.forgot)
        if cached_tokens is None or cached_tokens >= own_tokens + sent.block_size:
            own_tokens = max(own_tokens, memory.reach_tokens(sent))
            if memory.owner.forgot and not (memory.unread or memory.owner.lost):
                most = sent.bound * sent.block_size  # exact enough where even that doesn't explain what was reused
                certain = cached_tokens is not None and cached_tokens >= most + sent.block_size
                own_tokens = max(own_tokens, most) if certain else own_tokens
            certain = certain and math.isfinite(own_tokens) and not memory.may_continue_forgotten(sent.depth)
        end.reach_tokens = max(end.reach_tokens, math.inf if output_tokens is None else end.tokens + output_tokens)
        return min(int(own_tokens), len(sent.tokens)) if certain else None

    def _tenant(self, name: str) -> _Tenant | None:
        memory = self._tenants.get(name)
        if memory is None and (name in self._known or len(self._tenants) < self._room):
            memory = self._tenants[name] = _Tenant(self._memory.new_owner())
        return memory
