"""A fleet with one hostile or broken target among good ones, over real sockets.

Whatever it does: the good ones' numbers are right, their scrapes are on time, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
import gzip
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import psutil
import pytest

from prefixwatch.exporters.config import ExporterConfig, Limits, TargetConfig
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.target import Target

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]

INTERVAL_SECONDS = 0.1
TIMEOUT_SECONDS = 0.4
PATIENT_SECONDS = 2.0
"""Where nothing hangs: time that a busy machine may need for a page of megabytes."""
LIMITS = Limits(body_bytes=5_000_000, samples=2_000, lines=150_000)
GROWTH_PER_SCRAPE = 40


def page(step: int) -> bytes:
    labels = 'engine="0",model_name="m"'
    return (
        f"vllm:prefix_cache_queries_total{{{labels}}} {1000 + GROWTH_PER_SCRAPE * step}\n"
        f"vllm:prefix_cache_hits_total{{{labels}}} {500 + GROWTH_PER_SCRAPE // 4 * step}\n"
        f"vllm:num_requests_running{{{labels}}} 1\nvllm:num_requests_waiting{{{labels}}} 0\n"
    ).encode()


def whole(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def only(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    """An answer after which the client leaves."""
    return whole(body, status, f"{headers}Connection: close\r\n")


@asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[str]:
    """A server that reads one request's head a connection, then does as it likes."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"
    server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def sends(*pieces: bytes, every_seconds: float = 0.0) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(every_seconds)
        await reader.read()  # the client leaves when it has read what it wants: who cuts earlier makes a reset of it

    return answer


@dataclass
class Good:
    """A well-behaved engine; remembers when it was asked."""

    asked: list[float] = field(default_factory=list)
    asked_often: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            self.asked.append(time.monotonic())
            if len(self.asked) > 2 + TIMEOUT_SECONDS / INTERVAL_SECONDS:
                self.asked_often.set()
            writer.write(whole(page(len(self.asked))))
            await reader.readuntil(b"\r\n\r\n")


