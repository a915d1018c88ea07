from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.trace import TraceError, read_trace, trace_tokens

GOOD = '{"timestamp": 27482, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}'


def written(folder: Path, *lines: str) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_line_becomes_a_request(tmp_path: Path) -> None:
    (request,) = read_trace(written(tmp_path, GOOD, ""))
    assert (request.arrival_s, request.prompt_tokens, request.output_tokens) == (27.482, 600, 5)
    assert request.blocks.tolist() == [0, 7]
    assert request.tokens().tolist() == [*range(512), *range(7 * 512, 7 * 512 + 88)]


def test_requests_come_in_order_of_arrival_and_up_to_the_limit(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD, GOOD.replace("27482", "3"), GOOD.replace("27482", "1"))
    assert [request.arrival_s for request in read_trace(file)] == [0.001, 0.003, 27.482]
    assert [request.arrival_s for request in read_trace(file, limit=2)] == [0.003, 27.482]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("nonsense", r"trace.jsonl, line 2: .*JSON"),
        ('{"timestamp": 1}', r"line 2: .*missing required field `input_length`"),
        (GOOD.replace("600", '"600"'), r"line 2: Expected `int`, got `str` - at `\$.input_length`"),
        (GOOD.replace("27482", "-1"), r"line 2: Expected `float` >= 0"),
        (GOOD.replace("[0, 7]", "[0]"), r"line 2: 1 hash_ids for input_length 600: expected 2"),
        (GOOD.replace("[0, 7]", f"[0, {2**64}]"), r"line 2: "),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(TraceError, match=complaint):
        read_trace(written(tmp_path, GOOD, line))


def test_a_missing_or_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"can't read the trace .*nowhere\.jsonl: No such file"):
        read_trace(tmp_path / "nowhere.jsonl")
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(written(tmp_path, ""))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**22), min_size=1, max_size=4), st.data())
def test_tokens_are_equal_exactly_where_blocks_are(ids: list[int], data: st.DataObject) -> None:
    length = data.draw(st.integers(512 * (len(ids) - 1) + 1, 512 * len(ids)))
    tokens = trace_tokens(np.array(ids, dtype=np.uint64), length)
    assert tokens.dtype == np.uint32
    assert len(tokens) == length
    assert [int(first) // 512 for first in tokens[::512]] == ids
