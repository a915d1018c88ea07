"""How far the load generator's TTFT is from the truth, and what a chunk costs it, against a bare aiohttp client.

    python benchmarks/loadgen_ttft_error.py [--seconds 8] [--streams 32 128 512]

A stamping server (TTFT 50 ms, 20 ms between chunks, 64 chunks an answer) says when it read each request and when
it wrote the first token; error = (first token − sent, as the client has it) − (written − read, as the server has
it). Closed loop, each client in its own process, one after the other. The baseline is aiohttp with uvloop and
one JSON decode a chunk. On a busy machine, run it under `chrt -r 20`: all of it then goes ahead of other work.
Aim: error p99 at most 1.2 ms at 128 streams and 5 ms at 512, CPU a chunk at most 0.6 of the baseline's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WARM_SECONDS = 2.0
CHUNKS = 64
BODY = json.dumps(
    {
        "model": "stamp",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": CHUNKS,
        "messages": [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 12}],
    }
).encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer in seconds of CLOCK_MONOTONIC, and the server's own two stamps in nanoseconds."""

    sent: float
    first_token: float
    end: float
    server_read_ns: int
    server_first_ns: int

    @property
    def error_ms(self) -> float:
        return (self.first_token - self.sent) * 1e3 - (self.server_first_ns - self.server_read_ns) / 1e6


@dataclass(frozen=True, slots=True)
class Window:
    """The measured stretch of a run, CLOCK_MONOTONIC, and this process's CPU seconds in it."""

    begin: float
    end: float
    cpu_seconds: float

    def chunks(self, answers: Sequence[Answer]) -> float:
        """Chunks that came within it. An answer's are evenly spaced, so one that lies partly within counts in part."""
        first, last = (np.array([getattr(answer, name) for answer in answers]) for name in ("first_token", "end"))
        within = np.clip(np.minimum(last, self.end) - np.maximum(first, self.begin), 0.0, None)
        return float((CHUNKS * within / (last - first)).sum())


def gevent_client(url: str, streams: int, seconds: float) -> tuple[list[Answer], Window]:
    """The load generator's client, from WARM_SECONDS on."""
    import gevent  # noqa: PLC0415, only this client's process may load gevent

    from prefixwatch.loadgen.client.http_client import HttpClient, Target  # noqa: PLC0415
    from prefixwatch.loadgen.scenario.model import Timeouts  # noqa: PLC0415

    client = HttpClient(Target.parse(url), Timeouts())
    head = client.head("/v1/chat/completions", {})
    answers: list[Answer] = []
    start = time.monotonic()
    stop = start + WARM_SECONDS + seconds

    def stream(delay: float) -> None:
        gevent.sleep(delay)
        while time.monotonic() < stop:
            got = client.post(head, BODY)
            if got.first_token is None or got.end is None:
                raise SystemExit(f"the stamping server failed: {got.error}")
            read_ns, first_ns = json.loads(got.first_event_data)["srv"]
            answers.append(Answer(got.sent, got.first_token, got.end, read_ns, first_ns))

    greenlets = [gevent.spawn(stream, WARM_SECONDS * i / streams / 1.5) for i in range(streams)]
    gevent.sleep(WARM_SECONDS)
    begin, cpu = time.monotonic(), time.process_time()
    gevent.sleep(seconds)
    window = Window(begin, time.monotonic(), time.process_time() - cpu)
    gevent.joinall(greenlets, raise_error=True)
    return answers, window


