"""What the router adds to time to first token, and what relaying a chunk costs it.

One run, rounds in shuffled order: the same client asks a stamping server (20 ms to the first token, 10 ms gaps,
64 tokens) directly, through a bare aiohttp pass-through (the named baseline) and through the router under two
policies. Aim: p50 below 1 ms at 50 requests/s.

    python -m benchmarks.router_added_ttft [--rate 50] [--rounds 5] [--round-seconds 1] [--prompt-words 256]

`--beside COMMIT` adds the router of an earlier commit, from a copy in a temporary folder, with the same policies and
the same settings: all that came since is off by default. The last lines are then its CPU a request, as the median and
the range of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import uvloop

ROOT = Path(__file__).resolve().parents[1]
_WRITTEN = re.compile(rb'"content":"(\d+)"')
_DECISION = re.compile(rb"x-prefixwatch-decision-us: ([\d.]+)")
DIRECT, BASELINE = "direct", "aiohttp pass-through"
LEAD_SECONDS = 0.8
POLICIES = ("round_robin", "cache_aware")
CHUNKS = 64
"""Of an answer."""


@dataclass
class Samples:
    """Milliseconds from sending to the first content, and from an event's stamp to its arrival."""

    ttft_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    decision_ms: list[float] = field(default_factory=list)
    """As the router reports it: tokenise, hash, look up, choose."""
    chunks: int = 0
    """All that were relayed for `cpu_seconds`, those of the lead included."""
    cpu_seconds: float = 0.0
    cpu_per_request: list[float] = field(default_factory=list)
    """Seconds, one a round."""


