"""When a target is scraped."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

import prefixwatch.exporters.targets as module
from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.exporters.targets import TargetSet


async def test_a_timer_that_rings_a_moment_early_brings_no_second_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    now, scraped_at = 100.0, []

    async def rings_early(seconds: float) -> None:
        nonlocal now
        now += max(0.0, seconds - 0.001)

    async def scrape(target: Target) -> None:
        scraped_at.append(round(now, 1))
        if len(scraped_at) == 5:
            targets._loops.clear()  # as when the target is removed

    config = ExporterConfig(targets=(TargetConfig(name="a", url="http://a"),), interval_seconds=2)
    targets = TargetSet(config, shipped_catalogue(), scrape, lambda _: None)
    targets.follow(config.targets)
    own = asyncio.current_task()
    assert own is not None
    targets._loops["a"] = own
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(asyncio, "sleep", rings_early)
    await targets._loop(targets.targets[0], first_in_seconds=0.0, phase_seconds=1.0)
    assert scraped_at == [100.0, 101.0, 103.0, 105.0, 107.0]