async def aiohttp_client(url: str, streams: int, seconds: float) -> tuple[list[Answer], Window]:
    """The baseline: what one writes with aiohttp in a page of code, without its connection limit."""
    import aiohttp  # noqa: PLC0415, only this client's process may load it

    answers: list[Answer] = []
    stop = time.monotonic() + WARM_SECONDS + seconds

    async def one(session: aiohttp.ClientSession) -> None:
        sent, first, stamps, buffer = time.monotonic(), 0.0, [0, 0], b""
        async with session.post(url + "/v1/chat/completions", data=BODY) as response:
            async for data in response.content.iter_any():
                now = time.monotonic()
                *events, buffer = (buffer + data).split(b"\n\n")
                for event in events:
                    if event == b"data: [DONE]":
                        continue
                    chunk = json.loads(event[6:])
                    if not first and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                        first, stamps = now, chunk["srv"]
        answers.append(Answer(sent, first, time.monotonic(), *stamps))

    async def stream(session: aiohttp.ClientSession, delay: float) -> None:
        await asyncio.sleep(delay)
        while time.monotonic() < stop:
            await one(session)

    connector = aiohttp.TCPConnector(limit=0)
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        tasks = [asyncio.create_task(stream(session, WARM_SECONDS * i / streams / 1.5)) for i in range(streams)]
        await asyncio.sleep(WARM_SECONDS)
        begin, cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(seconds)
        window = Window(begin, time.monotonic(), time.process_time() - cpu)
        await asyncio.gather(*tasks)
    return answers, window


def run_client(name: str, url: str, streams: int, seconds: float, stamps: Path | None = None) -> dict[str, float]:
    """Run one client in this process and sum it up; `stamps` gets (sent, first token) of every answer."""
    if name == "loadgen":
        answers, window = gevent_client(url, streams, seconds)
    else:
        import uvloop  # noqa: PLC0415, not for the gevent process

        answers, window = uvloop.run(aiohttp_client(url, streams, seconds))
    if stamps is not None:
        stamps.write_text(json.dumps([(answer.sent, answer.first_token) for answer in answers]))
    chunks = window.chunks(answers)
    p50, p99 = np.quantile([answer.error_ms for answer in answers if answer.sent >= window.begin], (0.5, 0.99))
    return {
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "cpu_us": window.cpu_seconds / chunks * 1e6,
        "chunks_s": chunks / (window.end - window.begin),
    }


def compare(streams_list: list[int], seconds: float) -> None:
    """All clients at all levels against one server; prints a line each and the ratios."""
    here = Path(__file__).resolve()
    command = [sys.executable, str(here.parent / "stamping_server.py")]
    command += ["--ttft-ms", "50", "--itl-ms", "20", "--chunks", str(CHUNKS)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().split()[-1]
    print(
        f"{'streams':>7} {'client':>8} {'error p50 ms':>13} {'error p99 ms':>13} {'CPU us/chunk':>13} {'chunks/s':>9}"
    )
    try:
        for streams in streams_list:
            rows = {}
            for name in ("aiohttp", "loadgen"):
                arguments = ["--client", name, "--url", url, "--streams", str(streams), "--seconds", str(seconds)]
                answer = subprocess.run(
                    [sys.executable, str(here), *arguments],
                    check=True,
                    capture_output=True,
                    text=True,
                    cwd=here.parents[1],
                )
                row = rows[name] = json.loads(answer.stdout)
                figures = f"{row['p50_ms']:13.2f} {row['p99_ms']:13.2f} {row['cpu_us']:13.1f} {row['chunks_s']:9.0f}"
                print(f"{streams:7d} {name:>8} {figures}", flush=True)
            ours, base = rows["loadgen"], rows["aiohttp"]
            print(
                f"{streams:7d} {'ratio':>8} {ours['p50_ms'] / base['p50_ms']:13.2f} "
                f"{ours['p99_ms'] / base['p99_ms']:13.2f} {ours['cpu_us'] / base['cpu_us']:13.2f}",
                flush=True,
            )
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 128, 512], help="concurrent streams")
    parser.add_argument("--seconds", type=float, default=8.0, help="measured time a client and level")
    parser.add_argument("--client", choices=("loadgen", "aiohttp"), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--stamps", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        print(json.dumps(run_client(options.client, options.url, options.streams[0], options.seconds, options.stamps)))
    else:
        compare(options.streams, options.seconds)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
