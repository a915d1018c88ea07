"""Block ids of traces that contradict each other.

A row names each block of its prompt, the last, partial one too, and equal ids mean equal content up to and including
the block. So an id always follows the same one: a trace in which it doesn't is refused. And an id has one length. Where
a trace gives it several (a partial block in one row, a full one in another), prompts can only have shared the shorter
content, which isn't a full block: in the rows with the shorter block the id gets a name of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from prefixwatch.documents import DocumentError


class BlockRow(NamedTuple):
    """One prompt of a trace."""

    where: str
    """`file:line`, for messages."""
    ids: Sequence[int]
    prompt_tokens: int


def check_predecessors(rows: Sequence[BlockRow]) -> None:
    """Raise DocumentError for an id that stands for different contents: it follows different ids."""
    seen: dict[int, tuple[int | None, BlockRow]] = {}
    for row in rows:
        before: int | None = None
        for block in row.ids:
            follows, other = seen.setdefault(block, (before, row))
            if follows != before:
                raise DocumentError(
                    f"{row.where}: block id {block} follows {_named(before)} here and {_named(follows)} in "
                    f"{other.where}: an id stands for its block and all before it, so it has one predecessor. Number "
                    "the blocks by their whole prefix"
                )
            before = block


def _named(block: int | None) -> str:
    return "the start of the prompt" if block is None else f"block {block}"


def consistent_ids(rows: Sequence[BlockRow], block_tokens: int) -> tuple[list[Sequence[int]], str | None]:
    """Each row's ids, in which equal ids stand for blocks of equal length, and what to know about those that didn't.

    Rows that repeat a partial block keep its id.
    """
    longest: dict[int, int] = {}
    for row in rows:
        for block in row.ids[:-1]:
            longest[block] = block_tokens
        if row.ids:
            last = _last_tokens(row, block_tokens)
            longest[row.ids[-1]] = max(longest.get(row.ids[-1], 0), last)
    shorter = [
        position
        for position, row in enumerate(rows)
        if row.ids and _last_tokens(row, block_tokens) < longest[row.ids[-1]]
    ]
    found = [row.ids for row in rows]
    for position in shorter:
        row = rows[position]
        found[position] = (*row.ids[:-1], _renamed(row.ids[-1], _last_tokens(row, block_tokens), longest))
    return found, _note(rows, shorter, block_tokens) if shorter else None


def _last_tokens(row: BlockRow, block_tokens: int) -> int:
    return row.prompt_tokens - block_tokens * (len(row.ids) - 1)


def _renamed(block: int, tokens: int, taken: dict[int, int]) -> int:
    name = block
    while name in taken:
        name = xxh3_64_intdigest(name.to_bytes(8, "little") + tokens.to_bytes(8, "little"))
    return name


def _note(rows: Sequence[BlockRow], shorter: Sequence[int], block_tokens: int) -> str:
    short = rows[shorter[0]]
    block, tokens = short.ids[-1], _last_tokens(short, block_tokens)
    other, length = next(
        (row, block_tokens if block in row.ids[:-1] else _last_tokens(row, block_tokens))
        for row in rows
        if block in row.ids and (block in row.ids[:-1] or _last_tokens(row, block_tokens) > tokens)
    )
    count = len({rows[position].ids[-1] for position in shorter})
    return (
        f"block id {block} stands for {tokens} tokens in {short.where} and for {length} in {other.where}: the trace "
        f"contradicts itself ({count:,} such id{'s' if count > 1 else ''}). Only the blocks before it count as shared."
    )
