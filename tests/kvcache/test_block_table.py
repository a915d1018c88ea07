"""The block table against a model so plain that it can't be wrong, and what it costs."""

from __future__ import annotations

import os
import subprocess
import sys
from threading import Event, Thread

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixwatch.kvcache.blocks import as_tokens, block_hashes, content_hashes, namespace_root
from prefixwatch.kvcache.index import block_table
from prefixwatch.kvcache.index.block_table import REGRET_SECONDS, BlockTable, Runs, WorkerBlocks
from prefixwatch.kvcache.index.table_layout import REMOVED, STORED_AFTER, STORED_BARE, STORED_UNDER

WORKERS = ["w0", "w1", "w2"]
PROMPTS = [[*range(16)], [*range(8), *([9] * 8)], [*range(4), *([7] * 12)], [5] * 16]
ROOTS: list[tuple[int | None, int | None]] = [(None, None)] * 4
"""Of each prompt, and what it would be without its salt."""
for _salt, _lora in (("acme", None), ("globex", None), (None, "ada"), ("acme", "ada")):
    for _prompt in (0, 1):
        PROMPTS.append(PROMPTS[_prompt])
        ROOTS.append((namespace_root(_salt, _lora), namespace_root(None, _lora)))
BLOCK = 2
CHAINS = [block_hashes(as_tokens(p), BLOCK, root=r).tolist() for p, (r, _) in zip(PROMPTS, ROOTS, strict=True)]
OPENINGS = [block_hashes(as_tokens(p), BLOCK, root=r).tolist() for p, (_, r) in zip(PROMPTS, ROOTS, strict=True)]
NAMES = [[prompt * 100 + k + 1 for k in range(8)] for prompt in range(len(PROMPTS))]
for _prompt in range(1, len(PROMPTS)):  # an engine names equal openings equally
    NAMES[_prompt] = [
        next((NAMES[p][k] for p in range(_prompt) if CHAINS[p][k] == CHAINS[_prompt][k]), NAMES[_prompt][k])
        for k in range(8)
    ]


def store(worker: WorkerBlocks, prompt: int, first: int, end: int, at: float = 0.0, **how: bool) -> list[int]:
    tokens = as_tokens(PROMPTS[prompt][first * BLOCK : end * BLOCK])
    root, unsalted = ROOTS[prompt]
    kind, parent = (STORED_BARE, 0) if root is None else (STORED_UNDER, root)
    if first:
        kind, parent = STORED_AFTER, NAMES[prompt][first - 1]
    openings = [unsalted or 0] if not first and root != unsalted else None
    ids = np.array(NAMES[prompt][first:end], dtype=np.uint64)
    said = Runs.of([(kind, end - first, parent)], ids, content_hashes(tokens, BLOCK), BLOCK, openings)
    orphans: list[int] = worker.apply(said, at, **how).tolist()
    return orphans


def remove(worker: WorkerBlocks, *names: int, at: float = 0.0, **how: bool) -> None:
    worker.apply(Runs.of([(REMOVED, len(names), 0)], np.array(names, dtype=np.uint64)), at, **how)


def parents(table: BlockTable) -> dict[int, int | None]:
    """Chain hash → the parent's, of all rows in use."""
    rows = table.snapshot().blocks
    return {
        int(row["hash"]): None if row["parent"] < 0 else int(rows[row["parent"]]["hash"])
        for row in rows
        if row["children"] >= 0
    }


def held_by(table: BlockTable, worker: str) -> list[int]:
    snapshot = table.snapshot()
    return sorted(snapshot.blocks["hash"][snapshot.rows_held[worker]].tolist())


PROMPT = st.integers(0, len(PROMPTS) - 1)
OPENING_OF = {
    c: o for chain, opening in zip(CHAINS, OPENINGS, strict=True) for c, o in zip(chain, opening, strict=True)
}


