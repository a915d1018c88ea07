from __future__ import annotations

import numpy as np
import pytest

from prefixwatch.kvcache.blocks import Hashes
from prefixwatch.kvcache.index.audit import IndexAudit
from prefixwatch.kvcache.index.block_index import BlockIndex

PROMPT: Hashes = np.arange(1, 17, dtype=np.uint64)


@pytest.fixture
def index() -> BlockIndex:
    """`whole` holds the prompt, `holed` all of it but block 4; bisection steps over that hole."""
    index = BlockIndex()
    index.store("whole", PROMPT.tolist())
    index.store("holed", [block for block in PROMPT.tolist() if block != 4])
    assert index.depths(PROMPT) == {"whole": 16, "holed": 16}
    return index


def test_an_audited_lookup_counts_the_hole_and_answers_exactly(index: BlockIndex) -> None:
    audit = IndexAudit(share=1)
    assert audit.lookup(index)(PROMPT) == {"whole": 16, "holed": 3}
    assert audit.audited_lookups == 1
    assert audit.holes == {"holed": 1}


def test_a_worker_without_the_first_block_is_found_by_neither(index: BlockIndex) -> None:
    index.remove("holed", [1])
    audit = IndexAudit(share=1)
    assert audit.lookup(index)(PROMPT) == {"whole": 16}
    assert audit.holes == {}


def test_without_holes_nothing_is_counted(index: BlockIndex) -> None:
    index.store("holed", [4])
    audit = IndexAudit(share=1)
    for length in range(17):
        audit.lookup(index)(PROMPT[:length])
    assert audit.audited_lookups == 17
    assert not audit.holes


def test_the_share_is_drawn_by_the_seed(index: BlockIndex) -> None:
    def audited(seed: int) -> list[bool]:
        audit = IndexAudit(share=0.01, seed=seed)
        look = audit.lookup(index)
        return [look(PROMPT)["holed"] == 3 for _ in range(5000)]

    assert audited(1) == audited(1) != audited(2)
    assert 25 <= sum(audited(1)) <= 80


def test_exact_lookups_always_walk_and_are_audited_as_well(index: BlockIndex) -> None:
    audit = IndexAudit(share=0.01, exact=True)
    look = audit.lookup(index)
    assert {look(PROMPT)["holed"] for _ in range(1000)} == {3}
    assert 0 < audit.audited_lookups < 50
    assert audit.holes == {"holed": audit.audited_lookups}


def test_without_a_share_the_lookup_is_the_indexs_own(index: BlockIndex) -> None:
    assert IndexAudit(share=0).lookup(index) == index.depths
    assert IndexAudit(share=0, exact=True).lookup(index) == index.depths_by_walk


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_a_part_of_one(share: float) -> None:
    with pytest.raises(ValueError, match="0 to 1"):
        IndexAudit(share)
