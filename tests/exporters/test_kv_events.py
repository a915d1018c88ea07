"""KV events of live publishers, and their way to the metrics page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from prefixwatch.engines.simulated.kv_event_publisher import KvEventPublisher
from prefixwatch.exporters.caches.kv_events import KvEventCounts, KvEventWatcher
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.kvcache.index.block_table import BlockTable

TIMEOUT_SECONDS = 10.0
PROMPT = list(range(1, 161))


class Source:
    """Stands in for a subscription."""

    def __init__(self, counts: KvEventCounts | None) -> None:
        self._counts = counts

    def counts(self) -> KvEventCounts | None:
        return self._counts

    def why_unknown(self) -> str:
        return "no publisher"


def test_evictions_are_exported_when_known_and_absent_otherwise(make_target: Callable[..., Target]) -> None:
    target = make_target("a", "vllm:num_requests_running 0\n")
    assert "kv_blocks_evicted" not in render([target])[0].decode()
    target.kv_events = Source(None)
    page = render([target])[0].decode()
    assert "kv_blocks_evicted" not in page
    assert 'prefixwatch_data_quality{flag="kv_events_unknown",target="a"} 1.0' in page
    target.kv_events = Source(
        KvEventCounts(7, 2, 100, 3, 0.01, clears=1, lifetimes=[0, 4, 0, 0, 0, 0, 0, 0, 0, 3], lifetimes_sum_seconds=9.0)
    )
    page = render([target])[0].decode()
    for line in (
        'prefixwatch_kv_blocks_evicted_total{target="a"} 7.0',
        'prefixwatch_kv_blocks_regretted_total{target="a"} 2.0',
        'prefixwatch_kv_blocks_resident{target="a"} 100.0',
        'prefixwatch_kv_event_batches_missed_total{target="a"} 3.0',
        'prefixwatch_kv_cache_clears_total{target="a"} 1.0',
        'prefixwatch_kv_block_lifetime_seconds_bucket{le="1.0",target="a"} 0.0',
        'prefixwatch_kv_block_lifetime_seconds_bucket{le="5.0",target="a"} 4.0',
        'prefixwatch_kv_block_lifetime_seconds_bucket{le="+Inf",target="a"} 7.0',
        'prefixwatch_kv_block_lifetime_seconds_sum{target="a"} 9.0',
        'prefixwatch_data_quality{flag="kv_events_missed",target="a"} 1.0',
    ):
        assert line in page


def test_what_an_engine_that_is_cut_off_holds_is_unknown(make_target: Callable[..., Target]) -> None:
    """ray-project/ray#65892 (EM31): no frozen gauge; what was counted stays."""
    target = make_target("a", "vllm:num_requests_running 0\n", "refused")
    target.kv_events = Source(KvEventCounts(7, 2, 100, 3, 0.01, connected=False))
    page = render([target])[0].decode()
    assert "prefixwatch_kv_blocks_resident{" not in page
    assert 'prefixwatch_kv_blocks_evicted_total{target="a"} 7.0' in page
    assert 'prefixwatch_data_quality{flag="stale_index",target="a"} 1.0' in page


def test_block_lifetimes_are_those_of_the_events_where_there_are_any(make_target: Callable[..., Target]) -> None:
    """vLLM's own are of a sample: never beside them, and not lost where another target has events."""
    name = "vllm:kv_block_lifetime_seconds"
    text = f'vllm:num_requests_running 0\n{name}_bucket{{le="+Inf"}} 5\n{name}_sum 1\n{name}_count 5\n'
    heard, unheard = make_target("heard", text), make_target("unheard", text)
    heard.kv_events = Source(KvEventCounts(7, 0, 9, 0, 0.0, lifetimes=[0] * 9 + [7], lifetimes_sum_seconds=9.0))
    lines = render([heard, unheard])[0].decode().splitlines()
    counts = [line for line in lines if line.startswith("prefixwatch_kv_block_lifetime_seconds_count")]
    assert counts == [
        'prefixwatch_kv_block_lifetime_seconds_count{target="heard"} 7.0',
        'prefixwatch_kv_block_lifetime_seconds_count{target="unheard"} 5.0',
    ]


@pytest.mark.parametrize(
    ("told", "flag"),
    [
        ({"incomplete": True}, "index_gap"),
        ({"connected": False}, "stale_index"),
        ({"lag_seconds": 60.0}, "stale_index"),
        ({"missed_batches": 1}, "kv_events_missed"),
    ],
)
def test_flags_say_why_the_numbers_may_mislead(told: dict[str, Any], flag: str) -> None:
    fine: dict[str, Any] = {"missed_batches": 0, "lag_seconds": None}
    assert not any(KvEventCounts(0, 0, 0, **fine).flags.values())
    raised = [name for name, up in KvEventCounts(0, 0, 0, **{**fine, **told}).flags.items() if up]
    assert raised == [flag]


