"""Hit ratio against cache size, held against an exact LRU cache of every size."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Sequence
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.kvcache.request_record import mark_depths
from prefixwatch.kvcache.reuse_distance import ReuseDistances

STEP = 2 ** (1 / 16)
"""To which distances are kept."""
MOST_ERROR = 0.05
"""Of a hit ratio, with 4,096 pieces, on the traces generated here."""

Prompt = list[int]
"""Names of its blocks, each of all blocks before it, too."""


def exact(prompts: Sequence[Prompt], blocks: float) -> float:
    """Hit ratio of an LRU cache of so many blocks that evicts the end of a prefix first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        for name in prompt:
            if name not in cache:
                break
            hits += 1
        for name in reversed(prompt):
            cache.pop(name, None)
            cache[name] = None
        while len(cache) > blocks:
            cache.popitem(last=False)
    return hits / sum(map(len, prompts))


def chained(contents: Sequence[int]) -> Prompt:
    found, name = [], 0
    for content in contents:
        name = crc32(content.to_bytes(8, "little"), name)
        found.append(name)
    return found


def traffic(seed: int, prompts: int = 1_500, documents: int = 200) -> list[Prompt]:
    """Documents of very unequal popularity with a question each, and sessions that go on from where they were."""
    chance = random.Random(seed)
    popularity = [1 / (rank + 1) ** 0.9 for rank in range(documents)]
    lengths = [chance.randint(8, 120) for _ in range(documents)]
    sessions: list[list[int]] = []
    found, fresh = [], 1_000_000
    for _ in range(prompts):
        if sessions and chance.random() < 0.6:
            contents = chance.choice(sessions)
        else:
            document = chance.choices(range(documents), popularity)[0]
            contents = [document * 1_000 + place for place in range(lengths[document])]
            sessions = [*sessions[-59:], contents]
        new = chance.randint(2, 20)
        contents.extend(range(fresh, fresh + new))
        fresh += new
        found.append(chained(contents))
    return found


def curve_of(prompts: Sequence[Prompt], most: int) -> ReuseDistances:
    """As records name prompts: the pieces between the marked depths, the last block, and what was seen before."""
    curve, known = ReuseDistances(most), set[int]()
    for prompt in prompts:
        depths = [0, *mark_depths(len(prompt))]
        pieces = [(prompt[end - 1], float(end - start)) for start, end in itertools.pairwise(depths)]
        if len(prompt) > depths[-1]:
            pieces.append((prompt[-1] ^ 1, float(len(prompt) - depths[-1])))
        seen = next((place for place, name in enumerate(prompt) if name not in known), len(prompt))
        known.update(prompt)
        curve.prompt(pieces, seen=seen)
    return curve


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40),
    st.integers(1, 40),
)
def test_where_all_is_followed_it_is_the_exact_ratio_to_a_step(contents: list[list[int]], blocks: int) -> None:
    prompts = [chained(each) for each in contents]
    curve = ReuseDistances(10_000)
    for prompt in prompts:
        curve.prompt([(name, 16.0) for name in prompt])

    ratios = curve.hit_ratios([16.0 * blocks])

    assert ratios is not None
    assert exact(prompts, int(blocks / STEP)) - 1e-9 <= ratios[0] <= exact(prompts, blocks * STEP + 1) + 1e-9


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=20), max_size=60), st.integers(1, 30))
def test_no_more_pieces_are_followed_than_asked_for(contents: list[list[int]], most: int) -> None:
    curve = ReuseDistances(most)
    for each in contents:
        curve.prompt([(name, 1.0) for name in chained(each)])
        assert curve.followed <= most
    ratios = curve.hit_ratios([0.0, 1.0, 10.0, 100.0, 1e9])
    assert ratios is None or (ratios == sorted(ratios) and ratios[0] >= 0.0 and ratios[-1] <= 1.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_of_4096_pieces_is_within_5_points_of_the_exact_ratio(seed: int) -> None:
    prompts, sizes = traffic(seed), (1_000, 3_000, 6_000, 12_000)

    curve = curve_of(prompts, 4_096)

    ratios = curve.hit_ratios(sizes)
    assert ratios is not None
    assert curve.sampled_ratio < 1
    errors = [abs(ratio - exact(prompts, size)) for ratio, size in zip(ratios, sizes, strict=True)]
    assert max(errors) <= MOST_ERROR, (ratios, errors)


def test_old_lookups_fade_and_what_is_cached_stays() -> None:
    curve = ReuseDistances()
    curve.prompt([(1, 16.0)])  # looked up for the first time
    curve.fade(0.0)

    assert curve.hit_ratios([100.0]) is None

    curve.prompt([(1, 16.0)])
    assert curve.hit_ratios([8.0, 100.0]) == [0.0, 1.0]


def test_a_prompts_tail_that_was_seen_in_another_piece_is_as_old_as_the_piece_before_it() -> None:
    curve = ReuseDistances()
    curve.prompt([(1, 64.0), (2, 16.0)])  # 16 tokens after the first 64 end this prompt
    curve.prompt([(1, 64.0), (3, 64.0)], seen=80.0)  # the longer one begins with them

    assert curve.hit_ratios([1e6]) == [(64 + 16) / (80 + 128)]
    assert curve.looked_up_tokens == 80 + 128


def test_following_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="most"):
        ReuseDistances(0)