class TableMachine(RuleBasedStateMachine):
    """Workers store, evict, are cleared, leave and join again, and time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.now = BlockTable(), 0.0
        self.workers = {name: self.table.join(name) for name in WORKERS}
        self.held: dict[str, dict[int, tuple[int, float, int]]] = {name: {} for name in WORKERS}
        self.evicted: dict[str, dict[int, float]] = {name: {} for name in WORKERS}
        self.totals = {name: [0, 0, 0, 0.0] for name in WORKERS}
        self.lost = dict.fromkeys(WORKERS, 0)

    @rule(seconds=st.floats(0, 400))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(worker=st.sampled_from(WORKERS), prompt=PROMPT, first=st.integers(0, 7), count=st.integers(1, 8))
    def store(self, worker: str, prompt: int, first: int, count: int) -> None:
        end = min(first + count, 8)
        held = self.held[worker]
        orphaned = first > 0 and NAMES[prompt][first - 1] not in held
        assert store(self.workers[worker], prompt, first, end, self.now) == ([0] if orphaned else [])
        for k in range(first, end if not orphaned else first):
            name, block = NAMES[prompt][k], CHAINS[prompt][k]
            if name in held:
                held[name] = (block, held[name][1], held[name][2] + 1)
                continue
            self.lost[worker] += BLOCK * (OPENINGS[prompt][k] in self.openings(worker))
            held[name] = (block, self.now, 1)
            self.totals[worker][0] += 1
            at = self.evicted[worker].pop(block, None)
            self.totals[worker][2] += at is not None and self.now - at <= REGRET_SECONDS

    def openings(self, worker: str) -> list[int]:
        return [OPENING_OF[block] for block, _, _ in self.held[worker].values()]

    @rule(worker=st.sampled_from(WORKERS), prompt=PROMPT, k=st.integers(0, 7))
    def remove(self, worker: str, prompt: int, k: int) -> None:
        name, held = NAMES[prompt][k], self.held[worker]
        remove(self.workers[worker], name, name + 10_000, at=self.now)
        if name not in held:
            return
        block, at, copies = held[name]
        if copies > 1:
            held[name] = (block, at, copies - 1)
            return
        del held[name]
        self.evicted[worker][block] = self.now
        self.totals[worker][1] += 1
        self.totals[worker][3] += self.now - at

    @rule(worker=st.sampled_from(WORKERS))
    def clear(self, worker: str) -> None:
        self.workers[worker].clear()
        self.held[worker].clear()
        self.evicted[worker].clear()

    @rule(worker=st.sampled_from(WORKERS))
    def leave_and_join(self, worker: str) -> None:
        self.table.leave(worker, self.workers[worker])
        self.workers[worker] = self.table.join(worker)
        self.held[worker], self.evicted[worker], self.totals[worker] = {}, {}, [0, 0, 0, 0.0]
        self.lost[worker] = 0

    @invariant()
    def agrees(self) -> None:
        everywhere = {block for held in self.held.values() for block, _, _ in held.values()}
        assert len(self.table) == len(everywhere)
        kept = {b for chain in CHAINS for k, _ in enumerate(chain) for b in chain[: k + 1] if chain[k] in everywhere}
        expected = {chain[k]: chain[k - 1] if k else None for chain in CHAINS for k in range(8) if chain[k] in kept}
        assert parents(self.table) == expected
        for name, worker in self.workers.items():
            assert held_by(self.table, name) == sorted(block for block, _, _ in self.held[name].values())
            assert worker.resident_blocks == len(self.held[name])
            openings = self.openings(name)
            assert worker.duplicate_tokens == BLOCK * (len(openings) - len(set(openings)))
            assert worker.lost_tokens == self.lost[name]
            totals = [worker.stored_blocks, worker.evicted_blocks, worker.regretted_blocks]
            assert totals == self.totals[name][:3]
            ages, seconds = worker.lifetimes
            assert sum(ages) == worker.evicted_blocks
            assert seconds == pytest.approx(self.totals[name][3])


TableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTableMachine = TableMachine.TestCase


def test_a_block_stored_again_soon_after_its_eviction_was_evicted_too_early() -> None:
    worker = BlockTable().join("w")
    store(worker, 0, 0, 3)
    remove(worker, 2, 3, at=10)
    store(worker, 0, 1, 2, at=200)
    store(worker, 0, 2, 3, at=311)
    assert (worker.evicted_blocks, worker.regretted_blocks) == (2, 1)


def test_lifetimes_are_from_storing_to_eviction() -> None:
    worker = BlockTable().join("w")
    store(worker, 0, 0, 3)
    remove(worker, 3, at=1.0)
    remove(worker, 2, at=40.0)
    remove(worker, 1, at=100_000.0)
    assert worker.lifetimes == ([1, 0, 0, 1, 0, 0, 0, 0, 0, 1], 100_041.0)


def test_blocks_that_come_back_after_a_clear_are_no_regret() -> None:
    worker = BlockTable().join("w")
    store(worker, 0, 0, 2)
    remove(worker, 2, at=0)
    worker.clear()
    store(worker, 0, 0, 2, at=1)
    assert (worker.evicted_blocks, worker.regretted_blocks, worker.resident_blocks) == (1, 0, 2)


def test_what_happened_before_anybody_counted_is_held_and_not_counted() -> None:
    worker = BlockTable().join("w")
    store(worker, 0, 0, 4, counting=False)
    remove(worker, 4, counting=False)
    assert (worker.resident_blocks, worker.stored_blocks, worker.evicted_blocks) == (3, 0, 0)


def test_remembered_evictions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixwatch.kvcache.index.block_table._EVICTIONS_REMEMBERED", 16)
    worker = BlockTable().join("w")
    tokens = as_tokens(range(200))
    names = np.arange(1, 101, dtype=np.uint64)
    again = Runs.of([(STORED_BARE, 100, 0)], names, content_hashes(tokens, BLOCK), BLOCK)
    worker.apply(again, 0.0)
    remove(worker, *names.tolist(), at=1.0)
    worker.apply(again, 2.0)
    assert (worker.evicted_blocks, worker.regretted_blocks) == (100, 24)


def test_old_evictions_are_forgotten() -> None:
    """Else a long-lived exporter would grow with every block that was ever evicted."""
    worker, sizes = BlockTable().join("w"), []
    for round in range(50):
        at = 1000.0 * round
        names = np.arange(100 * round + 1, 100 * round + 101, dtype=np.uint64)
        contents = np.random.default_rng(round).integers(1, 2**64, 100, dtype=np.uint64)
        worker.apply(Runs.of([(STORED_BARE, 100, 0)], names, contents), at)
        remove(worker, *names.tolist(), at=at)
        sizes.append(worker.nbytes)
    assert sizes[-1] == sizes[2]


def test_of_a_block_under_several_salts_all_but_one_are_copies() -> None:
    """vllm-project/vllm#52655 (IS08): 0 is public, 4 and 6 are the same prompt under two salts."""
    worker = BlockTable().join("w")
    for prompt in (0, 4, 6):
        store(worker, prompt, 0, 8)
    assert (worker.duplicate_tokens, worker.lost_tokens) == (2 * 16, 2 * 16)
    remove(worker, NAMES[4][7], NAMES[6][7], NAMES[6][6])
    assert (worker.duplicate_tokens, worker.lost_tokens) == (2 * 16 - 3 * BLOCK, 2 * 16)
    store(worker, 6, 6, 8)
    assert (worker.duplicate_tokens, worker.lost_tokens) == (2 * 16 - BLOCK, 2 * 16 + 2 * BLOCK)