class Client(asyncio.Protocol):
    """One connection's side of one request after another; stamps every read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.WriteTransport = transport  # type: ignore[assignment]  # what uvloop gives for TCP

    def ask(self, request: bytes, into: Samples) -> asyncio.Future[None]:
        self.samples = into
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = True
        self._tail = b""
        self._sent = time.monotonic_ns()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        for stamp in _WRITTEN.findall(data):
            self.samples.chunks += 1
            self.samples.late_ms.append((now - int(stamp)) / 1e6)
            if self._waiting:
                self._waiting = False
                self.samples.ttft_ms.append((now - self._sent) / 1e6)
        self.samples.decision_ms += [float(us) / 1e3 for us in _DECISION.findall(data)]
        self._tail = (self._tail + data)[-5:]
        if self._tail == b"0\r\n\r\n" and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionResetError("closed in mid-answer"))


async def one_round(url: str, rate: float, seconds: float, bodies: Iterator[bytes], samples: Samples) -> None:
    """Open loop with Poisson arrivals (even ones would keep in step with the 10 ms gaps and make all chunks
    coincide), each on an idle connection or a new one.

    Those of the first LEAD_SECONDS open the connections on both sides and aren't recorded.
    """
    address = urlsplit(url)
    host, port = address.hostname or "", address.port or 80
    idle: list[Client] = []
    loop = asyncio.get_running_loop()
    lead, gaps = Samples(), random.Random(3)

    async def ask(body: bytes, into: Samples) -> None:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        if idle:
            client = idle.pop()
        else:
            _, client = await loop.create_connection(Client, host, port)
        await client.ask(request, into)
        idle.append(client)

    due = loop.time()
    record_from = due + LEAD_SECONDS
    async with asyncio.TaskGroup() as group:
        while due < record_from + seconds:
            await asyncio.sleep(max(due - loop.time(), 0))
            group.create_task(ask(next(bodies), samples if due >= record_from else lead))
            due += gaps.expovariate(rate)
    samples.chunks += lead.chunks
    for client in idle:
        client.transport.close()


@contextmanager
def _process(*arguments: str, checkout: Path = ROOT) -> Iterator[tuple[str, psutil.Process]]:
    """A server in its own process: its address, from the port at the end of its first line, and the process."""
    command = [sys.executable, *arguments]
    path = os.pathsep.join(str(folder) for folder in (checkout / "src", checkout) if folder.is_dir())
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=checkout, env=environment) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip().rpartition(":")[2]
            if not port:
                raise SystemExit(f"{' '.join(arguments)} didn't start")
            yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
        finally:
            process.terminate()


def _bodies(words: int) -> Iterator[bytes]:
    """Conversations of this many words: three quarters are a system prompt that all share."""
    vocabulary = ["time", "way", "year", "work", "day", "man", "world", "life", "hand", "part"]
    random_words = random.Random(1)
    shared = {"role": "system", "content": " ".join(random_words.choices(vocabulary, k=words * 3 // 4))}
    while True:
        own = {"role": "user", "content": " ".join(random_words.choices(vocabulary, k=words // 4))}
        yield json.dumps({"model": "stamp", "stream": True, "max_tokens": CHUNKS, "messages": [shared, own]}).encode()


def _checkout(commit: str, folder: Path) -> Path:
    """The files of a commit, in this folder."""
    try:
        packed = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"--beside {commit}: {error.stderr.decode().strip()}; name a commit of this repository"
        ) from None
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")
    return folder


def _router_module(checkout: Path) -> str:
    """What starts the router there: its rooms were packages of their own once."""
    return "prefixwatch.router.serving.app" if (checkout / "src/prefixwatch").is_dir() else "router.app"


def measure(arguments: argparse.Namespace) -> dict[str, Samples]:
    """Start the servers and run all rounds."""
    from prefixwatch.engines.tiny_model import make_tiny_model  # noqa: PLC0415, found once the checkout is on the path

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = Path(folder) / "model"
        make_tiny_model(model)
        engine, _ = stack.enter_context(_process("benchmarks/stamping_server.py", "--ttft-ms", "20", "--itl-ms", "10"))
        targets: dict[str, tuple[str, psutil.Process | None]] = {DIRECT: (engine, None)}
        checkouts = {"router": ROOT}
        if arguments.beside:
            checkouts[arguments.beside] = _checkout(arguments.beside, Path(folder) / "earlier")
        targets[BASELINE] = stack.enter_context(_process("benchmarks/passthrough.py", "--target", engine))
        for policy in POLICIES:
            file = Path(folder) / f"{policy}.json"
            worker = {"name": "stamping", "url": engine}
            config = {"port": 0, "workers": [worker], "policy": {"name": policy}, "model_dir": str(model)}
            file.write_text(json.dumps(config))
            for name, checkout in checkouts.items():
                targets[f"{name} {policy}"] = stack.enter_context(
                    _process("-m", _router_module(checkout), "--config", str(file), checkout=checkout)
                )
        samples = {name: Samples() for name in targets}
        bodies, order = _bodies(arguments.prompt_words), random.Random(2)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            for _ in range(arguments.rounds):
                for name, (url, process) in order.sample(sorted(targets.items()), len(targets)):
                    into = samples[name]
                    cpu, chunks = sum(process.cpu_times()[:2]) if process else 0.0, into.chunks
                    runner.run(one_round(url, arguments.rate, arguments.round_seconds, bodies, into))
                    spent = sum(process.cpu_times()[:2]) - cpu if process else 0.0
                    into.cpu_seconds += spent
                    into.cpu_per_request.append(spent / ((into.chunks - chunks) / CHUNKS))
        return samples


def report(samples: dict[str, Samples]) -> None:
    """Added time against direct, and its ratio to the baseline's."""
    direct, baseline = samples[DIRECT], samples[BASELINE]

    def added(of: Samples, percentile: float) -> float:
        return float(np.percentile(of.ttft_ms, percentile) - np.percentile(direct.ttft_ms, percentile))

    columns = ("TTFT p50", "added p50", "added p99", "ratio p50", "decision", "late p50", "CPU/chunk")
    print(" " * 22 + "".join(f"{column:>11}" for column in columns))
    for name, of in samples.items():
        ttft, late = np.percentile(of.ttft_ms, 50), np.percentile(of.late_ms, 50)
        ratio = f"{added(of, 50) / added(baseline, 50):.2f}x" if name != DIRECT else ""
        decision = f"{np.percentile(of.decision_ms, 50):.2f}ms" if of.decision_ms else ""
        cpu = f"{of.cpu_seconds / of.chunks * 1e6:.0f}us" if of.cpu_seconds else ""
        times = f"{ttft:9.2f}ms{added(of, 50):9.2f}ms{added(of, 99):9.2f}ms"
        print(f"{name:22}{times}{ratio:>11}{decision:>11}{late:9.2f}ms{cpu:>11}")
    print(f"ratio: added p50 to that of the baseline '{BASELINE}' in this run; {len(direct.ttft_ms)} requests each")


def report_beside(samples: dict[str, Samples], commit: str) -> None:
    """This router's CPU a request over that of the earlier one, by policy."""
    for policy in POLICIES:
        now, then = samples[f"router {policy}"].cpu_per_request, samples[f"{commit} {policy}"].cpu_per_request
        ratios = [after / before for after, before in zip(now, then, strict=True)]
        print(
            f"{policy}: CPU a request {np.median(now) * 1e3:.2f} ms, at {commit} {np.median(then) * 1e3:.2f} ms: "
            f"{np.median(ratios):.2f}x, {min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} rounds"
        )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=50.0, help="requests per second")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-seconds", type=float, default=1.0)
    parser.add_argument("--prompt-words", type=int, default=256)
    parser.add_argument("--beside", metavar="COMMIT", help="an earlier commit, whose router is measured in turns")
    arguments = parser.parse_args()
    measured = measure(arguments)
    report(measured)
    if arguments.beside:
        report_beside(measured, arguments.beside)
