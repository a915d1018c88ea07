"""One engine's KV events into the fleet's block table: batch by batch, in the engine's own block size.

What is kept, dropped and asked for again is as in `kvcache.events.feed`, but blocks are counted, not looked up.
Only what lies on the GPU is counted, and only what full attention stores there.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from prefixwatch.kvcache.blocks import SEED, Hashes, Tokens, content_hashes
from prefixwatch.kvcache.events.sequence import Applied, EventSequence
from prefixwatch.kvcache.events.wire import BlockId, Cleared, EventDecodeError, Removed, Stored
from prefixwatch.kvcache.index.block_table import BlockTable, Runs
from prefixwatch.kvcache.index.table_layout import REMOVED, STORED_AFTER, STORED_BARE, STORED_UNDER

_U64 = 2**64 - 1


class TableFeed(EventSequence):
    """State between one engine's event stream and the block table.

    `wall_clock` is used where a batch has no time. `blocks` has the worker's totals: they count from the
    moment that this feed was made, while a replay of the time before only says what is held.
    """

    def __init__(
        self,
        worker: str,
        table: BlockTable,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(worker)
        self.block_size: int | None = None
        """The engine's, from its first event on."""
        self.tells_salts = False
        """Whether an event came that would name its salt if it had one."""
        self.clears = 0
        """Times that blocks were held and then, all at once, not known to be held any more."""
        self.blocks = table.join(worker)
        self._table = table
        self._wall_clock = wall_clock
        self._since_unix_seconds = wall_clock()
        self._live = False

    def _apply_events(self, events: Sequence[Stored | Removed | Cleared], now_seconds: float, done: Applied) -> None:
        if self.worker not in self._table.workers:  # it had left, and is back
            self.blocks = self._table.join(self.worker)
        at = done.timestamp or 0.0
        work = _Work(at if math.isfinite(at) and at > 0 else self._wall_clock())
        self._live = self._live or not done.replayed
        work.counting = self._live or work.at >= self._since_unix_seconds
        for event in events:
            if isinstance(event, Cleared):
                self._flush(work, now_seconds)
                self._drop_all()
                self.incomplete = False
                done.cleared = True
            elif isinstance(event, Removed):
                work.add_removed(event)
            else:
                self._add(event, work)
        self._flush(work, now_seconds)

    def _add(self, event: Stored, work: _Work) -> None:
        try:
            tokens = event.tokens()
        except EventDecodeError as error:
            self._leave_out(str(error))
            return
        self.block_size = self.block_size or event.block_size
        if tokens and event.block_size == self.block_size:
            work.add_stored(event, tokens)
        else:
            self.counters.ignored_events += 1

    def _flush(self, work: _Work, now_seconds: float) -> None:
        """Apply what has gathered; runs whose parent isn't known wait for it."""
        if not work.events:
            return
        before = self.blocks.resident_blocks
        self.tells_salts = self.tells_salts or work.tells_salts
        orphans = self.blocks.apply(work.runs(self.block_size or 1), work.at, counting=work.counting)
        if self._parked or len(orphans):
            self._park(work, orphans.tolist(), now_seconds)
        self.counters.stored_blocks += work.stored
        self.counters.removed_blocks += max(work.stored + before - self.blocks.resident_blocks, 0)
        work.clear()

    def _park(self, work: _Work, orphans: Iterable[int], now_seconds: float) -> None:
        waiting = set(orphans)
        for position, event in enumerate(work.events):
            if isinstance(event, Removed):
                gone = frozenset(event.block_hashes)
                self._parked.take([not gone.isdisjoint(run.block_hashes) for run in self._parked])
            elif position in waiting:
                self.counters.unknown_parents += self._parked.park(event, now_seconds)
        self._retry(work)

    def _retry(self, work: _Work) -> None:
        """Again and again, for a run that finds its parent may be another's."""
        before = -1
        while self._parked and len(self._parked) != before:
            before = len(self._parked)
            again = _Work(work.at, work.counting)
            for run in self._parked:
                again.add_stored(run, run.tokens())
            orphans = set(self.blocks.apply(again.runs(self.block_size or 1), work.at, counting=work.counting).tolist())
            self._parked.take([position not in orphans for position in range(before)])

    def _forget_blocks(self) -> None:
        self._parked.clear()
        if self.blocks.resident_blocks:
            self.clears += 1
        self.blocks.clear()

    def _leave(self) -> None:
        self._table.leave(self.worker, self.blocks)


class _Work:
    """Events that gather, in order, into one call of the kernel: one run an event."""

    def __init__(self, at_seconds: float, counting: bool = True) -> None:
        self.at = at_seconds
        self.counting = counting
        self.clear()

    def clear(self) -> None:
        self.events: list[Stored | Removed] = []
        self.stored = 0
        self.tells_salts = self._salted = False
        self._removed = 0
        self._runs: array[int] = array("Q")
        self._ids: list[BlockId] = []
        self._tokens: array[int] = array("I")
        self._multimodal: dict[int, tuple[int, ...]] = {}

    def add_stored(self, event: Stored, tokens: array[int]) -> None:
        count, parent = len(event.block_hashes), event.parent_block_hash
        self._tokens.extend(tokens)
        if parent is not None:
            name = _name(parent)
            self._runs.extend((STORED_AFTER, count, name, name))
        else:
            namespace = event.namespace()
            root, unsalted = namespace.root(), namespace._replace(salt=None).root()
            self._salted = self._salted or root != unsalted
            self._runs.extend((STORED_BARE if root is None else STORED_UNDER, count, root or 0, unsalted or 0))
        self.tells_salts = self.tells_salts or event.tells_salts
        if event.extra_keys and any(event.extra_keys):
            for position, keys in event.multimodal().items():
                self._multimodal[self.stored + position] = keys
        self._ids.extend(event.block_hashes)
        self.stored += count
        self.events.append(event)

    def add_removed(self, event: Removed) -> None:
        count = len(event.block_hashes)
        self._runs.extend((REMOVED, count, 0, 0))
        self._ids.extend(event.block_hashes)
        self._removed += count
        self.events.append(event)

    def runs(self, block_size: int) -> Runs:
        tokens: Tokens = np.frombuffer(self._tokens, dtype=np.uint32)
        runs = np.frombuffer(self._runs, dtype=np.uint64).reshape(-1, 4)
        return Runs(
            kinds=runs[:, 0].astype(np.int32),
            sizes=runs[:, 1].astype(np.int32),
            parents=runs[:, 2].copy(),
            openings=runs[:, 3].copy(),
            ids=_names(self._ids),
            contents=content_hashes(tokens, block_size, self._multimodal),
            block_tokens=block_size,
            removals=self._removed,
            salted=self._salted,
        )


def _names(ids: list[BlockId]) -> Hashes:
    """The engine's names of blocks, as 64 bits each."""
    try:
        return np.frombuffer(array("Q", ids), dtype=np.uint64)  # type: ignore[type-var]  # bytes: a TypeError
    except (OverflowError, TypeError):
        return np.array([_name(one) for one in ids], dtype=np.uint64)


def _name(block_id: BlockId) -> int:
    """Signed numbers wrap around, digests are hashed: within one engine's names nothing else comes out equal."""
    return block_id & _U64 if isinstance(block_id, int) else xxh3_64_intdigest(block_id, SEED)
