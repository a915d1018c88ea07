"""The prefix tree's shape, against a tree walked block by block."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.kvcache.blocks import block_hashes, content_hashes
from prefixwatch.kvcache.index.block_table import BlockTable, Runs
from prefixwatch.kvcache.index.prefix_tree import NO_PARENT, PrefixTree, prefix_tree
from prefixwatch.kvcache.index.table_layout import REMOVED, STORED_AFTER, STORED_BARE

BLOCK = 4


def chain_of(path: str) -> Any:
    """A prompt's blocks, one a letter: the names are the chain hashes themselves."""
    tokens = np.repeat(np.frombuffer(path.encode(), dtype=np.uint8), BLOCK).astype(np.uint32)
    return block_hashes(tokens, BLOCK), content_hashes(tokens, BLOCK)


def cached(*prompts: tuple[str, str]) -> BlockTable:
    """A table in which these workers have computed these prompts; a letter is a block."""
    table = BlockTable()
    for worker, path in prompts:
        names, contents = chain_of(path)
        blocks = table.workers.get(worker) or table.join(worker)
        fresh = [k for k, name in enumerate(names.tolist()) if name not in set(held(table, worker))]
        if fresh:
            blocks.apply(Runs.of([(STORED_BARE, len(names), 0)], names, contents, BLOCK), 0.0)
    return table


def held(table: BlockTable, worker: str) -> list[int]:
    snapshot = table.snapshot()
    found: list[int] = snapshot.blocks["hash"][snapshot.rows_held[worker]].tolist()
    return found


def node_of(tree: PrefixTree, path: str) -> int:
    """The node that begins with the last block of this path."""
    return int(np.flatnonzero(tree.first_hash == chain_of(path)[0][-1])[0])


def tree_of(*prompts: tuple[str, str]) -> PrefixTree:
    return prefix_tree(cached(*prompts).snapshot())


def test_runs_without_a_branch_are_one_node() -> None:
    tree = tree_of(("a", "sssx"), ("b", "sssyy"), ("b", "sssyz"), ("a", "q"))
    shared, y = node_of(tree, "s"), node_of(tree, "sssy")
    assert len(tree) == 6
    assert (tree.blocks[shared], tree.tokens[shared], tree.children[shared], tree.level[shared]) == (3, 12, 2, 0)
    assert (tree.parent[y], tree.start_tokens[y], tree.children[y], tree.level[y]) == (shared, 12, 2, 1)
    assert tree.parent[shared] == NO_PARENT
    assert tree.height == 2
    assert sorted(tree.levels_of_leaves().tolist()) == [0, 1, 2, 2]
    assert tree.fan_outs().tolist() == [2, 2]


def test_tokens_below_and_copies() -> None:
    tree = tree_of(("a", "sssx"), ("b", "sssyy"), ("b", "sssyz"))
    shared = node_of(tree, "s")
    assert (tree.tokens_below[shared], tree.copied_tokens_below[shared]) == (7 * BLOCK, 10 * BLOCK)
    assert dict(tree.workers_of(shared)) == {"a": 3, "b": 3}
    assert dict(tree.workers_of(node_of(tree, "sssx"))) == {"a": 1}
    assert sorted(tree.replicas_of_block.tolist()) == [1, 1, 1, 1, 2, 2, 2]
    assert tree.hottest(1) == [shared]


def test_a_block_evicted_above_others_keeps_its_place_and_counts_nothing() -> None:
    table = cached(("a", "stu"), ("a", "stv"))
    worker = table.workers["a"]
    gone = chain_of("st")[0]
    twice = Runs.of([(REMOVED, 2, 0), (REMOVED, 2, 0)], np.concatenate([gone, gone]))  # it had computed them twice
    worker.apply(twice, 1.0)
    tree = prefix_tree(table.snapshot())
    top = node_of(tree, "s")
    assert (tree.length_tokens[top], tree.tokens[top], tree.blocks[top], tree.tokens_below[top]) == (8, 0, 0, 8)
    assert tree.start_tokens[node_of(tree, "stu")] == 8
    assert (len(table), len(tree.replicas_of_block)) == (2, 2)


def test_an_empty_fleet_has_an_empty_tree() -> None:
    tree = prefix_tree(BlockTable().snapshot())
    assert (len(tree), tree.height, tree.hottest(5), tree.largest(5)) == (0, 0, [], [])


