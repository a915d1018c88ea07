"""The load generator against its peers: GuideLLM, AIPerf, inference-perf and a bare aiohttp client, in one run.

    scripts/install-bench-peers && python -m benchmarks.loadgen_peers [--levels 32 128 512] [--seconds 8]

Every client streams from the same stamping server (TTFT 50 ms, 20 ms between chunks, 64 chunks an answer), one client
after the other: in a closed loop at each concurrency, or, this project's whole tool, at the even rate that keeps as
many streams open. `loadgen-client` is its HTTP client alone, in a loop as bare as aiohttp's. TTFT error is what the
client's own report says of a request minus what the server stamped for it (request read to first event sent); a
report's wall-clock starts are matched to the server's stamps in time.

All figures are of the window from WARM_SECONDS after the first request to the last request's start: how a tool starts,
ramps up and ends is not in them. CPU and memory are those of the client's whole process tree, sampled from outside.
An answer that lies only partly in the window counts in part.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow.parquet as pq
import yaml

from prefixwatch.engines.tiny_model import make_tiny_model

CHUNKS = 64
ERROR_LIMIT_MS = 5.0
ANSWER_SECONDS = 0.05 + 0.02 * (CHUNKS - 1)
SAMPLE_SECONDS = 0.1
WARM_SECONDS = 2.0
TIMEOUT_SECONDS = 240.0
HERE = Path(__file__).resolve().parent

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Client:
    """How a client is started on a URL at a concurrency, and where its report says when each first token came.

    `read` answers (start, TTFT) by request in seconds, starts on the wall clock.
    """

    name: str
    command: Callable[[Setting], Sequence[str]]
    read: Callable[[Path], tuple[Floats, Floats]]
    own: bool = False
    """Runs from this checkout; the others are installed for the comparison."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One measurement: what is given to a client, and the folder for its files."""

    url: str
    streams: int
    seconds: float
    folder: Path
    model_dir: Path
    peers: Path


@dataclass(slots=True)
class Usage:
    """CPU seconds and memory of a process tree, sampled while it runs; those of ended children are kept."""

    at: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    rss_bytes: int = 0
    _last: dict[int, float] = field(default_factory=dict)

    def sample(self, root: psutil.Process) -> None:
        rss = 0
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):
                times = process.cpu_times()
                self._last[process.pid] = times.user + times.system
                rss += process.memory_info().rss
        self.at.append(time.monotonic())
        self.cpu_seconds.append(sum(self._last.values()))
        self.rss_bytes = max(self.rss_bytes, rss)

    def between(self, start: float, end: float) -> float:
        low, high = np.interp([start, end], self.at, self.cpu_seconds)
        return float(high - low)


def _guidellm(setting: Setting) -> list[str]:
    return [
        str(setting.peers / "guidellm/bin/guidellm"),
        *("run", "--backend", f"kind=openai_http,target={setting.url},model=stamp"),
        *("--profile", f"kind=concurrent,streams={setting.streams}"),
        *("--constraint", f"kind=max_duration,seconds={setting.seconds:g}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=110,output_tokens={CHUNKS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={setting.model_dir}"),
        *("--output", f"kind=json,path={setting.folder / 'report.json'}", "--disable-console"),
    ]


def _read_guidellm(folder: Path) -> tuple[Floats, Floats]:
    requests = json.loads((folder / "report.json").read_text())["benchmarks"][0]["requests"]["successful"]
    return (
        np.array([r["request_start_time"] for r in requests]),
        np.array([r["time_to_first_token_ms"] for r in requests]) / 1e3,
    )


def _aiperf(setting: Setting) -> list[str]:
    return [
        str(setting.peers / "aiperf/bin/aiperf"),
        *("profile", "-m", "stamp", "--url", setting.url, "--endpoint-type", "chat", "--streaming"),
        *("--concurrency", str(setting.streams), "--benchmark-duration", f"{setting.seconds:g}"),
        *("--benchmark-grace-period", "3", "--tokenizer", str(setting.model_dir), "--isl", "110"),
        *("--osl", str(CHUNKS), "--output-artifact-dir", str(setting.folder), "--export-level", "records"),
        *("--ui-type", "none"),
    ]