def test_adapters_make_no_copies_but_salts_of_one_adapter_do() -> None:
    worker = BlockTable().join("w")
    for prompt in (0, 8):
        store(worker, prompt, 0, 8)
    assert worker.duplicate_tokens == 0
    store(worker, 10, 0, 8)
    assert worker.duplicate_tokens == 16


def test_who_never_salts_keeps_no_table_of_openings() -> None:
    plain, salted = BlockTable().join("w"), BlockTable().join("w")
    for k in range(8):
        store(plain, 0, k, k + 1)
        store(salted, 4, k, k + 1)
    assert salted.nbytes - plain.nbytes == 16 * 12
    salted.clear()
    store(salted, 0, 0, 8)
    assert salted.nbytes == plain.nbytes


def test_what_is_held_when_the_first_salt_comes_counts_as_well() -> None:
    worker = BlockTable().join("w")
    store(worker, 0, 0, 8)
    store(worker, 4, 0, 3)
    assert worker.duplicate_tokens == 3 * BLOCK


def test_hits_lost_before_anybody_counted_are_not_counted() -> None:
    worker = BlockTable().join("w")
    for prompt in (4, 6):
        store(worker, prompt, 0, 8, counting=False)
    assert (worker.duplicate_tokens, worker.lost_tokens) == (16, 0)


