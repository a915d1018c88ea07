"""The inner loops of `kvcache.index.block_table`: open-addressing tables of numpy records, compiled if numba is there.

Without numba the same functions run as they are, with the same results and some fifty times slower. Probing is linear,
and a removal shifts what comes after it back, so that no dead places are left. Callers make room for whatever a call
may add. Import this module where events are applied, not before: numba takes 60 MB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from xxhash import xxh3_64_intdigest

from prefixwatch.kvcache.blocks import SEED
from prefixwatch.kvcache.index.table_layout import (
    DUPLICATE_TOKENS,
    EVICTED,
    FREE_ROW,
    FRESH_ROW,
    HELD_ROWS,
    LOST_TOKENS,
    ORPHAN,
    REGRETTED,
    REMEMBERED,
    REMOVED,
    RESIDENT,
    STORED,
    STORED_AFTER,
    STORED_BARE,
    STORED_UNDER,
    SWEPT,
)

_F = TypeVar("_F", bound=Callable[..., Any])
_jit: Any
_link: Callable[[Any, Any, Any], Any]
try:
    from numba import njit

    from prefixwatch.kvcache.xxh3_kernel import link as _link

    COMPILED = True
    _jit = njit(cache=True, nogil=True)
except ImportError:  # numba is the optional extra "fast"
    COMPILED = False
    _jit = None

    def _link(previous: Any, content: Any, seed: Any) -> Any:
        return np.uint64(xxh3_64_intdigest(previous.tobytes() + content.tobytes(), int(seed)))


def _compiled(function: _F) -> _F:
    return _jit(function) if COMPILED else function


_SWEPT_PER_BLOCK = 8
_EMPTY = _PUBLIC = np.uint64(0)
_INSTEAD_OF_EMPTY = np.uint64(0x9E3779B97F4A7C15)
_FOLD = np.uint64(29)
_SEED = np.uint64(SEED)


@_compiled
def _home(key: Any, size: int) -> Any:
    """Where a key belongs; engines may name blocks 1, 2, 3 …, so the upper bits are folded in, not trusted."""
    return np.int64((key ^ (key >> _FOLD)) & np.uint64(size - 1))


@_compiled
def _key(value: Any) -> Any:
    return _INSTEAD_OF_EMPTY if value == _EMPTY else value


@_compiled
def _find(table: Any, key: Any) -> int:
    """The key's place, or -1."""
    size = len(table)
    place = _home(key, size)
    while table[place]["key"] != _EMPTY:
        if table[place]["key"] == key:
            return place  # type: ignore[no-any-return]  # an integer
        place = (place + 1) & (size - 1)
    return -1


@_compiled
def _vacant(table: Any, key: Any) -> Any:
    """Where a key that isn't there is to be put."""
    size = len(table)
    place = _home(key, size)
    while table[place]["key"] != _EMPTY:
        place = (place + 1) & (size - 1)
    return place


@_compiled
def _delete(table: Any, place: int) -> None:
    """Empty a place, and move back whatever was pushed past it."""
    size = len(table)
    hole, probe = place, (place + 1) & (size - 1)
    while table[probe]["key"] != _EMPTY:
        home = _home(table[probe]["key"], size)
        if ((probe - home) & (size - 1)) >= ((probe - hole) & (size - 1)):
            table[hole] = table[probe]
            hole = probe
        probe = (probe + 1) & (size - 1)
    table[hole]["key"] = _EMPTY


@_compiled
def rehash(old: Any, new: Any) -> None:
    """Copy all entries into a table of another size."""
    for place in range(len(old)):
        if old[place]["key"] != _EMPTY:
            new[_vacant(new, old[place]["key"])] = old[place]


