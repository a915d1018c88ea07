"""Targets that discovery brings and takes away while the exporter runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from prefixwatch.exporters.config import ExporterConfig
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.target import Target

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ServePages = Callable[[dict[str, bytes | Handler]], Awaitable[str]]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # a file that changes tells nobody
            await asyncio.sleep(0.005)


class Fleet:
    """An exporter that finds its targets in a file, and the pages that they serve."""

    def __init__(self, file: Path, serve_pages: ServePages) -> None:
        self.file = file
        self._serve_pages = serve_pages
        self.pages: dict[str, str] = {}
        self.exporter: Exporter

    async def page(self, text: str) -> str:
        """The address of a target that serves this."""

        async def handler(_: web.Request) -> web.Response:
            return web.Response(text=self.pages[address])

        address = (await self._serve_pages({"/metrics": handler})).removeprefix("http://")
        self.pages[address] = text
        return address

    async def open(self, **settings: Any) -> None:
        job = {
            "job_name": "vllm",
            "file_sd_configs": [{"files": [str(self.file)], "refresh_interval": 0.01}],
            "relabel_configs": [{"source_labels": ["name"], "target_label": "instance"}],
        }
        self.exporter = Exporter(ExporterConfig.model_validate({"scrape_configs": [job], **settings}))
        await self.exporter.open()
        self.exporter.service.discovery.keep_looking()

    async def become(self, **targets: str) -> None:
        """Write name=address into the file, and wait until the exporter follows it."""
        groups = [{"targets": [address], "labels": {"name": name}} for name, address in targets.items()]
        self.file.write_text(json.dumps(groups))
        wanted = {name: f"http://{address}/metrics" for name, address in targets.items()}
        await until(lambda: {target.name: target.config.url for target in self.exporter.targets} == wanted)

    async def metrics(self, scrapes: int = 1) -> str:
        for _ in range(scrapes):
            await self.exporter.scrape_all()
        one = self.exporter
        return render(one.targets, "", one.sources, one.fleet.retired.holders())[0].decode()


@pytest.fixture
async def fleet(tmp_path: Path, serve_pages: ServePages) -> AsyncIterator[Fleet]:
    file = tmp_path / "targets.json"
    file.write_text("[]")
    one = Fleet(file, serve_pages)
    await one.open()
    yield one
    await one.exporter.close()


def vllm(queries: int, hits: int) -> str:
    """A page of an engine."""
    labels = '{engine="0",model_name="m"}'
    return (
        f"vllm:prefix_cache_queries_total{labels} {queries}\nvllm:prefix_cache_hits_total{labels} {hits}\n"
        f"vllm:num_requests_running{labels} 1\nvllm:num_requests_waiting{labels} 0\n"
    )


def router(requests: int) -> str:
    """A page of our own router."""
    return (
        f'prefixwatch_router_requests_total{{worker="w",class="chat",outcome="ok"}} {requests}\n'
        'prefixwatch_router_in_flight_requests{target="w"} 1\n'
    )


def total(text: str) -> float:
    """Requests by all routers together."""
    lines = [line for line in text.splitlines() if line.startswith("prefixwatch_requests_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def test_a_vanished_target_s_series_end(fleet: Fleet) -> None:
    """ray-project/ray#65892 (EM31): series of replicas that exited went on with frozen values."""
    a, b = await fleet.page(vllm(100, 50)), await fleet.page(vllm(1000, 900))
    await fleet.become(a=a, b=b)
    assert 'prefix_query_tokens_total{model="m",target="b"} 1000.0' in await fleet.metrics()
    await fleet.become(a=a)
    text = await fleet.metrics()
    assert 'target="b"' not in text
    assert 'prefix_query_tokens_total{model="m",target="a"} 100.0' in text