def test_a_workers_name_taken_over_is_not_given_back_by_the_old_one() -> None:
    table = BlockTable()
    old, new = table.join("w"), table.join("w")
    store(new, 0, 0, 2)
    table.leave("w", old)
    assert (len(table), table.workers) == (2, {"w": new})


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=60), st.randoms(use_true_random=False))
def test_names_of_any_kind_are_found_and_removed(names: list[int], random: object) -> None:
    """0, neighbours, multiples: open addressing must not lose any."""
    worker = BlockTable().join("w")
    tokens = as_tokens(range(BLOCK * len(names)))
    if names:
        runs, ids = [(STORED_BARE, len(names), 0)], np.array(names, dtype=np.uint64)
        worker.apply(Runs.of(runs, ids, content_hashes(tokens, BLOCK), BLOCK), 0.0)
    assert worker.resident_blocks == len(names)
    shuffled = list(names)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # a random.Random
    for left, name in zip(range(len(names) - 1, -1, -1), shuffled, strict=True):
        remove(worker, name)
        assert worker.resident_blocks == left


@pytest.mark.parametrize("openings", [None, [0]], ids=["public", "salted"])
def test_a_block_costs_less_than_200_bytes(openings: list[int] | None) -> None:
    """Also just after the tables have grown, which is when they are emptiest; with a worker each and evictions."""
    table, count = BlockTable(), 50_000
    kind = STORED_BARE if openings is None else STORED_UNDER
    worker = table.join("w")
    rng = np.random.default_rng(1)
    costs = []
    for first in range(0, count, 500):
        names, contents = (rng.integers(1, 2**64, 500, dtype=np.uint64) for _ in range(2))
        worker.apply(Runs.of([(kind, 500, first)], names, contents, openings=openings), 0.0)
        costs.append(table.nbytes / (first + 500))
    assert len(table) == count
    assert max(costs[20:]) < 200


_SCENARIO = """
from prefixwatch.kvcache.index.block_table import BlockTable
from prefixwatch.kvcache.index.table_kernel import COMPILED
from test_block_table import held_by, parents, remove, store

table = BlockTable()
a, b = table.join("a"), table.join("b")
for worker in (a, b):
    for prompt in range(8):
        store(worker, prompt, 0, 8, at=prompt)
remove(a, *range(101, 109), *range(5, 9), at=30.0)
store(a, 1, 0, 8, at=40.0)
b.clear()
print(COMPILED, sorted(parents(table).items(), key=str), held_by(table, "a"), a.lifetimes, a.regretted_blocks)
print(a.duplicate_tokens, a.lost_tokens)
"""


def test_without_numba_everything_is_the_same() -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), os.getcwd(), f"{os.getcwd()}/src"]),
    }
    told = []
    for head in ("", "import sys; sys.modules['numba'] = None"):
        command = [sys.executable, "-W", "error::RuntimeWarning", "-c", head + _SCENARIO]
        told.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert told[0].startswith("True [(")
    assert told[1] == told[0].replace("True", "False", 1)


def test_threads_that_warm_up_at_once_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one through freezes the kernels: one still at it would end with `compilation disabled`, and with it
    the watcher of a target's KV events."""
    inside, met, go_on = [], [], Event()

    def compile_all() -> None:
        inside.append(True)
        if len(inside) == 2:
            go_on.set()
        go_on.wait(0.2)  # for the other thread, which must not come
        met.append(len(inside))
        inside.pop()

    monkeypatch.setattr(block_table, "_compile_all", compile_all)
    threads = [Thread(target=block_table.warm_up) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert met == [1, 1]