def _read_aiperf(folder: Path) -> tuple[Floats, Floats]:
    rows = [json.loads(line) for line in (folder / "profile_export.jsonl").read_text().splitlines()]
    good = [row for row in rows if not row.get("error")]
    return (
        np.array([row["metadata"]["request_start_ns"] for row in good]) / 1e9,
        np.array([row["metrics"]["time_to_first_token"]["value"] for row in good]) / 1e3,
    )


def _inference_perf(setting: Setting) -> list[str]:
    requests = int(setting.streams * (WARM_SECONDS + setting.seconds) / ANSWER_SECONDS)
    configuration = {
        "load": {
            "type": "concurrent",
            "num_workers": 1,
            "worker_max_concurrency": 2 * setting.streams,
            "worker_max_tcp_connections": 2 * setting.streams,
            "stages": [{"num_requests": requests, "concurrency_level": setting.streams}],
        },
        "api": {"type": "completion", "streaming": True},
        "server": {"type": "vllm", "model_name": "stamp", "base_url": setting.url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(setting.model_dir)},
        "data": {
            "type": "shared_prefix",
            "shared_prefix": {
                "num_groups": 1,
                "num_prompts_per_group": 10,
                "system_prompt_len": 10,
                "question_len": 100,
                "output_len": CHUNKS,
            },
        },
        "report": {"request_lifecycle": {"summary": True, "per_request": True}},
        "storage": {"local_storage": {"path": str(setting.folder)}},
    }
    file = setting.folder / "inference-perf.yaml"
    file.write_text(yaml.safe_dump(configuration))
    return [str(setting.peers / "inference-perf/bin/inference-perf"), "-c", str(file)]


def _read_inference_perf(folder: Path) -> tuple[Floats, Floats]:
    """Its times are on the monotonic clock."""
    rows = [r for r in json.loads((folder / "per_request_lifecycle_metrics.json").read_text()) if not r["error"]]
    starts = np.array([row["start_time"] for row in rows])
    first = np.array([row["info"]["response_metrics"]["chunk_times"][0] for row in rows])
    return starts + _wall_minus_monotonic(), first - starts


def _loadgen(setting: Setting) -> list[str]:
    scenario = {
        "name": "stamp",
        "duration_seconds": WARM_SECONDS + setting.seconds,
        "arrivals": {"kind": "constant", "rate_per_second": setting.streams / ANSWER_SECONDS},
        "groups": {"count": 1, "shared_tokens": 10, "unique_tokens": 100, "output_tokens": CHUNKS},
    }
    file = setting.folder / "scenario.yaml"
    file.write_text(yaml.safe_dump(scenario))
    run = {"target": setting.url, "model": "stamp", "model_dir": str(setting.model_dir), "scenario": str(file)}
    configuration = setting.folder / "run.json"
    configuration.write_text(json.dumps({**run, "out": str(setting.folder / "out")}))
    return [sys.executable, "-P", "-m", "prefixwatch.loadgen.run", "--config", str(configuration)]


def _read_loadgen(folder: Path) -> tuple[Floats, Floats]:
    """TTFT from the actual sending, as the peers have it; the log has lateness against the schedule besides."""
    zero = json.loads((folder / "out/run.json").read_text())["zero_unix_seconds"]
    log = pq.read_table(folder / "out/requests.parquet", columns=["sent_s", "first_token_s"])
    sent, first = (column.to_numpy() for column in log.columns)
    return sent + zero, first - sent


