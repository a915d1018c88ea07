"""Two real vLLM engines whose connector keeps KV in one folder: a hit on a worker that never saw the prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.exporters.app import running
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.exporter import Exporter
from tests.live.conftest import Complete, MakePrompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]  # on a crowded machine engines take minutes to start

BLOCK = 32
PROMPT = 20 * BLOCK
SETTLE_SECONDS = 30.0


def hits_by_tier(exporter: Exporter, name: str) -> dict[str, float]:
    """Hit tokens of each tier that has any."""
    (store,) = (target.store for target in exporter.targets if target.name == name)
    assert store is not None
    return {tier: tokens for (tier,), tokens in store.totals_by("prefix_hit_tokens", "tier").items() if tokens}


async def until(reached: Callable[[], bool], exporter: Exporter) -> None:
    """Scrape until this is so, or the time to settle is over; the assertions that follow say what is wrong."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not reached() and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        await exporter.scrape_all()


async def test_a_worker_that_never_saw_the_prompt_reuses_it_from_the_shared_folder(
    sharing: list[EngineHandle], complete: Complete, make_prompt: MakePrompt
) -> None:
    first, second = sharing
    targets = tuple(TargetConfig(name=one.name, url=one.url) for one in sharing)
    config = ExporterConfig(targets=targets, listen="127.0.0.1:0", interval_seconds=3600.0, window_seconds=7200.0)
    async with running(config) as exporter:
        await exporter.scrape_all()
        prompt = make_prompt(PROMPT)
        cold = await complete(first.url, prompt)
        elsewhere = await complete(second.url, prompt)
        again = await complete(second.url, prompt)
        other = await complete(second.url, make_prompt(PROMPT))
        await until(lambda: len(hits_by_tier(exporter, second.name)) > 1, exporter)
        tiers = {one.name: hits_by_tier(exporter, one.name) for one in sharing}
    assert (cold.cached_tokens, other.cached_tokens) == (0, 0)
    assert elsewhere.cached_tokens == PROMPT - BLOCK  # whole blocks, and never the last token
    assert tiers[first.name] == {}
    assert tiers[second.name] == {"remote": elsewhere.cached_tokens, "gpu": again.cached_tokens}
