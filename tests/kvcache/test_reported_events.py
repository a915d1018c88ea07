"""Events as users reported them of engines, their modes and their simulators: each is indexed where it belongs, and
nothing that belongs to a tenant is ever found without its salt."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.kvcache.blocks import as_tokens, block_hashes
from prefixwatch.kvcache.events.feed import WorkerFeed
from prefixwatch.kvcache.events.table_feed import TableFeed
from prefixwatch.kvcache.events.wire import Namespace, Tier, tier_of
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.kvcache.index.block_table import BlockTable

TOKENS = list(range(100, 148))
NAMES = [11, 22, 33]
FIELDS = {
    "block_hashes": NAMES,
    "parent_block_hash": None,
    "token_ids": TOKENS,
    "block_size": 16,
    "lora_id": None,
    "medium": "GPU",
}
REMOVED = {"type": "BlockRemoved", "block_hashes": NAMES, "medium": "GPU"}


def as_map(**changed: Any) -> dict[str, Any]:
    return {"type": "BlockStored", **FIELDS, **changed}


def as_array(*more: Any, **changed: Any) -> list[Any]:
    return ["BlockStored", *{**FIELDS, **changed}.values(), *more]


class Heard:
    """A router's and an exporter's feed after these events, a batch each."""

    def __init__(self, *events: Any) -> None:
        self.index, self.table = BlockIndex(), BlockTable()
        self.feed, self.counted = WorkerFeed("w", self.index), TableFeed("w", self.table)
        for sequence, event in enumerate(events):
            payload = msgspec.msgpack.encode([1.0, [event], 0])
            self.feed.apply(sequence, payload, 0.0)
            self.counted.apply(sequence, payload, 0.0)

    def found(self, **namespace: str) -> int:
        """Blocks of the prompt that this namespace finds; what the exporter counts must be all that was stored."""
        hashes = block_hashes(as_tokens(TOKENS), 16, root=Namespace(**namespace).root())
        return sum(self.index.holds("w", int(one)) for one in hashes)


METADATA = [{"cache_salt": "t"}, {"cache_salt": "t", "session_id": "s"}, {"session_id": "s", "cache_salt": "t", "x": 1}]


@pytest.mark.parametrize("metadata", METADATA)
@pytest.mark.parametrize("array", [False, True])
def test_a_salt_in_an_events_metadata_keeps_tenants_apart(metadata: dict[str, Any], *, array: bool) -> None:
    """sgl-project/sglang#38562, #37271, #37482, ai-dynamo/dynamo#14144."""
    heard = Heard(as_array(metadata) if array else as_map(metadata=metadata))
    assert (heard.found(salt="t"), heard.found(), heard.found(salt="u")) == (3, 0, 0)
    assert (heard.counted.blocks.resident_blocks, heard.counted.tells_salts) == (3, True)
    assert heard.feed.unreadable is None


def test_salted_and_other_runs_come_in_one_stream() -> None:
    """With and without the element more, in one batch."""
    events = [as_array({"cache_salt": "t"}), as_array(block_hashes=[44, 55, 66]), as_array({"session_id": "s"})]
    index = BlockIndex()
    WorkerFeed("w", index).apply(0, msgspec.msgpack.encode([1.0, events, None]), 0.0)
    for salt in (None, "t"):
        hashes = block_hashes(as_tokens(TOKENS), 16, root=Namespace(salt=salt).root())
        assert all(index.holds("w", int(one)) for one in hashes)


def test_extra_keys_in_the_place_of_an_adapters_name_are_read() -> None:
    """sgl-project/sglang#27735."""
    heard = Heard(as_array([["t"], None, None]))
    assert (heard.found(salt="t"), heard.found()) == (3, 0)


@given(st.lists(st.none() | st.text(max_size=3) | st.dictionaries(st.text(max_size=3), st.integers(0, 9)), max_size=3))
def test_whatever_stands_behind_an_array_never_makes_salted_blocks_anybodys(more: list[Any]) -> None:
    """Further elements in further releases."""
    heard = Heard(as_array({"cache_salt": "t"}, *more))
    assert heard.found() == 0


@pytest.mark.parametrize("lora_id", [0, -1])
def test_no_adapter_has_a_number_below_one(lora_id: int) -> None:
    """llm-d/llm-d-inference-sim#441, vllm-project/aibrix#2285: the base model's blocks are those of no adapter."""
    assert Heard(as_map(lora_id=lora_id)).found() == 3
    assert Heard(as_array(lora_id=lora_id)).found() == 3
    assert Heard(as_map(lora_id=1)).found() == 0


@pytest.mark.parametrize("array", [False, True])
def test_pairs_of_tokens_are_blocks_as_long_as_ever(*, array: bool) -> None:
    """ai-dynamo/dynamo#6872, llm-d/llm-d-kv-cache#603: EAGLE, EAGLE3, NEXTN."""
    pairs = [[token, token + 1] for token in TOKENS]
    heard = Heard(as_array(token_ids=pairs) if array else as_map(token_ids=pairs), REMOVED)
    assert (heard.found(), heard.counted.blocks.resident_blocks) == (0, 0)
    assert Heard(as_array(token_ids=pairs) if array else as_map(token_ids=pairs)).found() == 3
    assert heard.feed.counters.removed_blocks == 3


NAMES_OF_BLOCKS = st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=40) | st.text(st.characters(codec="utf-8"))


def one_name(name: Any) -> Any:
    """What it is within one engine: names that come out equal here are of one block."""
    return name % 2**64 if isinstance(name, int) else name.encode() if isinstance(name, str) else name


@given(st.lists(NAMES_OF_BLOCKS, min_size=4, max_size=4, unique_by=one_name))
def test_a_block_has_whichever_kind_of_name(names: list[Any]) -> None:
    """ai-dynamo/dynamo#3169, #4533: signed, unsigned, digests, hexadecimal and other texts."""
    *first, last = names
    stored = as_map(block_hashes=first)
    after = as_map(block_hashes=[last], parent_block_hash=first[-1], token_ids=TOKENS[:16])
    gone = {"type": "BlockRemoved", "block_hashes": [last]}
    heard = Heard(stored, after)
    assert (heard.found(), heard.feed.counters.stored_blocks) == (3, 4)
    heard = Heard(stored, after, gone)
    assert (heard.found(), heard.feed.counters.removed_blocks, heard.feed.counters.cleared) == (3, 1, 0)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        ("Device", Tier.GPU),
        ("hbm", Tier.GPU),
        ("NPU", Tier.GPU),
        ("HostPinned", Tier.CPU),
        ("host_pinned", Tier.CPU),
        ("cpu-pinned", Tier.CPU),
        ("DRAM", Tier.CPU),
        ("File", Tier.DISK),
        ("External", Tier.REMOTE),
        ("L7", Tier.REMOTE),
        ("", Tier.REMOTE),
    ],
)
def test_a_medium_has_its_tier_however_it_is_written(medium: str, tier: Tier) -> None:
    """ai-dynamo/dynamo#13483; one that nobody knows is never the GPU."""
    assert tier_of(medium) is tier
    assert Heard(as_map(medium=medium)).found() == (3 if tier is Tier.GPU else 0)