def _bare(name: str, which: str) -> Client:
    """This project's HTTP client, or aiohttp, as benchmarks/loadgen_ttft_error.py runs them."""

    def command(setting: Setting) -> list[str]:
        script = str(HERE / "loadgen_ttft_error.py")
        arguments = ["--client", which, "--url", setting.url, "--streams", str(setting.streams)]
        arguments += ["--seconds", f"{setting.seconds:g}", "--stamps", str(setting.folder / "stamps.json")]
        return [sys.executable, script, *arguments]

    def read(folder: Path) -> tuple[Floats, Floats]:
        stamps = np.array(json.loads((folder / "stamps.json").read_text()))
        return stamps[:, 0] + _wall_minus_monotonic(), stamps[:, 1] - stamps[:, 0]

    return Client(name, command, read, own=True)


CLIENTS = (
    _bare("aiohttp", "aiohttp"),
    _bare("loadgen-client", "loadgen"),
    Client("loadgen", _loadgen, _read_loadgen, own=True),
    Client("guidellm", _guidellm, _read_guidellm),
    Client("aiperf", _aiperf, _read_aiperf),
    Client("inference-perf", _inference_perf, _read_inference_perf),
)


def _wall_minus_monotonic() -> float:
    return time.time() - time.monotonic()


@contextmanager
def _server(log: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.stamping_server", "--ttft-ms", "50", "--itl-ms", "20"]
    process = subprocess.Popen(
        [*command, "--chunks", str(CHUNKS), "--log", str(log)], stdout=subprocess.PIPE, text=True, cwd=HERE.parent
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait()


def measure(client: Client, setting: Setting) -> dict[str, Any]:
    """One client at one concurrency; `error` instead of figures when it failed."""
    log, usage = setting.folder / "server.csv", Usage()
    started = time.monotonic()
    with _server(log) as url:
        setting = Setting(url, setting.streams, setting.seconds, setting.folder, setting.model_dir, setting.peers)
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent)} if client.own else None
        with (setting.folder / "client.log").open("wb") as output:
            process = subprocess.Popen(
                client.command(setting),
                stdout=output,
                stderr=output,
                cwd=setting.folder,
                env=environment,
                start_new_session=True,
            )
        watcher = threading.Thread(target=_watch, args=(process, usage))
        watcher.start()
        try:
            code = process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            watcher.join()
    served = np.loadtxt(log, delimiter=",", ndmin=2) / 1e9 if log.exists() and log.stat().st_size else None
    if code or served is None:
        return {"error": f"exit code {code}: see {setting.folder / 'client.log'}"}
    return _figures(client, setting, served[served[:, 0].argsort()], usage, started)


def _watch(process: subprocess.Popen[bytes], usage: Usage) -> None:
    with suppress(psutil.Error):
        root = psutil.Process(process.pid)
        while process.poll() is None:
            usage.sample(root)
            time.sleep(SAMPLE_SECONDS)


def _figures(client: Client, setting: Setting, served: Floats, usage: Usage, started: float) -> dict[str, Any]:
    starts, ttft = client.read(setting.folder)
    starts = starts - _wall_minus_monotonic()
    read, first, last = served.T
    begin, end = read[0] + WARM_SECONDS, read[-1]
    if end - begin < 1.0:
        return {"error": f"sent for {end - read[0]:.1f} s only: give more --seconds"}
    order = starts.argsort()
    starts, ttft = starts[order], ttft[order]
    place = _places(starts, read)
    error_ms = (ttft - (first - read)[place])[(begin <= starts) & (starts <= end)] * 1e3
    p50, p99 = np.quantile(error_ms, (0.5, 0.99)) if len(error_ms) else (np.nan, np.nan)
    cpu, seconds = usage.between(begin, end), end - begin
    streaming = np.clip(np.minimum(last, end) - np.maximum(read, begin), 0.0, None)
    chunks = CHUNKS * _parts_within(first, last, begin, end)
    return {
        "requests": len(ttft),
        "mean_streams": float(streaming.sum() / seconds),
        "error_p50_ms": float(p50),
        "error_p99_ms": float(p99),
        "requests_per_s": _parts_within(read, last, begin, end) / seconds,
        "chunks_per_s": chunks / seconds,
        "cpu_us_per_chunk": cpu / chunks * 1e6,
        "cores": cpu / seconds,
        "rss_mb": usage.rss_bytes / 2**20,
        "first_request_s": read[0] - started,
    }