async def never(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def resets(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + page(1))
    await writer.drain()


async def pours(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """100 MB, without saying so."""
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    for _piece in range(100):
        writer.write(b"vllm:num_requests_running 1\n" * 37_500)
        await writer.drain()


async def redirects(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(b"", "302 Found", "Location: /metrics\r\nConnection: close\r\n"))
    await writer.drain()


def many_samples() -> bytes:
    return b"\n".join(b'vllm:num_requests_running{engine="%d"} 1' % i for i in range(90_000)) + b"\n"


FAULTS: dict[str, tuple[Answer, str]] = {
    "reset mid-body": (resets, "reset"),
    "stalled headers": (never, "timeout"),
    "headers that never end": (sends(b"HTTP/1.1 200 OK\r\n", *[b"X-A: b\r\n"] * 50, every_seconds=0.02), "timeout"),
    "one byte at a time": (sends(whole(page(1))[:60], *[b"1"] * 100, every_seconds=0.02), "timeout"),
    "headers without end": (sends(b"HTTP/1.1 200 OK\r\nX-A: " + b"b" * 100_000 + b"\r\n\r\n"), "bad_http"),
    "no HTTP": (sends(b"SSH-2.0-OpenSSH_9.2\r\n"), "bad_http"),
    "500 while inference works": (sends(only(b"Internal Server Error", "500 Internal Server Error")), "http_500"),
    "HTML": (sends(only(b"<!DOCTYPE html><html><body>Sign in</body></html>")), "not_metrics"),
    "JSON list": (sends(only(b"[]")), "not_metrics"),
    "gzip bomb": (
        sends(
            only(gzip.compress(b"vllm:num_requests_running 1\n" * 4_000_000, 1), headers="Content-Encoding: gzip\r\n")
        ),
        "too_large",
    ),
    "100 MB": (pours, "too_large"),
    "100 MB, announced": (sends(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n"), "too_large"),
    "redirects to itself": (redirects, "redirects"),
    "many samples": (sends(only(many_samples())), "too_many_samples"),
    "a million samples": (sends(only(b"a 1\n" * 1_000_000)), "too_many_lines"),
    "another program": (sends(only(b"go_goroutines 7\n")), "unknown_system"),
    "NUL bytes": (sends(only(b"\0" * 100_000)), "not_metrics"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_faulty_target_leaves_the_others_right_and_on_time(fault: str) -> None:
    """vllm-project/vllm#49983 (EM17), sgl-project/sglang#28163 (EM18), vllm-project/aibrix#2004 (EM23)."""
    answer, reason = FAULTS[fault]
    good = Good()
    process = psutil.Process()
    async with listening(good.answer) as good_url, listening(answer) as bad_url:
        targets = (TargetConfig(name="bad", url=bad_url), TargetConfig(name="good", url=good_url))
        timeout = TIMEOUT_SECONDS if reason == "timeout" else PATIENT_SECONDS
        settings = {"interval_seconds": INTERVAL_SECONDS, "timeout_seconds": timeout, "limits": LIMITS}
        exporter = Exporter(ExporterConfig.model_validate({"targets": targets, **settings}))
        await exporter.open()
        bad, fine = exporter.targets
        before = process.memory_info().rss
        exporter.keep_scraping()
        await asyncio.wait_for(good.asked_often.wait(), 20)
        grown_bytes = process.memory_info().rss - before
        await exporter.close()
        assert bad.up is False
        assert (bad.reason, set(bad.health.failures)) == (reason, {reason})
        assert fine.numbers is not None
        assert fine.numbers.hit_ratio == pytest.approx(0.25)
        assert fine.health.failures.total() == 0
        on_time = sorted(later - earlier for earlier, later in zip(good.asked, good.asked[1:], strict=False))
        assert on_time[len(on_time) // 2] < (2 * INTERVAL_SECONDS if reason == "timeout" else PATIENT_SECONDS)
        assert grown_bytes < 64 * 2**20


async def test_nobody_listening_is_refused_and_costs_the_others_nothing() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{closed.getsockname()[1]}/metrics"
        async with listening(Good().answer) as url:
            targets = (TargetConfig(name="bad", url=gone), TargetConfig(name="good", url=url))
            exporter = Exporter(ExporterConfig(targets=targets))
            await exporter.open()
            await exporter.scrape_all()
            assert [target.reason for target in exporter.targets] == ["refused", ""]
            await exporter.close()


async def test_all_targets_together_have_a_limit() -> None:
    """Twenty targets that send without end: no more than the total is ever held."""
    async with listening(pours) as url:
        targets = tuple(TargetConfig(name=str(i), url=f"{url}?{i}") for i in range(20))
        limits = Limits(body_bytes=4_000_000, total_body_bytes=6_000_000)
        exporter = Exporter(ExporterConfig(targets=targets, limits=limits))
        await exporter.open()
        before = psutil.Process().memory_info().rss
        await exporter.scrape_all()
        assert {target.reason for target in exporter.targets} <= {"too_large", "overloaded"}
        assert "overloaded" in {target.reason for target in exporter.targets}
        assert psutil.Process().memory_info().rss - before < 64 * 2**20
        await exporter.close()


MakeTarget = Callable[..., Target]


def queries(target: Target) -> float | None:
    return target.store.total("prefix_query_tokens") if target.store else None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-5", "-Inf"])
def test_a_counter_that_no_counter_can_be_changes_nothing(make_target: MakeTarget, value: str) -> None:
    text = "vllm:prefix_cache_queries_total {}\nvllm:prefix_cache_hits_total 1\n"
    target = make_target("a", text.format(100), text.format(value), text.format(130))
    assert target.up
    assert queries(target) == 130
    assert target.store is not None
    assert target.store.resets == 0


def test_the_first_of_duplicate_series_counts_and_is_flagged(make_target: MakeTarget) -> None:
    target = make_target("a", "vllm:prefix_cache_queries_total 100\nvllm:prefix_cache_queries_total 900\n")
    assert queries(target) == 100
    assert target.flags(0.0)["duplicate_series"]


def test_a_label_that_is_too_long_is_left_out_and_the_rest_is_read(make_target: MakeTarget) -> None:
    long = "x" * 5000
    target = make_target("a", f'vllm:num_requests_running{{engine="{long}"}} 1\nvllm:prefix_cache_queries_total 7\n')
    assert (queries(target), target.health.malformed_lines) == (7, 1)


def test_an_engine_that_restarts_begins_a_new_window_and_its_total_goes_on(make_target: MakeTarget) -> None:
    text = "vllm:prefix_cache_queries_total {}\nvllm:prefix_cache_hits_total {}\n"
    target = make_target("a", text.format(100, 50), text.format(200, 60), text.format(10, 9))
    assert queries(target) == 210
    assert target.numbers is not None
    assert target.numbers.window_seconds is None


def test_a_clock_that_jumps_leaves_windows_as_they_are(make_target: MakeTarget) -> None:
    """Windows are taken by the exporter's monotonic clock; what the target says of time has no say."""
    text = "vllm:prefix_cache_queries_total {} {}\nvllm:prefix_cache_hits_total {} {}\n"
    target = make_target("a", text.format(100, 1_700_000_000_000, 50, 1), text.format(200, 5, 60, -7))
    assert target.numbers is not None
    assert (target.numbers.window_seconds, target.numbers.hit_ratio) == (5.0, 0.1)


def test_a_window_of_no_length_is_none(make_target: MakeTarget) -> None:
    target = make_target("a", "vllm:prefix_cache_queries_total 1\n")
    target.ingest(Scrape(0.01, b"vllm:prefix_cache_queries_total 5\n"), 0.0)
    assert target.numbers is not None
    assert target.numbers.window_seconds is None