@_compiled
def _row_of(chain: Any, opening: Any, parent: Any, tokens: int, fleet: Any) -> Any:
    """The row of a block, made if it is new."""
    key = _key(chain)
    place = _find(fleet.rows, key)
    if place >= 0:
        return fleet.rows[place]["row"]
    row = fleet.counts[FREE_ROW]
    if row >= 0:
        fleet.counts[FREE_ROW] = fleet.blocks[row]["parent"]
    else:
        row = fleet.counts[FRESH_ROW]
        fleet.counts[FRESH_ROW] += 1
    fleet.blocks[row]["hash"] = chain
    fleet.blocks[row]["opening"] = opening
    fleet.blocks[row]["parent"] = parent
    fleet.blocks[row]["children"] = 0
    fleet.blocks[row]["replicas"] = 0
    fleet.blocks[row]["tokens"] = tokens
    if parent >= 0:
        fleet.blocks[parent]["children"] += 1
    place = _vacant(fleet.rows, key)
    fleet.rows[place]["key"] = key
    fleet.rows[place]["row"] = row
    return np.int32(row)


@_compiled
def _release(row: int, fleet: Any) -> None:
    """One worker less holds this block. A row stays while its children do: they hang on it."""
    blocks = fleet.blocks
    blocks[row]["replicas"] -= 1
    if blocks[row]["replicas"] == 0:
        fleet.counts[HELD_ROWS] -= 1
    while row >= 0 and blocks[row]["replicas"] == 0 and blocks[row]["children"] == 0:
        _delete(fleet.rows, _find(fleet.rows, _key(blocks[row]["hash"])))
        parent = blocks[row]["parent"]
        blocks[row]["children"] = -1
        blocks[row]["parent"] = fleet.counts[FREE_ROW]
        fleet.counts[FREE_ROW] = row
        if parent >= 0:
            blocks[parent]["children"] -= 1
        row = parent


@_compiled
def _sweep_evictions(places: int, before: float, worker: Any) -> None:
    """Forget what was evicted before this time, in the next places of the table."""
    place, size = worker.counts[SWEPT] & (len(worker.evicted) - 1), len(worker.evicted)
    for _ in range(min(places, size)):
        while worker.evicted[place]["key"] != _EMPTY and worker.evicted[place]["at"] < before:
            _delete(worker.evicted, place)  # which may move another one here
            worker.counts[REMEMBERED] -= 1
        place = (place + 1) & (size - 1)
    worker.counts[SWEPT] = place


@_compiled
def _remember_eviction(chain: Any, at: float, worker: Any) -> None:
    """A full table remembers no more until old evictions have been swept from it."""
    key = _key(chain)
    place = _find(worker.evicted, key)
    if place < 0:
        if 4 * worker.counts[REMEMBERED] >= 3 * len(worker.evicted):
            return
        place = _vacant(worker.evicted, key)
        worker.counts[REMEMBERED] += 1
    worker.evicted[place]["key"] = key
    worker.evicted[place]["at"] = at


@_compiled
def _open(row: int, openings: Any, worker: Any, fleet: Any) -> Any:
    """One block more with this opening; answers whether the worker held one under another salt."""
    key = _key(fleet.blocks[row]["opening"])
    place = _find(openings, key)
    if place >= 0:
        openings[place]["held"] += 1
        worker.counts[DUPLICATE_TOKENS] += fleet.blocks[row]["tokens"]
        return True
    place = _vacant(openings, key)
    openings[place]["key"] = key
    openings[place]["held"] = 1
    return False


@_compiled
def _close(row: int, openings: Any, worker: Any, fleet: Any) -> None:
    """One block less with this opening."""
    place = _find(openings, _key(fleet.blocks[row]["opening"]))
    if openings[place]["held"] > 1:
        openings[place]["held"] -= 1
        worker.counts[DUPLICATE_TOKENS] -= fleet.blocks[row]["tokens"]
    else:
        _delete(openings, place)


@_compiled
def open_all(openings: Any, worker: Any, fleet: Any) -> None:
    """Fill the empty table of openings from all that the worker holds."""
    for place in range(len(worker.held)):
        if worker.held[place]["key"] != _EMPTY:
            _open(worker.held[place]["row"], openings, worker, fleet)


