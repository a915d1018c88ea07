"""Hit, partial hit and miss have one definition, by request and by column."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.kvcache.cache_class import (
    CACHE_CLASSES,
    HIT,
    MISS,
    PARTIAL,
    REUSABLE,
    UNKNOWN,
    WHOLE_PROMPT,
    cache_class,
    cache_classes,
    reusable_part,
)
from prefixwatch.slo import selection


@pytest.mark.parametrize(
    ("prompt", "cached", "reusable", "expected"),
    [
        (2200, 2000, 2000, (HIT, REUSABLE)),
        (2200, 2000, None, (PARTIAL, WHOLE_PROMPT)),
        (2200, 1024, 2000, (PARTIAL, REUSABLE)),
        (2200, 0, 2000, (MISS, REUSABLE)),
        (2200, 0, None, (MISS, WHOLE_PROMPT)),
        (2200, 2192, None, (HIT, WHOLE_PROMPT)),
        (2200, 16, 0, (PARTIAL, WHOLE_PROMPT)),  # nothing was known to be reusable, and yet something was reused
        (2200, 16, 15, (PARTIAL, WHOLE_PROMPT)),  # less than a block can't be reused
        (2200, 2100, 2000, (HIT, REUSABLE)),  # the answer before, which the engine caches, too
        (1024, 1008, 1024, (HIT, REUSABLE)),  # the last token is always computed
        (1024, 1008, None, (HIT, WHOLE_PROMPT)),
        (2200, None, 2000, (UNKNOWN, "")),
        (None, 16, 2000, (UNKNOWN, "")),
    ],
)
def test_a_request(prompt: int | None, cached: int | None, reusable: int | None, expected: tuple[str, str]) -> None:
    assert cache_class(prompt, cached, 16, reusable) == expected


_TOKENS = st.one_of(st.none(), st.integers(0, 5000))


@given(st.lists(st.tuples(_TOKENS, _TOKENS, _TOKENS), min_size=1, max_size=50), st.sampled_from([1, 16, 512, 784]))
def test_columns_give_what_each_request_gives(rows: list[tuple[int | None, int | None, int | None]], size: int) -> None:
    prompt, cached, reusable = np.array(rows, dtype=np.float64).T
    names, bases = cache_classes(prompt, cached, size, reusable)
    assert list(zip(names, bases, strict=True)) == [cache_class(p, c, size, r) for p, c, r in rows]


@given(st.integers(1, 5000), st.integers(0, 6000), st.integers(1, 600))
def test_the_reusable_part_is_in_full_blocks_and_never_the_whole_prompt(prompt: int, tokens: int, size: int) -> None:
    part = reusable_part(tokens, prompt, size)
    assert part % size == 0
    assert 0 <= part < prompt
    assert part <= tokens < part + size or part + size > prompt - 1


def test_selection_knows_these_classes() -> None:
    assert selection.CACHE_CLASSES == CACHE_CLASSES