async def test_the_fleet_s_counters_keep_what_vanished_routers_counted(fleet: Fleet) -> None:
    a, b = await fleet.page(router(100)), await fleet.page(router(70))
    await fleet.become(a=a, b=b)
    assert total(await fleet.metrics()) == 170
    await fleet.become(a=a)
    assert total(await fleet.metrics()) == 170
    fleet.pages[a] = router(110)
    assert total(await fleet.metrics()) == 180
    await fleet.become(a=a, c=await fleet.page(router(5)))
    assert total(await fleet.metrics()) == 185
    await fleet.become()
    assert total(await fleet.metrics()) == 185


async def test_a_router_that_discovery_loses_and_finds_again_is_counted_once(fleet: Fleet) -> None:
    """The same process all the time: what it counted meanwhile is added, and nothing twice."""
    a, b = await fleet.page(router(100)), await fleet.page(router(70))
    await fleet.become(a=a, b=b)
    await fleet.metrics()
    await fleet.become(a=a)
    await fleet.metrics()
    fleet.pages[b] = router(75)
    await fleet.become(a=a, b=b)
    assert total(await fleet.metrics()) == 175
    await fleet.become(a=a)
    await fleet.become(a=a, other_name=b)
    assert total(await fleet.metrics()) == 175


async def test_a_scrape_that_ends_after_its_target_went_changes_nothing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.become(a=await fleet.page(router(100)))
    await fleet.metrics()
    (target,) = fleet.exporter.targets
    fetch, went = fleet.exporter.fetch, asyncio.Event()

    async def fetch_late(target: Target) -> Scrape:
        scrape = await fetch(target)
        await went.wait()
        return scrape

    monkeypatch.setattr(fleet.exporter, "fetch", fetch_late)
    scraping = asyncio.create_task(fleet.exporter.scrape(target))
    await fleet.become()
    went.set()
    await scraping
    assert (target.store, total(await fleet.metrics())) == (None, 100)


async def test_a_new_process_at_the_address_of_one_that_is_gone_adds_to_its_counts(fleet: Fleet) -> None:
    a = await fleet.page(router(100))
    await fleet.become(a=a)
    await fleet.metrics()
    await fleet.become()
    fleet.pages[a] = router(3)
    await fleet.become(a=a)
    assert total(await fleet.metrics()) == 103


async def test_a_catalogue_that_is_read_anew_counts_nothing_twice(
    tmp_path: Path, serve_pages: ServePages, fleet: Fleet
) -> None:
    await fleet.become(a=await fleet.page(router(100)))
    await fleet.metrics()
    own = "system: mine\ntitle: t\nrole: engine\ndetect: {any_of: [mine_up]}\nsignals: {}\n"
    (tmp_path / "mine.yaml").write_text(own)
    await fleet.exporter.reconfigure(fleet.exporter.config.model_copy(update={"catalogue": tmp_path}))
    assert total(await fleet.metrics()) == 100


async def test_a_target_replaced_under_its_name_starts_a_new_window(fleet: Fleet) -> None:
    old, new = await fleet.page(vllm(100, 50)), await fleet.page(vllm(100_000, 10))
    await fleet.become(a=old)
    await fleet.metrics(scrapes=2)
    assert fleet.exporter.targets[0].store is not None
    assert fleet.exporter.targets[0].store.increase is not None
    await fleet.become(a=new)
    text = await fleet.metrics()
    assert "prefixwatch_window_seconds" not in text
    assert "prefixwatch_prefix_hit_ratio" not in text
    assert 'prefix_query_tokens_total{model="m",target="a"} 100000.0' in text


async def test_a_target_that_comes_back_starts_a_new_window(fleet: Fleet) -> None:
    a = await fleet.page(vllm(100, 50))
    await fleet.become(a=a)
    await fleet.metrics(scrapes=2)
    await fleet.become()
    await fleet.become(a=a)
    assert "prefixwatch_window_seconds" not in await fleet.metrics()


async def test_unchanged_targets_keep_their_windows_when_others_come_and_go(fleet: Fleet) -> None:
    a = await fleet.page(vllm(100, 50))
    await fleet.become(a=a)
    await fleet.metrics(scrapes=2)
    await fleet.become(a=a, b=await fleet.page(vllm(1, 1)))
    assert 'window_seconds{target="a"} ' in await fleet.metrics()