def _places(starts: Floats, read: Floats) -> npt.NDArray[np.int64]:
    """By request the server's reading of it: the first that isn't an earlier request's, both ascending."""
    places, place = np.empty(len(starts), dtype=np.int64), -1
    for k, start in enumerate(starts - 0.001):  # the clocks of two reports may be a little apart
        place = min(max(place + 1, int(np.searchsorted(read, start))), len(read) - 1)
        places[k] = place
    return places


def _parts_within(starts: Floats, ends: Floats, begin: float, end: float) -> float:
    """How many of these stretches of time lie in the window; one that does only partly counts in part."""
    within = np.clip(np.minimum(ends, end) - np.maximum(starts, begin), 0.0, None)
    return float((within / (ends - starts)).sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+", default=[32, 64, 128, 256, 512], help="concurrent streams")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each client sends at each level")
    parser.add_argument("--clients", nargs="+", default=[c.name for c in CLIENTS], choices=[c.name for c in CLIENTS])
    parser.add_argument(
        "--peers", type=Path, default=HERE.parent / ".bench-peers", help="where the tools are installed"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    peers = options.peers.resolve()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        model_dir = make_tiny_model(Path(temporary) / "tiny", weights=True)
        for streams in options.levels:
            for client in (c for c in CLIENTS if c.name in options.clients):
                if not client.own and not (peers / client.name).is_dir():
                    print(f"{client.name}: not installed in {peers}: run scripts/install-bench-peers", flush=True)
                    continue
                folder = Path(temporary) / f"{client.name}-{streams}"
                folder.mkdir()
                found = measure(client, Setting("", streams, options.seconds, folder, model_dir, peers))
                rows.append({"client": client.name, "streams": streams, **found})
                print(_line(rows[-1]), flush=True)
    print(_best(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _line(row: dict[str, Any]) -> str:
    head = f"{row['streams']:5d} {row['client']:>15}"
    if "error" in row:
        return f"{head}  {row['error']}"
    return (
        f"{head}  TTFT error p50 {row['error_p50_ms']:8.2f} p99 {row['error_p99_ms']:8.2f} ms  "
        f"{row['mean_streams']:5.0f} open  {row['requests_per_s']:7.1f} req/s  {row['chunks_per_s']:7.0f} chunks/s  "
        f"{row['cpu_us_per_chunk']:7.1f} us CPU/chunk  {row['cores']:5.2f} cores  {row['rss_mb']:6.0f} MB  "
        f"first request after {row['first_request_s']:5.2f} s"
    )


def _best(rows: Sequence[dict[str, Any]]) -> str:
    """By client the highest rate with a p99 error within the limit, a core, and CPU against the bare client."""
    bare = {r["streams"]: r["cpu_us_per_chunk"] for r in rows if r["client"] == "aiohttp" and "error" not in r}
    lines = [f"\nhighest rate with TTFT error p99 < {ERROR_LIMIT_MS:g} ms:"]
    for name in dict.fromkeys(row["client"] for row in rows):
        own = [row for row in rows if row["client"] == name and "error" not in row]
        within = [row for row in own if row["error_p99_ms"] < ERROR_LIMIT_MS]
        ratios = ", ".join(
            f"{row['cpu_us_per_chunk'] / bare[row['streams']]:.2f} at {row['streams']}"
            for row in own
            if row["streams"] in bare
        )
        top = max(within, key=lambda row: float(row["requests_per_s"]), default=None)
        rate = (
            "none of these levels"
            if top is None
            else f"{top['requests_per_s']:.0f} req/s at {top['streams']} streams, "
            f"{top['requests_per_s'] / top['cores']:.0f} req/s a core"
        )
        lines.append(f"{name:>15}: {rate}; CPU a chunk / aiohttp's: {ratios}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
