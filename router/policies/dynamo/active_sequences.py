"""What Dynamo's router knows of the requests running on one worker: prefill tokens and KV blocks in use.

On admission a request's uncached tokens join the active prefill and its blocks the active blocks; blocks that several
requests share count once. The first token takes the prefill part away, the end the rest. Generated blocks aren't
counted. A request that never ends is forgotten by age.

With a prefill rate, active prefill decays. The oldest unfinished prefill is the anchor, and progress is its own pace:

    active = max(0, Σ tokens − tokens_anchor · elapsed / duration_anchor),   duration = tokens / rate

Progress may run past the anchor into later prefills; when the anchor is through, the next is timed from that moment.

Source: ai-dynamo/dynamo `lib/kv-router`, sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.router.policy import RouteRequest, Worker


@dataclass(slots=True)
class _Sequence:
    blocks: list[int]
    prefill_tokens: int
    admitted_at: float


Rows = npt.NDArray[np.intp] | slice
"""Positions in the columns of a `LoadTable`."""


class FleetRows(NamedTuple):
    """Where the workers of a fleet are in a `LoadTable`."""

    workers: tuple[Worker, ...]
    names: list[str]
    rows: Rows
    position: dict[str, int]
    """Of each name in these lists."""


class LoadTable:
    """What the workers are busy with, in columns with one row per worker, so that a decision reads arrays."""

    def __init__(self, prefill_tokens_per_second: float | None = None) -> None:
        self._rate = prefill_tokens_per_second
        self.prefill_tokens = np.zeros(0)
        """Tokens still to be prefilled, as of `anchored_at`."""
        self.anchored_at = np.zeros(0)
        self.blocks = np.zeros(0)
        """Distinct blocks in use."""
        self.requests = np.zeros(0)
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._asked: FleetRows = FleetRows((), [], slice(0), {})

    def row(self, worker: str) -> int:
        """The row of a worker; a new one, all zeros, for a worker without one."""
        row = self._rows.get(worker)
        if row is None:
            row = self._rows[worker] = self._free.pop() if self._free else len(self._rows)
            if row == len(self.blocks):
                for name in ("prefill_tokens", "anchored_at", "blocks", "requests"):
                    column = getattr(self, name)
                    setattr(self, name, np.concatenate([column, np.zeros(max(8, len(column)))]))
        return row

    def of(self, workers: Sequence[Worker]) -> FleetRows:
        """The rows of several workers, in their order; the same object as long as the fleet is the same."""
        if self._asked.workers is not workers and list(self._asked.workers) != list(workers):
            names = [worker.name for worker in workers]
            places = [self.row(name) for name in names]
            in_order = places == list(range(len(places)))  # as while nobody has left: no copies of the columns
            rows: Rows = slice(len(places)) if in_order else np.array(places, dtype=np.intp)
            position = {name: number for number, name in enumerate(names)}
            self._asked = FleetRows(tuple(workers), names, rows, position)
        return self._asked

    def remove(self, worker: str) -> None:
        """The worker left; its row is another's from now on."""
        row = self._rows.pop(worker, None)
        if row is not None:
            self._free.append(row)
            self._asked = FleetRows((), [], slice(0), {})
            for column in (self.prefill_tokens, self.anchored_at, self.blocks, self.requests):
                column[row] = 0.0

    def active_prefill_tokens(self, rows: Rows, now: float) -> npt.NDArray[np.float64]:
        """Tokens still to be prefilled at `now`."""
        tokens = self.prefill_tokens[rows]
        if self._rate is None:
            return tokens
        done = np.maximum(0.0, now - self.anchored_at[rows]) * self._rate
        return np.where(tokens > 0, np.maximum(0.0, tokens - done), 0.0)


@dataclass(slots=True)
class ActiveSequences:
    """One worker's requests in order of admission; `index` has the active blocks of all workers, `table` their sums."""

    worker: str
    index: BlockIndex
    prefill_tokens_per_second: float | None = None
    table: LoadTable = field(default_factory=LoadTable)
    _sequences: dict[RouteRequest, _Sequence] = field(default_factory=dict)
    _prefills: dict[RouteRequest, None] = field(default_factory=dict)
    _references: Counter[int] = field(default_factory=Counter)
    _prefill_tokens: int = 0
    _anchored_at: float = 0.0

    @property
    def requests(self) -> int:
        return len(self._sequences)

    @property
    def blocks(self) -> int:
        """Distinct blocks in use."""
        return len(self._references)

    def admit(self, request: RouteRequest, prefill_tokens: int, now: float) -> None:
        """A request starts here, with `prefill_tokens` to compute; one that was admitted before starts again."""
        self.free(request, now)
        blocks: list[int] = request.blocks.tolist()
        references = self._references
        fresh = [block for block in blocks if block not in references]
        references.update(blocks)
        self.index.store(self.worker, fresh)
        self._sequences[request] = _Sequence(blocks, prefill_tokens, now)
        if prefill_tokens:
            if not self._prefills:
                self._anchored_at = now
            self._prefills[request] = None
            self._prefill_tokens += prefill_tokens
        self._note()

    def prefilled(self, request: RouteRequest, now: float) -> None:
        """The first token came; no effect when it had come before."""
        if request in self._prefills:
            if next(iter(self._prefills)) == request:
                self._anchored_at = now
            del self._prefills[request]
            self._prefill_tokens -= self._sequences[request].prefill_tokens
            self._note()

    def free(self, request: RouteRequest, now: float) -> None:
        """The request is gone; no effect when it isn't known."""
        self.prefilled(request, now)
        sequence = self._sequences.pop(request, None)
        if sequence is None:
            return
        references, released = self._references, []
        for block in sequence.blocks:
            count = references[block] - 1
            if count:
                references[block] = count
            else:
                references.pop(block)  # `del` of a Counter is a function in Python
                released.append(block)
        self.index.remove(self.worker, released)
        self._note()

    def expire(self, older_than_seconds: float, now: float) -> None:
        """Forget requests admitted longer ago than this."""
        while self._sequences:
            oldest = next(iter(self._sequences))
            if now - self._sequences[oldest].admitted_at <= older_than_seconds:
                return
            self.free(oldest, now)

    def prefill_tokens(self, now: float) -> float:
        """Tokens still to be prefilled."""
        if self.prefill_tokens_per_second is None or not self._prefills:
            return float(self._prefill_tokens)
        elapsed = max(0.0, now - self._anchored_at)
        return max(0.0, self._prefill_tokens - elapsed * self.prefill_tokens_per_second)

    def _note(self) -> None:
        """Keep this worker's row of the table current."""
        table = self.table
        row = table.row(self.worker)
        table.prefill_tokens[row] = self._prefill_tokens
        table.anchored_at[row] = self._anchored_at
        table.blocks[row] = len(self._references)
        table.requests[row] = len(self._sequences)