def test_everything_may_begin_with_the_same_block() -> None:
    """Mooncake's conversation trace (RT40): every request starts with the same block; that is one root, and the
    branches below it are what tells prompts apart."""
    tree = tree_of(*(("a", f"0{chr(65 + k)}{chr(97 + k)}") for k in range(20)))
    assert tree.hottest(3) == [node_of(tree, "0")]
    assert tree.fan_outs().tolist() == [20]
    assert tree.tokens_below[node_of(tree, "0")] == tree.tokens.sum()


def test_a_page_of_the_largest_nodes_has_their_parents() -> None:
    tree = tree_of(("a", "sssx"), ("b", "sssyy"), ("b", "sssyz"), ("a", "qqqqqqqqqqqqq"))
    shared, y, q = node_of(tree, "s"), node_of(tree, "sssy"), node_of(tree, "q")
    assert tree.largest(2) == [q, shared]
    assert tree.largest(3) == [q, shared, y]
    assert sorted(tree.largest(9, within=y)) == sorted([y, node_of(tree, "sssyy"), node_of(tree, "sssyz")])
    assert sorted(tree.largest(9, levels=0)) == sorted([q, shared])
    assert tree.largest(9, within=shared, levels=0) == [shared]


def test_blocks_are_found_by_their_hash() -> None:
    second = int(chain_of("ss")[0][-1])
    tree = prefix_tree(cached(("a", "sssx"), ("b", "sssy")).snapshot(), [second, 12345])
    assert tree.named == {second: node_of(tree, "s")}


PROMPTS = st.lists(st.tuples(st.sampled_from("ab"), st.text("xy", min_size=1, max_size=7)), max_size=10)


@settings(max_examples=100, deadline=None)
@given(PROMPTS)
def test_the_columns_are_those_of_a_tree_walked_block_by_block(prompts: list[tuple[str, str]]) -> None:
    tree = tree_of(*prompts)
    paths = {path[: k + 1] for _, path in prompts for k in range(len(path))}
    workers = {path: {w for w, other in prompts if other.startswith(path)} for path in paths}
    children = {path: sorted(p for p in paths if p[:-1] == path) for path in {"", *paths}}
    heads = {path for path in paths if len(path) == 1 or len(children[path[:-1]]) > 1}
    assert sorted(tree.first_hash.tolist()) == sorted(int(chain_of(path)[0][-1]) for path in heads)
    for head in heads:
        node, end = node_of(tree, head), head
        while len(children[end]) == 1:
            (end,) = children[end]
        own = [end[: k + 1] for k in range(len(head) - 1, len(end))]
        below = [path for path in paths if path.startswith(head)]
        assert tree.blocks[node] == len(own)
        assert tree.copied_tokens[node] == BLOCK * sum(len(workers[path]) for path in own)
        assert tree.tokens_below[node] == BLOCK * len(below)
        assert tree.copied_tokens_below[node] == BLOCK * sum(len(workers[path]) for path in below)
        assert tree.start_tokens[node] == BLOCK * (len(head) - 1)
        assert tree.level[node] == sum(len(children[head[:k]]) > 1 for k in range(1, len(head)))
        assert set(dict(tree.workers_of(node))) == set().union(*(workers[path] for path in own))
    replicas = np.sort(np.array([len(workers[path]) for path in paths], dtype=np.int64))
    assert np.array_equal(np.sort(tree.replicas_of_block), replicas)


def test_fifty_thousand_nodes_take_less_than_a_tenth_of_a_second() -> None:
    rng = np.random.default_rng(1)
    table = BlockTable()
    worker = table.join("w")
    names = np.arange(1, 75_001, dtype=np.uint64)
    runs = [(STORED_BARE, 1, 0)] + [(STORED_AFTER, 1, int(rng.integers(max(1, k // 2), k))) for k in range(2, 75_001)]
    contents = rng.integers(1, 2**64, len(names), dtype=np.uint64)
    worker.apply(Runs.of(runs, names, contents, BLOCK), 0.0)
    began = time.thread_time()
    tree = prefix_tree(table.snapshot())
    assert time.thread_time() - began < 0.1
    assert len(tree) > 50_000
