from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.documents import DocumentError
from prefixwatch.simulator.traffic.trace import read_trace, trace_tokens

GOOD = '{"timestamp": 27482, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}'


def written(folder: Path, *lines: str) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_line_becomes_a_request(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, GOOD, ""))
    (request,) = trace.requests
    assert (request.arrival_s, request.prompt_tokens, request.output_tokens, trace.block_size) == (0.0, 600, 5, 512)
    assert request.blocks.tolist() == [0, 7]
    assert request.tokens().tolist() == [*range(512), *range(7 * 512, 7 * 512 + 88)]


def test_requests_come_in_order_of_arrival_from_0_and_up_to_the_limit(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD, GOOD.replace("27482", "3"), GOOD.replace("27482", "1"))
    assert [request.arrival_s for request in read_trace(file).requests] == pytest.approx([0.0, 0.002, 27.481])
    assert [request.arrival_s for request in read_trace(file, limit=2).requests] == pytest.approx([0.0, 27.479])


def test_lengths_alone_share_nothing_and_say_so(tmp_path: Path) -> None:
    row = '{"timestamp": 1, "input_length": 40, "output_length": 5}'
    trace = read_trace(written(tmp_path, row, row))
    a, b = (set(request.blocks.tolist()) for request in trace.requests)
    assert (len(a), a & b) == (3, set())
    assert trace.notes == [
        "2 of 2 requests have a length without a text or block ids: what their prompts share is unknown, and nothing "
        "counts as shared."
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("nonsense", "trace.jsonl:2: not a JSON object"),
        (GOOD.replace("[0, 7]", "[0]"), "trace.jsonl:2: 1 hash_ids for input_length 600: expected 2"),
        (GOOD.replace("[0, 7]", f"[0, {2**64}]"), "trace.jsonl:2: a block id is above 64 bits"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(DocumentError, match=complaint):
        read_trace(written(tmp_path, GOOD, line))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**22), min_size=1, max_size=4), st.data())
def test_tokens_are_equal_exactly_where_blocks_are(ids: list[int], data: st.DataObject) -> None:
    length = data.draw(st.integers(512 * (len(ids) - 1) + 1, 512 * len(ids)))
    tokens = trace_tokens(np.array(ids, dtype=np.uint64), length)
    assert tokens.dtype == np.uint32
    assert len(tokens) == length
    assert [int(first) // 512 for first in tokens[::512]] == ids