class Engine:
    """A publisher that may lose batches, and may be replaced by another process at the same address."""

    def __init__(
        self, *, replay: bool = True, endpoint: str = "tcp://127.0.0.1:*", replay_at: str | None = None
    ) -> None:
        self.publisher = KvEventPublisher(endpoint, (replay_at or "tcp://127.0.0.1:*") if replay else None)
        self.task = asyncio.create_task(self.publisher.serve_replays())

    @property
    def replays(self) -> list[str]:
        return [self.publisher.replay_endpoint] if self.publisher.replay_endpoint else []

    def publish(self, *events: dict[str, Any]) -> None:
        self.publisher.publish(list(events))

    def lose(self, *events: dict[str, Any]) -> None:
        """A batch that only a replay brings."""
        pub = self.publisher._pub
        self.publisher._pub = _Nowhere()  # type: ignore[assignment]  # stands in for a socket that nobody hears
        self.publish(*events)
        self.publisher._pub = pub

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.publisher.close()


class _Nowhere:
    def send_multipart(self, *_: Any) -> None:
        """Nothing arrives."""


def stored(first: int, last: int, base: int = 100) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(range(base + first, base + last)),
        "parent_block_hash": base + first - 1 if first else None,
        "token_ids": PROMPT[first * 16 : last * 16],
        "block_size": 16,
        "medium": "GPU",
    }


