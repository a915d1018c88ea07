"""`--data-parallel-size 2` on a real vLLM: two ranks at one address are two engines, each with a cache of its own."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefixwatch.engines import fleet
from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.exporters.app import running
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.exporters.fleet.derivation import derive_fleet
from tests.live.conftest import Complete, MakePrompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]  # on a crowded machine engines take minutes to start

BLOCK = 32
BLOCKS = 12
PROMPT = BLOCKS * BLOCK + 5
"""A repeat reuses all whole blocks, and one generated token fills none."""
SETTLE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class TwoRanks:
    """An engine with two ranks; endpoints are those of rank 0 and rank 1."""

    url: str
    events: tuple[str, str]
    replays: tuple[str, str]


@pytest.fixture(scope="module")
def parallel(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    """vLLM adds `_dp1` to the second rank's endpoints where a name has `inproc` in it, and binds them as they are."""
    with tempfile.TemporaryDirectory(prefix="prefixwatch-") as folder:  # a short path, for sockets
        events, replay = (f"ipc://{folder}/inproc.{end}" for end in ("kv", "replay"))
        publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events, "replay_endpoint": replay}
        arguments = ("--data-parallel-size", "2", "--kv-events-config", json.dumps(publish))
        logs = tmp_path_factory.mktemp("parallel")
        handles = asyncio.run(fleet.start_vllm(1, model_dir, logs, extra_arguments=arguments))
        yield TwoRanks(handles[0].url, (events, f"{events}_dp1"), (replay, f"{replay}_dp1"))
        asyncio.run(fleet.stop(handles))


def exporting(parallel: TwoRanks, single: EngineHandle) -> ExporterConfig:
    targets = (
        TargetConfig(name="parallel", url=parallel.url, kv_events=parallel.events, kv_replay=parallel.replays),
        TargetConfig(
            name="single", url=single.url, kv_events=(single.kv_events.publish,), kv_replay=(single.kv_events.replay,)
        ),
    )
    return ExporterConfig(targets=targets, listen="127.0.0.1:0", interval_seconds=3600.0, window_seconds=7200.0)


@dataclass(slots=True)
class Books:
    """What was asked and answered, by engine."""

    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    cached_tokens: Counter[str] = field(default_factory=Counter)


def counted(exporter: Exporter) -> dict[str, dict[str, float]]:
    """By signal and engine since the engines started; the single one has no rank beside it."""
    found: dict[str, dict[str, float]] = {}
    for signal in ("finished_requests", "prefix_query_tokens", "prefix_hit_tokens"):
        found[signal] = {}
        for target in exporter.targets:
            assert target.store is not None
            for (engine,), total in target.store.totals_by(signal, "engine").items():
                found[signal]["single" if target.name == "single" else f"parallel/{engine}"] = total
    return found


def stored_blocks(exporter: Exporter) -> dict[str, int]:
    known = {target.name: target.kv_events.counts() for target in exporter.targets if target.kv_events}
    return {name: counts.stored_blocks for name, counts in known.items() if counts}


async def test_each_rank_is_an_engine_with_its_own_counts_and_its_own_cache(
    parallel: TwoRanks,
    engines: list[EngineHandle],
    complete: Complete,
    make_prompt: MakePrompt,
    session: aiohttp.ClientSession,
) -> None:
    single, books = engines[0], Books()
    async with session.get(f"{parallel.url}/kv_event_sources") as response:
        sources: dict[str, Any] = await response.json()
    assert [sources[rank]["endpoint"] for rank in "01"] == list(parallel.events)

    async with running(exporting(parallel, single)) as exporter:
        await exporter.scrape_all()
        before = counted(exporter)
        shared, other = make_prompt(PROMPT), make_prompt(PROMPT)
        asked = [("parallel/0", shared), ("parallel/1", shared), ("single", shared), ("parallel/1", other)]
        for name, prompt in [*asked, *asked, ("parallel/0", other)]:
            rank = name.partition("/")[2]
            headers = {"X-data-parallel-rank": rank} if rank else None
            answer = await complete(parallel.url if rank else single.url, prompt, headers)
            books.requests[name] += 1
            books.prompt_tokens[name] += answer.prompt_tokens
            books.cached_tokens[name] += answer.cached_tokens
            await exporter.scrape_all()  # one rank moves, the other does not

        def grown() -> dict[str, dict[str, float]]:
            now = counted(exporter)
            return {
                signal: {name: total - before[signal].get(name, 0.0) for name, total in of_signal.items()}
                for signal, of_signal in now.items()
            }

        booked = {
            "finished_requests": dict(books.requests),
            "prefix_query_tokens": dict(books.prompt_tokens),
            "prefix_hit_tokens": dict(books.cached_tokens),
        }
        blocks = {"parallel": 4 * BLOCKS, "single": BLOCKS}

        deadline = time.monotonic() + SETTLE_SECONDS
        while (grown() != booked or stored_blocks(exporter) != blocks) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            await exporter.scrape_all()
        assert grown() == booked
        assert stored_blocks(exporter) == blocks, "what both ranks cache is there twice"
        hit = float(BLOCKS * BLOCK)
        assert booked["prefix_hit_tokens"] == {"parallel/0": hit, "parallel/1": 2 * hit, "single": hit}
        ours = next(target for target in exporter.targets if target.name == "parallel")
        assert ours.store is not None
        assert ours.store.resets == 0
        assert set(derive_fleet(exporter.targets).loads) == {"parallel/0", "parallel/1", "single"}
        flags = ours.flags(time.monotonic())
        assert not {name for name in ("several_engines", "several_processes", "ranks_missing") if flags[name]}
        async with session.get(f"{exporter.url}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
    samples = [one for family in families if family.name == "prefixwatch_prefix_hit_ratio" for one in family.samples]
    ratios = {one.labels["engine"]: one.value for one in samples if one.labels["target"] == "parallel"}
    ranks = {rank: f"parallel/{rank}" for rank in "01"}
    assert ratios == {rank: books.cached_tokens[name] / books.prompt_tokens[name] for rank, name in ranks.items()}


async def test_requests_that_the_engine_places_itself_are_all_counted(
    parallel: TwoRanks, engines: list[EngineHandle], complete: Complete, make_prompt: MakePrompt
) -> None:
    """Twelve at once, to no rank in particular: its balancer uses both, and their sum is what was asked."""
    async with running(exporting(parallel, engines[0])) as exporter:
        await exporter.scrape_all()
        before = counted(exporter)["finished_requests"]
        await asyncio.gather(*(complete(parallel.url, make_prompt(PROMPT)) for _ in range(12)))
        by_rank: dict[str, float] = {}
        deadline = time.monotonic() + SETTLE_SECONDS
        while sum(by_rank.values()) < 12 and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            await exporter.scrape_all()
            now = counted(exporter)["finished_requests"]
            by_rank = {name: now[name] - before[name] for name in ("parallel/0", "parallel/1")}
    assert sum(by_rank.values()) == 12
    assert min(by_rank.values()) > 0
