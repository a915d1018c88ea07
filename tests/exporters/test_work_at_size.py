"""What one page, one probe or one span costs doesn't grow with the fleet: work is counted, not timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prefixwatch.exporters.catalogue import renames
from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.exporters.requests import router_records
from prefixwatch.exporters.scraping import target as scraped
from prefixwatch.exporters.scraping.exposition import metric_names
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.target import Target

CONFIG = 'vllm:cache_config_info{block_size="%d",num_gpu_blocks="100"} 1\n'
ENGINE = "vllm:num_requests_running 1\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.5\n"
ROUTER = "prefixwatch_router_requests_total 1\n" + "".join(
    f'prefixwatch_router_in_flight{{worker="http://10.0.0.{number}:8000"}} 1\n' for number in range(6)
)


class Unserved(Exporter):
    """Its targets' pages are those below; those that are down refuse."""

    down: frozenset[str] = frozenset()

    async def fetch(self, target: Target) -> Scrape:
        if target.name in self.down:
            return Scrape(0.01, None, "refused", "nobody listens")
        number = target.name.rpartition("-")[2]
        text = ROUTER if target.name == "router" else ENGINE + CONFIG % (16 if number == "0" else 32)
        return Scrape(0.01, text.encode())


class Fleet:
    """An exporter of a router and six engines."""

    def __init__(self) -> None:
        engines = [
            TargetConfig(name=f"engine-{number}", url=f"http://10.0.0.{number}:8000/metrics") for number in range(6)
        ]
        router = TargetConfig(name="router", url="http://router:9000/metrics")
        self.exporter = Unserved(ExporterConfig(targets=(router, *engines)))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[Any]]:
    """The arguments of each call of a module's function from now on."""

    def counted(module: Any, name: str) -> list[Any]:
        found: list[Any] = []
        original = getattr(module, name)

        def called(*given: Any) -> Any:
            found.append(given)
            return original(*given)

        monkeypatch.setattr(module, name, called)
        return found

    return counted


async def test_engines_that_come_and_go_don_t_make_routers_pages_be_read_again(
    calls: Callable[[Any, str], list[Any]],
) -> None:
    fleet = Fleet()
    read = calls(router_records, "_workers_of")
    await fleet.exporter.scrape_all()
    fleet.exporter.down = frozenset(f"engine-{number}" for number in range(6))
    await fleet.exporter.scrape_all()
    assert len(read) <= 2, "once a page of the router"


def test_pages_with_the_same_names_are_followed_once(calls: Callable[[Any, str], list[Any]]) -> None:
    vllm = shipped_catalogue().get("vllm")
    names = metric_names(ENGINE.encode())
    followed = calls(renames, "_follow")
    first = renames.follow(vllm, names | {"some_name_of_this_test"})
    assert renames.follow(vllm, frozenset(sorted(names)) | {"some_name_of_this_test"}) is first
    assert len(followed) == 1
    for number in range(200):
        renames.follow(vllm, names | {f"another_{number}"})
    assert len(renames._FOLLOWED) <= 64, "whatever pages show, little is remembered"


async def test_a_page_s_names_are_taken_from_it_once_while_its_size_stays(
    calls: Callable[[Any, str], list[Any]],
) -> None:
    fleet = Fleet()
    taken = calls(scraped, "metric_names")
    await fleet.exporter.scrape_all()
    await fleet.exporter.scrape_all()
    assert len(taken) == len(fleet.exporter.targets)


async def test_a_probe_and_a_span_look_at_their_own_worker(calls: Callable[[Any, str], list[Any]]) -> None:
    fleet = Fleet()
    await fleet.exporter.scrape_all()
    derived = calls(scraped, "derive_target")
    assert fleet.exporter.fleet.waiting_at("engine-0") == 2
    assert fleet.exporter.fleet.block_size_of("engine-0") == 16
    assert fleet.exporter.fleet.block_size_of("10.0.0.0:8000") == 16, "by its address, too"
    assert len(derived) == 1


async def test_another_name_is_all_targets() -> None:
    fleet = Fleet()
    await fleet.exporter.scrape_all()
    assert fleet.exporter.fleet.waiting_at("gateway") == 12
    assert fleet.exporter.fleet.block_size_of("gateway") is None, "two sizes: nobody knows which it is"