@_compiled
def _store(block_id: Any, row: int, batch: Any, worker: Any, fleet: Any) -> None:
    """A block that this worker didn't hold."""
    fleet.blocks[row]["replicas"] += 1
    if fleet.blocks[row]["replicas"] == 1:
        fleet.counts[HELD_ROWS] += 1
    place = _vacant(worker.held, block_id)
    worker.held[place]["key"] = block_id
    worker.held[place]["at"] = batch.at
    worker.held[place]["row"] = row
    worker.held[place]["copies"] = 1
    worker.counts[RESIDENT] += 1
    if batch.counting:
        worker.counts[STORED] += 1
    place = _find(worker.evicted, _key(fleet.blocks[row]["hash"]))
    if place >= 0:
        if batch.counting and batch.at - worker.evicted[place]["at"] <= batch.regret_seconds:
            worker.counts[REGRETTED] += 1
        _delete(worker.evicted, place)
        worker.counts[REMEMBERED] -= 1


@_compiled
def _remove(block_id: Any, batch: Any, worker: Any, openings: Any, fleet: Any) -> None:
    place = _find(worker.held, block_id)
    if place < 0:
        return
    if worker.held[place]["copies"] > 1:
        worker.held[place]["copies"] -= 1
        return
    row = worker.held[place]["row"]
    age = max(batch.at - worker.held[place]["at"], 0.0)
    _delete(worker.held, place)
    worker.counts[RESIDENT] -= 1
    if batch.counting:
        worker.counts[EVICTED] += 1
        worker.ages[np.searchsorted(worker.bounds, age)] += 1
        worker.ages_sum[0] += age
        _remember_eviction(fleet.blocks[row]["hash"], batch.at, worker)
    if openings is not None:
        _close(row, openings, worker, fleet)
    _release(row, fleet)


@_compiled
def apply_runs(batch: Any, outcomes: Any, worker: Any, openings: Any, fleet: Any) -> None:
    """Everything that one batch says of one worker, in order; `outcomes` gets the outcome of each run.

    `openings` is the worker's table of them, or None as long as it holds no salted block: compiled apart, so that who
    never salts doesn't pay for it.
    """
    _sweep_evictions(_SWEPT_PER_BLOCK * len(batch.ids), batch.at - batch.regret_seconds, worker)
    first = first_content = 0
    for k in range(len(batch.kinds)):
        kind, count = batch.kinds[k], batch.sizes[k]
        ids = batch.ids[first : first + count]
        first += count
        if kind == REMOVED:
            for block_id in ids:
                _remove(_key(block_id), batch, worker, openings, fleet)
            continue
        contents = batch.contents[first_content : first_content + count]
        first_content += count
        chain, row, bare = batch.parents[k], np.int32(-1), kind == STORED_BARE
        opening = batch.openings[k]
        if kind == STORED_AFTER:
            place = _find(worker.held, _key(chain))
            if place < 0:
                outcomes[k] = ORPHAN
                continue
            row = worker.held[place]["row"]
            chain, opening = fleet.blocks[row]["hash"], fleet.blocks[row]["opening"]
        salted = opening != chain
        opening_bare = kind == STORED_UNDER and opening == _PUBLIC
        for n in range(count):
            chain = contents[n] if bare else _link(chain, contents[n], _SEED)
            opening = chain if not salted else contents[n] if opening_bare else _link(opening, contents[n], _SEED)
            bare = opening_bare = False
            place = _find(worker.held, _key(ids[n]))
            if place >= 0:
                worker.held[place]["copies"] += 1
                row = worker.held[place]["row"]
                chain, opening = fleet.blocks[row]["hash"], fleet.blocks[row]["opening"]
                salted = opening != chain
            else:
                row = _row_of(chain, opening, row, batch.tokens, fleet)
                _store(_key(ids[n]), row, batch, worker, fleet)
                if openings is not None and _open(row, openings, worker, fleet) and batch.counting:
                    worker.counts[LOST_TOKENS] += batch.tokens


@_compiled
def release_all(held: Any, fleet: Any) -> None:
    """The worker holds nothing any more. Its table is left as it is, to be thrown away."""
    for place in range(len(held)):
        if held[place]["key"] != _EMPTY:
            _release(held[place]["row"], fleet)


def freeze() -> None:
    """Compile nothing more: from now on arrays of types that haven't been seen are refused with a TypeError."""
    if COMPILED:
        loops: tuple[Any, ...] = (apply_runs, open_all, release_all, rehash)
        for loop in loops:
            loop.disable_compile()
