"""Traces whose block ids contradict each other: only content that can have been shared counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.loadgen.recordings.partial_blocks import BlockRow, consistent_ids
from prefixwatch.loadgen.recordings.reader import read_recording
from prefixwatch.simulator.traffic.trace import read_trace

N07 = [
    {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 900, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 3]},
]


def trace(folder: Path, rows: list[dict[str, object]]) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("turned", [False, True])
def test_a_partial_block_of_one_row_is_not_the_full_one_of_another(tmp_path: Path, turned: bool) -> None:
    """aiperf#1219, dynamo#12046 (N07): row 1 left 700 tokens, of which only 512 are a full block."""
    rows = N07[::-1] if turned else N07
    file = trace(tmp_path, [{**row, "timestamp": 900 * k} for k, row in enumerate(rows)])
    recording, read = read_recording(file), read_trace(file)
    simulated, notes = read.requests, read.notes
    for blocks in ([r.block_ids or () for r in recording.requests], [tuple(r.blocks.tolist()) for r in simulated]):
        assert len(set(blocks[0]) & set(blocks[1])) == 1
    lines = (2, 1) if turned else (1, 2)
    assert recording.notes == notes == [
        f"block id 2 stands for 188 tokens in {file}:{lines[0]} and for 512 in {file}:{lines[1]}: the trace "
        f"contradicts itself (1 such id). Only the blocks before it count as shared."
    ]  # fmt: skip


def test_the_same_partial_block_again_is_the_same(tmp_path: Path) -> None:
    file = trace(tmp_path, [N07[0], {**N07[0], "timestamp": 900}])
    recording = read_recording(file)
    assert [request.block_ids for request in recording.requests] == [(1, 2), (1, 2)]
    assert recording.notes == []


def test_ids_of_64_bits_stay_apart(tmp_path: Path) -> None:
    rows = [{**N07[1], "hash_ids": [1, 2, high]} for high in (3, 2**32 + 3, 2**64 - 1)]
    recording = read_recording(trace(tmp_path, rows))
    assert [request.block_ids for request in recording.requests] == [(1, 2, 3), (1, 2, 2**32 + 3), (1, 2, 2**64 - 1)]


@given(st.lists(st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True), st.integers(1, 8))))
def test_equal_ids_have_equal_lengths_afterwards(drawn: list[tuple[list[int], int]]) -> None:
    rows = [BlockRow(f"f:{k}", ids, 8 * (len(ids) - 1) + last) for k, (ids, last) in enumerate(drawn)]
    found, note = consistent_ids(rows, 8)
    lengths: dict[int, set[int]] = {}
    for row, ids in zip(rows, found, strict=True):
        assert len(ids) == len(row.ids)
        assert list(ids[:-1]) == list(row.ids[:-1])
        for place, block in enumerate(ids):
            lengths.setdefault(block, set()).add(8 if place < len(ids) - 1 else row.prompt_tokens - 8 * (len(ids) - 1))
    assert all(len(own) == 1 for own in lengths.values())
    assert (note is None) == (list(map(list, found)) == [list(row.ids) for row in rows])
