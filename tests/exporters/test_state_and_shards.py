"""A restart loses no record and repeats none; shards scrape each target once, and export no figure of a part as one of
the whole."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.exporters.app import running
from prefixwatch.exporters.config import ExporterConfig, TargetConfig, split_shard, validated
from prefixwatch.exporters.errors import ExporterError
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.exporters.requests.ledger import RequestLedger
from prefixwatch.exporters.requests.router_records import RouterRecords
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.exporters.state import StateFile
from prefixwatch.exporters.targets import shard_of
from prefixwatch.exporters.web import OF_THE_WHOLE_FLEET
from tests.exporters.requests import done, figures, ledger_of
from tests.exporters.test_router_records import Log, MakeTarget

START = 1_700_000_000.0


def begun(path: Path, since: float) -> tuple[StateFile, RouterRecords, RequestLedger, bool]:
    ledger = ledger_of()
    records = RouterRecords(ledger, since_unix_seconds=since)
    state = StateFile(path, records, ledger)
    return state, records, ledger, state.load()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5))
def test_restarts_lose_no_record_and_repeat_none(lives: list[tuple[int, int]]) -> None:
    """So many records end while the exporter runs, and so many while it is away, for several lives of it."""

    async def live() -> dict[str, dict[tuple[str, ...], float]]:
        log, target = Log(), make_router()
        path = Path(folder) / f"{time.monotonic_ns()}.json"
        for here, away in lives:
            state, records, ledger, _ = begun(path, time.time())
            await records.read(target, log.get)  # all that has ended so far was seen once
            log.records += [done(ended_unix_seconds=time.time()) for _ in range(here)]
            await records.read(target, log.get)
            await state._save()
            log.records += [done(ended_unix_seconds=time.time() - 1) for _ in range(away)]
        _, records, ledger, continued = begun(path, time.time())
        assert continued
        await records.read(target, log.get)
        assert ledger.document(0.0)["records"].get("router", 0) == len(log.records)
        return figures(ledger)

    shown = asyncio.run(live())
    total = sum(here + away for here, away in lives)
    if total:
        assert shown["requests_total"]["default", "completed"] == total
        assert shown["e2e_seconds_count"] == {("default",): total}
        assert shown["e2e_seconds_sum"] == {("default",): pytest.approx(0.4 * total)}


folder = ""


@pytest.fixture(autouse=True, scope="module")
def a_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    global folder  # noqa: PLW0603  # hypothesis calls the test often, fixtures of a function are made once
    folder = str(tmp_path_factory.mktemp("state"))


def make_router() -> Target:
    from prefixwatch.exporters.catalogue.model import shipped_catalogue  # noqa: PLC0415  # no fixture within hypothesis

    config = TargetConfig(name="router", url="http://localhost/metrics")
    return Target(config, ExporterConfig(targets=(config,)), shipped_catalogue())


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"schema": 2, "saved_unix_seconds": 0, "readers": {}, "ledger": {}}']
)
def test_a_file_that_is_no_state_is_not_used(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(content)
    assert begun(path, START)[3] is False


async def test_a_state_of_yesterday_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    state, *_ = begun(path, START)
    await state._save()
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {"saved_unix_seconds": time.time() - 86_400}))
    assert begun(path, START)[3] is False
    assert path.stat().st_mode & 0o077 == 0


async def test_an_exporter_saves_its_state_when_it_ends(tmp_path: Path) -> None:
    config = validated(
        {"targets": [{"name": "a", "url": "127.0.0.1:1"}], "listen": "127.0.0.1:0",
         "state_file": str(tmp_path / "state.json")}, "test",
    )  # fmt: skip
    async with running(config) as exporter:
        exporter.ledger.record(done(), "router")
    async with (
        running(config) as again,
        aiohttp.ClientSession() as session,
        session.get(f"{again.url}/metrics") as answer,
    ):
        page = await answer.text()
    assert 'prefixwatch_requests_total{class="default",model="m",outcome="completed"} 1.0' in page


@given(st.sets(st.text(min_size=1, max_size=20), max_size=200), st.integers(1, 8))
def test_another_shard_takes_only_its_share(names: set[str], shards: int) -> None:
    before = {name: shard_of(name, shards) for name in names}
    after = {name: shard_of(name, shards + 1) for name in names}
    assert all(after[name] in (before[name], shards) for name in names)


def test_each_target_is_scraped_by_one_shard_of_about_equal_size() -> None:
    targets = tuple(TargetConfig(name=f"w{k}", url=f"http://10.0.{k >> 8}.{k & 255}") for k in range(2000))
    sizes: list[int] = []
    seen: set[str] = set()
    for shard in range(4):
        exporter = Exporter(ExporterConfig(targets=targets, shard=f"{shard}/4"))
        own = {target.name for target in exporter.targets}
        assert not own & seen
        assert exporter.fleet.worker_name("10.0.0.7:80") == "10.0.0.7:80"
        assert exporter.fleet.worker_name("10.0.0.7") == "w7"  # whichever shard scrapes it
        seen |= own
        sizes.append(len(own))
    assert len(seen) == 2000
    assert min(sizes) > 400


@pytest.mark.parametrize("given_shard", ["3/3", "a/b", "1", "-1/2", "1/0"])
def test_what_is_no_shard_is_refused(given_shard: str) -> None:
    with pytest.raises(ValueError, match="is not INDEX/COUNT"):
        split_shard(given_shard)
    with pytest.raises(ExporterError, match="shard: "):
        validated({"targets": [{"name": "a", "url": "h:1"}], "shard": given_shard}, "test")


async def test_a_shard_exports_sums_and_nothing_of_the_whole(make_target: MakeTarget) -> None:
    page = (
        'vllm:num_requests_running{{model_name="m",engine="0"}} {0}\nvllm:num_requests_waiting{{model_name="m",'
        'engine="0"}} 0\nvllm:prefix_cache_hits_total{{engine="0"}} {0}\n'
        'vllm:prefix_cache_queries_total{{engine="0"}} 9\n'
    )
    shown = {}
    for shard in (None, "0/2"):
        config = validated(
            {"targets": [{"name": "a", "url": "127.0.0.1:1"}], "listen": "127.0.0.1:0", "shard": shard}, "test"
        )
        async with running(config) as exporter, aiohttp.ClientSession() as session:
            exporter.targets[:] = [make_target(name, page.format(k), page.format(k)) for k, name in enumerate("ab", 3)]
            async with session.get(f"{exporter.url}/metrics") as answer:
                shown[shard] = {line.split()[2] for line in (await answer.text()).splitlines() if "# TYPE" in line}
    hidden = shown[None] - shown["0/2"]
    assert hidden
    assert hidden <= OF_THE_WHOLE_FLEET
    assert {"prefixwatch_worker_load_requests", "prefixwatch_prefix_hit_tokens_total"} <= shown["0/2"]