async def test_another_system_at_the_same_address_does_not_take_the_fleet_s_counts_along(fleet: Fleet) -> None:
    a = await fleet.page(router(100))
    await fleet.become(a=a)
    await fleet.metrics()
    fleet.pages[a] = vllm(7, 3)
    text = await fleet.metrics()
    assert 'prefixwatch_requests_total{class="chat",outcome="ok"} 100.0' in text
    assert 'prefix_query_tokens_total{model="m",target="a"} 7.0' in text


async def test_two_targets_of_one_name_are_told_and_one_is_scraped(fleet: Fleet) -> None:
    a, b = await fleet.page(vllm(1, 1)), await fleet.page(vllm(2, 2))
    fleet.file.write_text(json.dumps([{"targets": [a, b], "labels": {"name": "same"}}]))
    await until(lambda: bool(fleet.exporter.targets))
    (problem,) = fleet.exporter.service.document(0.0)["problems"]
    assert problem == (
        f"two targets have the name 'same': http://{a}/metrics is scraped, http://{b}/metrics is not; "
        "give them different `instance` labels"
    )


async def test_a_failed_look_keeps_the_targets_and_is_counted(fleet: Fleet) -> None:
    await fleet.become(a=await fleet.page(vllm(1, 1)))
    fleet.file.write_text("[")
    await until(lambda: fleet.exporter.service.discovery.failures["vllm/file_sd"] > 0)
    text = await fleet.metrics()
    assert 'prefixwatch_discovered_targets{discovery="vllm/file_sd"} 1.0' in text
    assert 'prefixwatch_discovery_failures_total{discovery="vllm/file_sd"} 1.0' in text
    assert 'prefixwatch_target_up{model="m",system="vllm",target="a"' in text


async def test_more_targets_than_the_limit_are_not_scraped(tmp_path: Path, serve_pages: ServePages) -> None:
    file = tmp_path / "targets.json"
    file.write_text(json.dumps([{"targets": ["h:1", "h:2", "h:3"]}]))
    fleet = Fleet(file, serve_pages)
    await fleet.open(limits={"targets": 2})
    assert len(fleet.exporter.targets) == 2
    assert (
        "only the first 2 targets are used: see limits.targets" in fleet.exporter.service.document(0.0)["problems"][0]
    )
    await fleet.exporter.close()


async def test_labels_say_what_a_target_is_and_where_it_stands(tmp_path: Path, serve_pages: ServePages) -> None:
    file = tmp_path / "targets.json"
    labels = {
        "name": "w0",
        "__meta_zone": "eu-1a",
        "__meta_node": "n7",
        "__system__": "vllm",
        "__model__": "m",
        "__kv_events__": "tcp://h:5557",
        "__kv_replay__": "tcp://h:5558",
        "team": "llm",
    }
    file.write_text(json.dumps([{"targets": ["h:8000"], "labels": labels}]))
    relabel = [
        {"source_labels": ["name"], "target_label": "instance"},
        {"action": "labelmap", "regex": "__meta_(.+)"},
    ]
    job = {"job_name": "j", "scheme": "https", "file_sd_configs": [{"files": [str(file)]}], "relabel_configs": relabel}
    exporter = Exporter(ExporterConfig.model_validate({"scrape_configs": [job]}))
    await exporter.open()
    (target,) = (target.config for target in exporter.targets)
    assert (target.name, target.url, target.system, target.model) == ("w0", "https://h:8000/metrics", "vllm", "m")
    assert (target.kv_events, target.kv_replay) == (("tcp://h:5557",), ("tcp://h:5558",))
    assert (target.zone, target.node) == ("eu-1a", "n7")
    assert target.labels == {"job": "j", "name": "w0", "team": "llm", "zone": "eu-1a", "node": "n7"} | {
        "filepath": str(file)
    }
    await exporter.close()