def removed(*names: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU"}


class Rig:
    def __init__(self) -> None:
        self.table = BlockTable()
        self.engines: list[Engine] = []
        self.watchers: list[KvEventWatcher] = []

    def engine(self, **how: Any) -> Engine:
        self.engines.append(Engine(**how))
        return self.engines[-1]

    def watch(self, engine: Engine, name: str = "a") -> KvEventWatcher:
        watcher = KvEventWatcher(name, [engine.publisher.endpoint], engine.replays, self.table)
        watcher.start()
        self.watchers.append(watcher)
        return watcher

    async def until(self, watcher: KvEventWatcher, reached: Callable[[KvEventCounts], object]) -> KvEventCounts:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while True:
                counts = watcher.counts()
                if counts and reached(counts):
                    return counts
                await asyncio.sleep(0.01)

    async def joined(self, engine: Engine) -> KvEventWatcher:
        """A watcher that has heard from this engine."""
        watcher = self.watch(engine)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not (watcher.counts() and watcher.counts().batches):  # type: ignore[union-attr]
                engine.publish({"type": "Hello"})
                await asyncio.sleep(0.02)
        return watcher


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    for watcher in rig.watchers:
        await watcher.stop()
    for engine in rig.engines:
        await engine.close()


async def test_a_watcher_counts_what_an_engine_publishes(rig: Rig) -> None:
    engine = rig.engine()
    watcher = await rig.joined(engine)
    engine.publish(stored(0, 3))
    engine.publish(removed(102))
    engine.publish(stored(2, 3))
    counts = await rig.until(watcher, lambda c: c.regretted_blocks)
    assert (counts.stored_blocks, counts.evicted_blocks, counts.regretted_blocks, counts.resident_blocks) == (
        4,
        1,
        1,
        3,
    )
    assert (counts.block_size_tokens, counts.clears, counts.missed_batches, counts.connected) == (16, 0, 0, True)
    assert sum(counts.lifetimes) == 1
    assert counts.lag_seconds is not None
    assert counts.lag_seconds < TIMEOUT_SECONDS


async def test_a_lost_batch_is_replayed(rig: Rig) -> None:
    """llm-d/llm-d-router#1737 (RT14): the gap is closed before anything is believed."""
    engine = rig.engine()
    watcher = await rig.joined(engine)
    engine.publish(stored(0, 3))
    engine.lose(removed(102))
    engine.publish(stored(0, 1, base=900))
    counts = await rig.until(watcher, lambda c: c.evicted_blocks)
    assert (counts.missed_batches, counts.clears, counts.incomplete, len(rig.table)) == (0, 0, False, 2)
    assert counts.replayed_batches >= 1


async def test_a_batch_lost_for_good_takes_the_workers_blocks_along(rig: Rig) -> None:
    """llm-d/llm-d-router#1737 (RT14): without a replay nothing that was known is sure; another worker's blocks stay."""
    engine, other = rig.engine(replay=False), rig.engine()
    watcher = await rig.joined(engine)
    other.publish(stored(0, 3))
    neighbour = rig.watch(other, "b")
    await rig.until(neighbour, lambda c: c.resident_blocks == 3)
    engine.publish(stored(0, 3))
    engine.lose(removed(102))
    engine.publish(stored(0, 1, base=900))
    counts = await rig.until(watcher, lambda c: c.missed_batches)
    assert (counts.missed_batches, counts.resident_blocks, counts.clears, counts.incomplete) == (1, 1, 1, True)
    assert len(rig.table) == 3


async def test_a_reset_cache_is_forgotten_without_evictions(rig: Rig) -> None:
    """vllm-project/aibrix#2287 (RT16)"""
    engine = rig.engine()
    watcher = await rig.joined(engine)
    engine.publish(stored(0, 10))
    engine.publish({"type": "AllBlocksCleared"})
    counts = await rig.until(watcher, lambda c: c.clears)
    assert (counts.resident_blocks, counts.evicted_blocks, len(rig.table)) == (0, 0, 0)


async def test_an_engine_that_is_replaced_begins_with_an_empty_cache(rig: Rig) -> None:
    """sgl-project/sglang#39822 (RT17): what the earlier process held is gone, what the new one did is known."""
    engine = rig.engine()
    watcher = await rig.joined(engine)
    engine.publish(stored(0, 10))
    await rig.until(watcher, lambda c: c.resident_blocks == 10)
    at, replay_at = engine.publisher.endpoint, engine.publisher.replay_endpoint
    await engine.close()
    rig.engines.remove(engine)
    # ZMQ takes a concrete address for one to connect to, as vLLM does, so the new process is given the wildcard form.
    again = rig.engine(endpoint=at.replace("127.0.0.1", "*"), replay_at=(replay_at or "").replace("127.0.0.1", "*"))
    again.publish(stored(0, 2, base=500))
    counts = await rig.until(watcher, lambda c: c.clears and c.resident_blocks == 2)
    assert (counts.clears, counts.evicted_blocks, len(rig.table)) == (1, 0, 2)


async def test_a_stopped_watcher_leaves_nothing_in_the_table(rig: Rig) -> None:
    engine = rig.engine()
    watcher = await rig.joined(engine)
    engine.publish(stored(0, 3))
    await rig.until(watcher, lambda c: c.resident_blocks == 3)
    await watcher.stop()
    assert (len(rig.table), dict(rig.table.workers)) == (0, {})


async def test_a_watcher_without_a_publisher_knows_nothing(rig: Rig) -> None:
    watcher = KvEventWatcher("a", ["tcp://127.0.0.1:1"], [], rig.table)
    assert watcher.counts() is None
    assert "tcp://127.0.0.1:1" in watcher.why_unknown()


async def test_a_watcher_that_ends_by_a_fault_says_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last counts would stand there for ever, as if nothing were stored or evicted any more."""
    engine = rig.engine()
    watcher = await rig.joined(engine)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("compilation disabled")

    monkeypatch.setattr(watcher._feeds[0], "apply", fails)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while watcher.counts() is not None:
            engine.publish(stored(0, 3))
            await asyncio.sleep(0.01)

    assert watcher.why_unknown() == (
        "reading its KV events ended by a fault of the exporter (RuntimeError: compilation disabled): "
        "restart it, and report what its log says"
    )


async def test_every_rank_of_an_engine_is_heard_as_a_cache_of_its_own(
    rig: Rig, make_target: Callable[..., Target]
) -> None:
    """sglang#29211, vllm#18925 (N20): two ranks with 12 and 8 blocks, of which 3 are the same."""
    ranks = [rig.engine(), rig.engine()]
    endpoints = [rank.publisher.endpoint for rank in ranks]
    watcher = KvEventWatcher("dp", endpoints, [], rig.table)
    watcher.start()
    rig.watchers.append(watcher)
    target = make_target("dp", _RANKS, kv_events=tuple(endpoints))
    target.kv_events = watcher
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not ((counts := watcher.counts()) and counts.batches > 1 and not counts.ranks_unheard):
            for rank in ranks:
                rank.publish({"type": "Hello"})
            await asyncio.sleep(0.02)
    assert not target.flags(0.0)["ranks_missing"]
    ranks[0].publish(stored(0, 10))
    ranks[1].publish(stored(0, 3))
    counts = await rig.until(watcher, lambda c: c.resident_blocks == 13)
    assert (len(rig.table), set(rig.table.workers)) == (10, {"dp/0", "dp/1"})
    ranks[1].publish(removed(102))
    counts = await rig.until(watcher, lambda c: c.evicted_blocks)
    assert (counts.resident_blocks, len(rig.table)) == (12, 10)


_RANKS = """\
vllm:num_requests_running{engine="0",model_name="m"} 1
vllm:num_requests_running{engine="1",model_name="m"} 0
"""


def test_a_page_of_more_engines_than_streams_lacks_ranks(make_target: Callable[..., Target]) -> None:
    for endpoints, missing in ((("tcp://h:1",), True), (("tcp://h:1", "tcp://h:2"), False)):
        target = make_target("dp", _RANKS, kv_events=endpoints)
        target.kv_events = Source(KvEventCounts(0, 0, 20, 0, 0.0))
        assert target.flags(0.0)["ranks_missing"] is missing
        target.kv_events = Source(KvEventCounts(0, 0, 20, 0, 0.0, ranks_unheard=1))
        assert target.flags(0.0)["ranks_missing"]


def test_a_figure_without_an_engine_label_is_no_further_rank(make_target: Callable[..., Target]) -> None:
    page = 'vllm:num_requests_running{engine="0",model_name="m"} 1\nvllm:prefix_cache_queries_total{model_name="m"} 5\n'
    target = make_target("one", page, kv_events=("tcp://h:1",))
    target.kv_events = Source(KvEventCounts(0, 0, 20, 0, 0.0))
    assert not target.flags(0.0)["ranks_missing"]
