"""Connections that are kept, and those that the other side didn't keep, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from prefixwatch.exporters.http.connection import Overloaded, Receiving
from prefixwatch.exporters.http.page_client import CannotConnect, PageClient
from prefixwatch.exporters.http.response import Answer

PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nload 1\n"
LIMIT_BYTES = 1_000

Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Remembers what it was asked, connection by connection."""

    def __init__(self) -> None:
        self.host = self.url = ""
        self.requests: list[list[bytes]] = []
        self.closed = asyncio.Event()


@asynccontextmanager
async def serving(speak: Speak) -> AsyncIterator[Server]:
    """`speak` is called for each request, and may close the connection."""
    server = Server()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked: list[bytes] = []
        server.requests.append(asked)
        try:
            while not writer.is_closing():
                asked.append(await reader.readuntil(b"\r\n\r\n"))
                await speak(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            server.closed.set()
        finally:
            writer.close()

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    server.host = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    server.url = f"http://{server.host}/metrics?a=b%20c"
    yield server
    listener.close()


async def get(client: PageClient, url: str, headers: dict[str, str], *, seconds: float = 5.0) -> Answer:
    return await client.get(url, headers, LIMIT_BYTES, asyncio.get_running_loop().time() + seconds)


@pytest.fixture
async def client() -> AsyncIterator[PageClient]:
    one = PageClient(Receiving(10_000), keep_connection_seconds=60.0)
    yield one
    await one.close()


async def answers(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(PAGE)


async def test_a_connection_is_used_again(client: PageClient) -> None:
    async with serving(answers) as server:
        for _ in range(3):
            assert (await get(client, server.url, {"Accept": "text/plain"})).body == b"load 1\n"
        request = f"GET /metrics?a=b%20c HTTP/1.1\r\nHost: {server.host}\r\nAccept: text/plain\r\n\r\n"
        assert server.requests == [[request.encode()] * 3]


async def test_a_kept_connection_that_the_target_closed_costs_no_page(client: PageClient) -> None:
    """An engine that restarted, or drops idle connections, between two scrapes is not a failed scrape."""
    asked = 0

    async def answers_then_hangs_up_on_the_next(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            writer.transport.abort()
        else:
            writer.write(PAGE)

    async with serving(answers_then_hangs_up_on_the_next) as server:
        for _ in range(2):
            assert (await get(client, server.url, {})).body == b"load 1\n"
        assert [len(requests) for requests in server.requests] == [2, 1]


async def test_a_target_that_hangs_up_on_a_new_connection_is_not_asked_twice(client: PageClient) -> None:
    async def hangs_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with serving(hangs_up) as server:
        with pytest.raises(ConnectionResetError):
            await get(client, server.url, {})
        assert [len(requests) for requests in server.requests] == [1]


async def test_an_idle_connection_is_closed_in_time() -> None:
    client = PageClient(Receiving(10_000), keep_connection_seconds=0.02)
    async with serving(answers) as server:
        await get(client, server.url, {})
        await asyncio.wait_for(server.closed.wait(), 20)
    await client.close()


async def test_an_answer_that_nobody_asked_for_is_never_taken_for_one(client: PageClient) -> None:
    async def answers_twice(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(PAGE + PAGE.replace(b"1\n", b"9\n"))

    async with serving(answers_twice) as server:
        for _ in range(2):
            assert (await get(client, server.url, {})).body == b"load 1\n"
        assert len(server.requests) == 2


async def test_a_request_that_is_given_up_takes_its_connection_with_it(client: PageClient) -> None:
    """Its answer may still come: nobody else must get it."""

    asked = asyncio.Event()

    async def says_nothing(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        raise ConnectionResetError

    async with serving(says_nothing) as server:
        asking = asyncio.create_task(get(client, server.url, {}))
        await asyncio.wait_for(asked.wait(), 20)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(server.closed.wait(), 20)


async def test_all_answers_together_have_a_limit_and_give_back_what_they_held() -> None:
    receiving = Receiving(len(PAGE) - 1)
    client = PageClient(receiving, 60.0)
    async with serving(answers) as server:
        with pytest.raises(Overloaded):
            await get(client, server.url, {})
        assert receiving.held_bytes == 0
        receiving.most_bytes = len(PAGE)
        assert (await get(client, server.url, {})).status == 200
        assert receiving.held_bytes == 0
    await client.close()


async def test_the_login_in_an_address_is_sent_as_basic_authentication(client: PageClient) -> None:
    async with serving(answers) as server:
        url = server.url.replace("://", "://sre:p%C3%A4%3Ass@")
        await get(client, url, {})
        assert b"\r\nAuthorization: Basic c3JlOnDDpDpzcw==\r\n" in server.requests[0][0]
        with pytest.raises(ValueError, match="beside the target's authentication"):
            await get(client, url, {"Authorization": "Bearer t"})


@pytest.mark.parametrize("url", ["http://h/a b", "http://h/a\r\nX: y", "ftp://h/", "/metrics"])
async def test_an_address_that_cannot_be_sent_is_refused(client: PageClient, url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        await get(client, url, {})


async def test_a_header_with_a_line_break_is_refused(client: PageClient) -> None:
    with pytest.raises(ValueError, match="control character"):
        await get(client, "http://h/", {"X-A": "b\r\nX-B: c"})


async def test_a_name_that_nobody_knows_cannot_be_connected_to(client: PageClient) -> None:
    with pytest.raises(CannotConnect):
        await get(client, "http://nobody.invalid/metrics", {})
