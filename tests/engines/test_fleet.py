"""Fleets start and stop as one; the engines here are stand-ins that only answer the health check."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from prefixwatch.engines import fleet
from prefixwatch.engines.errors import EngineError
from prefixwatch.engines.process import ProcessFailed, group_members
from prefixwatch.engines.vllm import install as vllm_cpu

ENGINE = f"""#!{sys.executable}
import http.server, json, sys
arguments = sys.argv[1:]
name = json.loads(arguments[arguments.index("--kv-events-config") + 1])["topic"]
if name in arguments[arguments.index("--served-model-name") + 1]:
    sys.exit(f"{{name}} has no memory")
class Handler(http.server.BaseHTTPRequestHandler):
    resets = 0
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def do_POST(self):
        Handler.resets += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({{"success": Handler.resets > 1 and "busy" not in str(arguments)}}).encode())
    def log_message(self, *args): pass
port = int(arguments[arguments.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tmp_path / "vllm" / "bin" / "python"
    engine.parent.mkdir(parents=True)
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    monkeypatch.setattr(vllm_cpu, "require", lambda: vllm_cpu.VllmStatus(True, tmp_path / "vllm"))


async def test_engines_start_answer_and_stop(tmp_path: Path) -> None:
    handles = await fleet.start_vllm(2, tmp_path / "model", tmp_path / "logs")
    try:
        assert [handle.name for handle in handles] == ["vllm-0", "vllm-1"]
        assert len({handle.url for handle in handles} | {handle.kv_events_endpoint for handle in handles}) == 4
        assert all(handle.block_size == 32 and handle.kind == "vllm" for handle in handles)
        assert all(len(handle.replay_endpoint.removeprefix("ipc://")) <= 100 for handle in handles)
        await fleet.reset_caches(handles)
    finally:
        await fleet.stop(handles)
    assert not any(handle.process.alive for handle in handles)
    await fleet.stop(handles)


async def test_a_killed_engine_comes_back_where_it_was(tmp_path: Path) -> None:
    [before] = await fleet.start_vllm(1, tmp_path / "model", tmp_path / "logs")
    before.process.kill()
    after = await fleet.restart(before)
    try:
        assert (after.url, after.kv_events) == (before.url, before.kv_events)
        assert after.process.pid != before.process.pid
        assert (before.process.alive, after.process.alive) == (False, True)
        await fleet.reset_caches([after])
    finally:
        await fleet.stop([after])


async def test_one_that_dies_takes_the_others_along_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match=r"(?s)vllm-1 ended with exit code 1 before .*kv@vllm-1 has no memory"):
        await fleet.start_vllm(3, tmp_path, tmp_path / "logs", served_model_name="fails: kv@vllm-1")
    assert not [child for child in psutil.Process().children() if "--kv-events-config" in child.cmdline()]


async def test_a_busy_engine_is_asked_again_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_RESET_SECONDS", 0.3)
    handles = await fleet.start_vllm(1, tmp_path, tmp_path / "logs", served_model_name="busy")
    try:
        with pytest.raises(EngineError, match="vllm-0 can't empty its prefix cache: requests still hold blocks"):
            await fleet.reset_caches(handles)
        handles[0].process.kill()
        with pytest.raises(EngineError, match="vllm-0 can't empty its prefix cache: vllm-0 was killed by SIGKILL"):
            await fleet.reset_caches(handles)
    finally:
        await fleet.stop(handles)
    assert list(group_members(handles[0].process.pid)) == []


async def test_options_are_checked_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="vLLM engines have no option blocks; there are served_model_name, block_si"):
        await fleet.start_vllm(1, tmp_path, tmp_path, blocks=3)
    with pytest.raises(EngineError, match="simulated engine can't be configured so: max_num_seqs: Input should be gr"):
        await fleet.start_simulated(1, tmp_path, tmp_path, max_num_seqs=0)
    with pytest.raises(EngineError, match="configured so: capacity_blocks 1 × block_size 16 holds fewer tokens"):
        await fleet.start_simulated(1, tmp_path, tmp_path, capacity_blocks=1)
    with pytest.raises(EngineError, match="a fleet needs at least 1 engine, not 0"):
        await fleet.start_vllm(0, tmp_path, tmp_path)


async def test_socket_paths_must_be_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Long:
        name = "/tmp/" + "x" * 90

    monkeypatch.setattr(fleet, "_socket_dir", Long)
    with pytest.raises(EngineError, match="is too long a path for sockets: set TMPDIR to a shorter one"):
        await fleet.start_vllm(1, tmp_path, tmp_path)
