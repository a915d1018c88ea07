"""Targets from files and servers, in Prometheus' formats."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from prefixwatch.exporters.discovery.config import FileSdConfig, HttpSdConfig, ScrapeConfig, StaticConfig
from prefixwatch.exporters.discovery.files import FileDiscovery
from prefixwatch.exporters.discovery.http import HttpDiscovery
from prefixwatch.exporters.discovery.job import target_configs
from prefixwatch.exporters.discovery.provider import DiscoveryError, label_sets
from prefixwatch.exporters.scraping.scrape import Scraper

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ServePages = Callable[[dict[str, bytes | Handler]], Awaitable[str]]

GROUPS = [{"targets": ["a:1", "b:2"], "labels": {"zone": "x", "rack": 7}}, {"targets": ["c:3"]}]


def files(*patterns: Path | str) -> FileDiscovery:
    return FileDiscovery(FileSdConfig(files=tuple(str(pattern) for pattern in patterns), refresh_interval=0.01))


async def addresses(discovery: FileDiscovery | HttpDiscovery) -> list[str]:
    return [labels["__address__"] for labels in (await discovery.fetch()).targets]


async def test_json_and_yaml_files_are_found_by_pattern(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(GROUPS))
    (tmp_path / "two.yml").write_text("- targets: ['d:4']\n  labels: {zone: y}\n")
    found = (await files(tmp_path / "*.json", tmp_path / "*.yml").fetch()).targets
    assert found[0] == {
        "zone": "x",
        "rack": "7",
        "__meta_filepath": f"{tmp_path}/one.json",
        "__address__": "a:1",
    }
    assert [labels["__address__"] for labels in found] == ["a:1", "b:2", "c:3", "d:4"]


async def test_a_file_is_read_again_when_it_changes_comes_or_goes(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text('[{"targets": ["a:1"]}]')
    discovery = files(tmp_path / "*.json")
    assert await addresses(discovery) == ["a:1"]
    file.write_text('[{"targets": ["a:1", "b:2"]}]')
    await discovery.changed()
    assert await addresses(discovery) == ["a:1", "b:2"]
    (tmp_path / "two.json").write_text('[{"targets": ["c:3"]}]')
    await discovery.changed()
    assert await addresses(discovery) == ["a:1", "b:2", "c:3"]
    file.unlink()
    await discovery.changed()
    assert await addresses(discovery) == ["c:3"]


async def test_a_broken_file_keeps_its_last_targets_and_says_where_it_is_broken(tmp_path: Path) -> None:
    broken, good = tmp_path / "broken.json", tmp_path / "good.yaml"
    broken.write_text('[{"targets": ["a:1"]}]')
    good.write_text("[{targets: ['b:2']}]")
    discovery = files(broken, good)
    await discovery.fetch()
    broken.write_text('[{"targets": ["a:1"]},\n')
    good.write_text("[{targets: ['c:3']}]")
    found = await discovery.fetch()
    assert [labels["__address__"] for labels in found.targets] == ["a:1", "c:3"]
    (problem,) = found.problems
    assert problem.startswith(f"{broken}:2: not valid JSON")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"targets": []}', "document: Input should be a valid list"),
        ('[{"target": ["a:1"]}]', "[0].targets: Field required"),
        ('[{"targets": "a:1"}]', "[0].targets: Input should be a valid tuple"),
        ('[{"targets": ["a:1"], "labels": {"a": []}}]', "[0].labels.a: Input should be a valid string"),
    ],
)
async def test_a_file_of_another_form_names_the_group(tmp_path: Path, text: str, where: str) -> None:
    (tmp_path / "x.json").write_text(text)
    (problem,) = (await files(tmp_path / "x.json").fetch()).problems
    assert where in problem
    assert '[{"targets": ["host:port"]' in problem


async def test_no_matching_file_is_a_problem(tmp_path: Path) -> None:
    found = await files(tmp_path / "*.json").fetch()
    assert found.targets == []
    assert "no file matches" in found.problems[0]


@pytest.fixture
async def scraper() -> AsyncIterator[Scraper]:
    one = Scraper(1.0, 10_000)
    yield one
    await one.close()


async def test_a_server_is_asked_with_its_token_and_its_refresh_interval(
    scraper: Scraper, serve_pages: ServePages
) -> None:
    async def lists(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer s3cret"
        assert request.headers["X-Prometheus-Refresh-Interval-Seconds"] == "30"
        return web.json_response(GROUPS)

    url = await serve_pages({"/sd": lists})
    config = HttpSdConfig.model_validate(
        {"url": f"{url}/sd?key=k", "refresh_interval": "30s", "authorization": {"credentials": "s3cret"}}
    )
    found = (await HttpDiscovery(config, scraper).fetch()).targets
    assert [labels["__address__"] for labels in found] == ["a:1", "b:2", "c:3"]
    assert found[0]["__meta_url"] == f"{url}/sd?key=***"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (b"<html>", "is not JSON"),
        (b'[{"targets": 1}]', r"\[0\]\.targets"),
        (b"[" + b" " * 20_000 + b"]", "too_large"),
    ],
)
async def test_an_answer_that_is_no_list_is_an_error(
    scraper: Scraper, serve_pages: ServePages, page: bytes, message: str
) -> None:
    config = HttpSdConfig(url=await serve_pages({"/sd": page}) + "/sd")
    with pytest.raises(DiscoveryError, match=message):
        await HttpDiscovery(config, scraper).fetch()


def test_no_more_targets_are_built_than_may_be_scraped() -> None:
    """M9: a list of 200,000 addresses held up the exporter for 11 seconds, to scrape 5,000 of them."""
    looked_at = []

    def found() -> Iterator[dict[str, str]]:
        for k in range(200_000):
            looked_at.append(k)
            yield {"__address__": f"10.{k >> 16}.{k >> 8 & 255}.{k & 255}:8000"}

    job = ScrapeConfig(job_name="j", static_configs=(StaticConfig(targets=("h:1",)),))
    targets, problems = target_configs(job, found(), most=5)
    assert ([target.name for target in targets], len(looked_at)) == ([f"10.0.0.{k}:8000" for k in range(5)], 6)
    assert problems == ["job j: only the first 5 targets are used: see limits.targets"]


def test_a_list_beyond_all_reason_is_refused() -> None:
    groups = [{"targets": [f"h{k}:1" for k in range(50_001)]}] * 2
    with pytest.raises(DiscoveryError, match="here: lists 100002 targets, at most 100000 can be read"):
        label_sets(groups, "here", {})
