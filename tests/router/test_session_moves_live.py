"""The live router moves sessions on drain and death, with prices in its records; each miss has its three parts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from prefixwatch.kvcache.request_record import RequestRecord
from prefixwatch.router.errors import RouterError
from prefixwatch.router.records.miss_cost import MissCosts
from tests.router.conftest import Client, Start
from tests.router.fake_engine import DONE, FakeEngine, Out, delta, usage

MOVES = {"enabled": True, "kv_bytes_per_token": 1000, "link_gbit_per_second": 100, "link_latency_seconds": 0.0}


def answers(engine: FakeEngine) -> None:
    """Every prompt's tokens take 0.1 ms each; nothing is cached."""

    async def answer(out: Out) -> None:
        body = json.loads(engine.bodies[-1])
        tokens = len(body["messages"][0]["content"]) + 17
        await asyncio.sleep(tokens * 1e-4)
        await out.stream(delta("x"), usage(prompt=tokens, cached=0), DONE)

    engine.behaviour = answer


async def ask(client: Client, session: str, letters: int = 200) -> dict[str, str]:
    async with client.chat(session[-1] * letters, headers={"x-session-id": session}) as answer:
        await answer.read()
        return {name.lower(): value for name, value in answer.headers.items()}


async def records(client: Client) -> list[RequestRecord]:
    await client.settled()
    return list(client.router.request_log.page(0).records)


async def drain(client: Client, name: str, query: str = "") -> Any:
    async with client.session.post(f"{client.url}/router/workers/{name}/drain{query}") as answer:
        return answer.status, await answer.json()


@pytest.fixture
async def client(engines: list[FakeEngine], start: Start) -> Client:
    for engine in engines:
        answers(engine)
    found: Client = await start(engines, policy="session", moves=MOVES)
    for number in range(12):
        await ask(found, f"s{number}", 100 + 40 * number)
    return found


async def test_a_drain_moves_the_workers_sessions_hard_where_nothing_connects_the_engines(client: Client) -> None:
    before = {record.session: record.worker for record in await records(client)}
    at_a = sum(worker == "a" for worker in before.values())

    status, answer = await drain(client, "a", "?reason=scale_in")

    assert status == 200
    assert answer["moves"] == {"sessions": at_a, "hard": at_a, "why": {"no_connector": at_a}}
    assert client.value("session_moves_total", trigger="scale_in", kind="hard", why="no_connector") == at_a
    for number in range(12):
        headers = await ask(client, f"s{number}", 100 + 40 * number)
        assert headers["x-prefixwatch-worker"] == "b"
    later = (await records(client))[12:]
    moved = [record for record in later if record.move]
    assert {record.session for record in moved} == {name for name, worker in before.items() if worker == "a"}
    for record in moved:
        assert (record.move, record.move_why, record.move_trigger) == ("hard", "no_connector", "scale_in")
        assert record.reason == "moved_hard"
        assert record.move_soft_seconds is None
        assert record.move_hard_seconds is not None
        assert record.move_hard_seconds > 0
    assert (await drain(client, "a"))[1].get("moves") is None  # it drains already


async def test_between_workers_of_one_store_a_move_is_soft(engines: list[FakeEngine], start: Start) -> None:
    for engine in engines:
        answers(engine)
    workers = [{"name": engine.name, "url": engine.url, "kv_store": "folder"} for engine in engines]
    client: Client = await start(engines, policy="session", moves=MOVES, workers=workers)
    for number in range(12):
        await ask(client, f"s{number}", 100 + 40 * number)
    _, answer = await drain(client, "a")
    assert answer["moves"]["why"] == {"blocks_sooner": answer["moves"]["soft"]}
    kinds = [(await ask(client, f"s{k}", 100 + 40 * k)).get("x-prefixwatch-move") for k in range(12)]
    assert kinds.count("soft") == answer["moves"]["sessions"]
    record = next(record for record in await records(client) if record.move)
    assert record.move == "soft"
    assert record.move_soft_seconds is not None
    assert record.move_hard_seconds is not None
    assert record.move_soft_seconds < record.move_hard_seconds


async def test_a_dead_workers_sessions_move_when_they_come_back(client: Client, engines: list[FakeEngine]) -> None:
    at_a = {record.session for record in await records(client) if record.worker == "a"}
    await engines[0].stop()
    for number in range(12):
        await ask(client, f"s{number}", 100 + 40 * number)
    later = (await records(client))[12:]
    deaths = [record for record in later if record.move_trigger == "death"]
    assert {record.move_why for record in deaths} == {"source_dead"}
    retried = {record.session for record in later if record.retries}
    assert {record.session for record in deaths} | retried == at_a


async def test_the_parts_of_a_miss_add_up_to_its_ttft_and_are_absent_at_first(client: Client) -> None:
    for number in range(4):
        headers = await ask(client, f"t{number}", 300)
    assert float(headers["x-prefixwatch-prefill-s"]) == pytest.approx(317e-4, rel=1)
    found = await records(client)
    assert found[0].miss_prefill_seconds is None
    for record in found[8:]:
        parts = record.miss_prefill_seconds, record.miss_queue_seconds, record.miss_migrate_seconds
        assert None not in parts
        assert sum(part for part in parts if part is not None) == pytest.approx(record.ttft_seconds)
        assert min(part for part in parts if part is not None) >= 0


async def test_a_wrong_reason_to_drain_names_those_that_there_are(client: Client) -> None:
    status, answer = await drain(client, "a", "?reason=tired")
    assert status == 400
    assert answer["error"]["message"] == "reason='tired' is not a reason to drain: give drain or scale_in"


async def test_moves_need_a_view_of_the_caches(engines: list[FakeEngine], start: Start) -> None:
    with pytest.raises(RouterError, match="moves are priced by what workers hold"):
        await start(engines, moves=MOVES, cache_view={"source": "none"})


async def test_without_moves_a_drain_answers_as_before(engines: list[FakeEngine], start: Start) -> None:
    client: Client = await start(engines)
    assert (await drain(client, "a"))[1] == {"name": "a", "draining": True, "in_flight": 0}
    assert MissCosts()._seconds("a", 100) is None
