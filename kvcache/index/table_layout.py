"""The columns that `kvcache.index.block_table` consists of, as its compiled loops (`table_kernel`) see them.

A table is an array of 2^k records whose field `key` (u64) is 0 where the place is free.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

WORKER_ENTRY = np.dtype([("key", "<u8"), ("at", "<f8"), ("row", "<i4"), ("copies", "<i4")])
"""A block at one worker, by the engine's name of it: since when, its row, and how many copies the engine keeps."""
ROW_ENTRY = np.dtype([("key", "<u8"), ("row", "<i4")])
"""Where the row of a chain hash is."""
EVICTED_ENTRY = np.dtype([("key", "<u8"), ("at", "<f8")])
"""When a chain hash was evicted at one worker."""
OPENING_ENTRY = np.dtype([("key", "<u8"), ("held", "<i4")])
"""How many blocks of one worker begin, and are, the same except for their salts."""
BLOCK = np.dtype(
    [
        ("hash", "<u8"),
        ("opening", "<u8"),
        ("parent", "<i4"),
        ("children", "<i4"),
        ("replicas", "<i4"),
        ("tokens", "<i4"),
    ]
)
"""A distinct block: its chain hash, the one that it would have without its salt (the same where it has none), its
parent's row, how many rows have it as parent, how many workers hold it, and how many tokens it holds.

A free row has -1 children; its parent is the next free row.
"""
REMOVED, STORED_AFTER, STORED_UNDER, STORED_BARE = range(4)
"""Kinds of runs, which are consecutive blocks of one event. Stored after a block (the parent is the engine's name of
it), under a namespace (the parent is its root), or at the beginning of the public namespace."""

DONE, ORPHAN = range(2)
"""The outcome of a run; an orphan's parent isn't known, and nothing was done with it."""

FRESH_ROW, FREE_ROW, HELD_ROWS = range(3)
"""Places in the fleet's counts: rows ever used, the first free one (-1: none), rows that some worker holds."""

STORED, EVICTED, REGRETTED, LOST_TOKENS, RESIDENT, REMEMBERED, SWEPT, DUPLICATE_TOKENS = range(8)
"""Places in a worker's counts, running totals first. Evictions are remembered in a table that is swept for old ones
from place to place."""


class Fleet(NamedTuple):
    """What all workers share."""

    blocks: Any
    rows: Any
    counts: Any


class Worker(NamedTuple):
    """One worker's part. `ages` counts evictions by the block's lifetime, up to each of `bounds` and above."""

    held: Any
    evicted: Any
    counts: Any
    bounds: Any
    ages: Any
    ages_sum: Any


class Batch(NamedTuple):
    """What is said of a worker, in columns by run: its kind, how many blocks it has, what they are attached to, and
    what a salted run would be attached to without its salt: a root, or 0 for the public namespace. For others the same.

    `ids` are the runs' block names one after the other, `contents` the content hashes of the stored ones among them,
    each of `tokens` tokens. What isn't `counting` changes no total.
    """

    kinds: Any
    sizes: Any
    parents: Any
    openings: Any
    ids: Any
    contents: Any
    tokens: int
    at: float
    regret_seconds: float
    counting: bool
