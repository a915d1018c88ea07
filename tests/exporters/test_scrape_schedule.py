"""When a target is scraped."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

import exporters.exporter as module
from exporters.config import ExporterConfig, TargetConfig
from exporters.exporter import Exporter
from exporters.scraping.target import Target


async def test_a_timer_that_rings_a_moment_early_brings_no_second_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    now, scraped_at = 100.0, []

    async def rings_early(seconds: float) -> None:
        nonlocal now
        now += max(0.0, seconds - 0.001)

    async def scrape(target: Target) -> None:
        scraped_at.append(round(now, 1))
        if len(scraped_at) == 5:
            exporter._loops.clear()  # as when the target goes

    exporter = Exporter(ExporterConfig(targets=(TargetConfig(name="a", url="http://a"),), interval_seconds=2))
    own = asyncio.current_task()
    assert own is not None
    exporter._loops["a"] = own
    monkeypatch.setattr(exporter, "scrape", scrape)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(asyncio, "sleep", rings_early)
    await exporter._loop(exporter.targets[0], first_in_seconds=0.0, phase_seconds=1.0)
    assert scraped_at == [100.0, 101.0, 103.0, 105.0, 107.0]
