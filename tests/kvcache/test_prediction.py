"""Why predicted and delivered hit tokens differ."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.kvcache.blocks import as_tokens, block_hashes
from prefixwatch.kvcache.prediction import longest_common_blocks, prediction_cause

SHORT_PROMPTS = st.lists(st.integers(0, 1), max_size=40)


@pytest.mark.parametrize(
    ("predicted", "delivered", "known", "cause"),
    [
        (64, None, {}, "not_reported"),
        (None, None, {}, "not_reported"),
        (None, 64, {}, "not_predicted"),
        (64, 64, {"cleared": True}, "exact"),
        (64, 48, {"cleared": True}, "within_block"),
        (64, 80, {}, "within_block"),
        (64, 0, {"cleared": True, "evicted": True, "computing_tokens": 64}, "cleared"),
        (64, 0, {"evicted": True, "computing_tokens": 16}, "concurrent_miss"),
        (64, 16, {"evicted": True, "computing_tokens": 16}, "evicted_since"),
        (64, 0, {}, "over_credited"),
        (0, 64, {"evicted": True}, "under_credited"),
        (0, 64, {"computing_tokens": 16}, "concurrent_hit"),
        (32, 64, {"computing_tokens": 32}, "under_credited"),
    ],
)
def test_the_first_cause_that_applies(
    predicted: int | None, delivered: int | None, known: dict[str, Any], cause: str
) -> None:
    assert prediction_cause(predicted, delivered, block_size=16, **known) == cause


@given(prompt=SHORT_PROMPTS, others=st.lists(SHORT_PROMPTS, max_size=4))
def test_the_longest_common_opening_is_that_of_the_tokens(prompt: list[int], others: list[list[int]]) -> None:
    def common_blocks(other: list[int]) -> int:
        whole = range(1, min(len(prompt), len(other)) // 4 + 1)
        return sum(prompt[: 4 * k] == other[: 4 * k] for k in whole)

    chains = [block_hashes(as_tokens(other), 4) for other in others]
    expected = max(map(common_blocks, others), default=0)
    assert longest_common_blocks(block_hashes(as_tokens(prompt), 4), chains) == expected
