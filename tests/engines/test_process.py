"""Managed processes: what is started is answered for, whatever happens to it or to us."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from prefixwatch.engines.guardian import groups_left
from prefixwatch.engines.process import (
    ManagedProcess,
    ProcessFailed,
    free_port,
    free_ports,
    group_members,
    stop_all,
)

SERVER = """
import http.server, os, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 503); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
PARENT_AND_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"

Start = Callable[..., ManagedProcess]


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[ManagedProcess] = []

    def run(code: str, *arguments: str) -> ManagedProcess:
        process = ManagedProcess("part", [sys.executable, "-c", code, *arguments], tmp_path / "logs" / "part.log")
        started.append(process)
        return process

    yield run
    for process in started:
        process.stop(grace_seconds=0)


def wait_for(condition: Callable[[], object], timeout_seconds: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


async def test_ready_when_the_url_answers_200(start: Start) -> None:
    port = free_port()
    process = start(SERVER, str(port))
    await process.wait_ready(f"http://127.0.0.1:{port}/ready", timeout_seconds=10)
    assert process.alive
    assert process.describe() == f"part is running (pid {process.pid})"


async def test_death_while_loading_quotes_the_log(start: Start) -> None:
    process = start("import sys; print('loading'); sys.exit('no such model')")
    with pytest.raises(ProcessFailed) as caught:
        await process.wait_ready(f"http://127.0.0.1:{free_port()}/", timeout_seconds=10)
    assert str(caught.value) == (
        f"part ended with exit code 1 before it was ready; the end of its log {process.log_file}:\n"
        "  loading\n  no such model"
    )


async def test_never_ready_says_what_the_url_answered(start: Start) -> None:
    port = free_port()
    process = start(SERVER, str(port))
    await process.wait_ready(f"http://127.0.0.1:{port}/ready", timeout_seconds=10)
    with pytest.raises(ProcessFailed, match=r"part wasn't ready after 0.2 s \(http://\S+/loading answered: 503\)"):
        await process.wait_ready(f"http://127.0.0.1:{port}/loading", timeout_seconds=0.2)


async def test_nothing_listening_is_named(start: Start) -> None:
    process = start("import time; time.sleep(60)")
    with pytest.raises(ProcessFailed, match=r"answered: Connect call failed"):
        await process.wait_ready(f"http://127.0.0.1:{free_port()}/", timeout_seconds=0.2)


async def test_somebody_else_who_answers_on_the_port_is_not_this_process(start: Start) -> None:
    """vLLM listens on 8000 and answers /health by default, as the router does."""
    other = ThreadingHTTPServer(("127.0.0.1", 0), _Healthy)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{other.server_port}/health"
    try:
        with pytest.raises(ProcessFailed, match="200, but from another process that listens on this port"):
            await start("import time; time.sleep(60)").wait_ready(url, 0.5)
        with pytest.raises(ProcessFailed, match="part ended with exit code 1 before it was ready"):
            await start("import time; time.sleep(0.5); raise SystemExit(1)").wait_ready(url, 30)
    finally:
        other.shutdown()
        other.server_close()


def test_several_are_stopped_with_one_grace_for_all(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DEAF]
    processes = [ManagedProcess("part", command, tmp_path / f"{number}.log") for number in range(5)]
    wait_for(lambda: all(process.log_tail() for process in processes), 30)
    begun = time.monotonic()
    stop_all(processes, grace_seconds=4.0)
    assert time.monotonic() - begun < 5 * 4.0
    assert [process.exit_code for process in processes] == [-signal.SIGKILL] * 5


def test_a_group_of_somebody_elses_is_ended_with_the_interpreter_too(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import os, signal, subprocess, sys
        from prefixwatch.engines.process import guarded
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
        with guarded(child.pid):
            print(child.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    group = int(done.stdout)
    wait_for(lambda: not list(group_members(group)), 30)


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="part can't be started: no-such-command: No such file or directory"):
        ManagedProcess("part", ["no-such-command"], tmp_path / "part.log")


def test_stop_reaches_children_even_when_the_parent_was_killed(start: Start) -> None:
    """vLLM's core processes outlive a killed API server."""
    process = start(PARENT_AND_CHILD)
    wait_for(process.log_tail)
    child = psutil.Process(int(process.log_tail()[0]))
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not process.alive)
    assert process.describe() == "part was killed by SIGKILL"
    assert [member.pid for member in group_members(process.pid)] == [child.pid]
    process.stop(grace_seconds=5)
    assert list(group_members(process.pid)) == []


def test_stop_kills_what_ignores_sigterm(start: Start) -> None:
    process = start(DEAF)
    wait_for(process.log_tail)
    process.stop(grace_seconds=0.2)
    assert process.exit_code == -signal.SIGKILL
    process.stop()
    process.kill()


async def test_check_raises_once_it_is_gone(start: Start) -> None:
    process = start("import time; time.sleep(60)")
    process.check()
    process.kill()
    with pytest.raises(ProcessFailed, match="part was killed by SIGKILL"):
        process.check()


@pytest.mark.parametrize("ending", ["sys.exit(0)", "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_nothing_outlives_the_interpreter(tmp_path: Path, ending: str) -> None:
    """However it ends: in order, without clean-up (as test runners do on a time-out), or killed."""
    code = textwrap.dedent(f"""
        import os, signal, sys
        from pathlib import Path
        from prefixwatch.engines.process import ManagedProcess
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        print(ManagedProcess("part", command, Path({str(tmp_path / "part.log")!r})).pid, flush=True)
        {ending}
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=20)
    group = int(done.stdout)
    wait_for(lambda: not list(group_members(group)))


def test_the_log_tail_is_bounded_and_survives_odd_bytes(start: Start) -> None:
    code = "import sys; [sys.stdout.buffer.write(b'line %d \\xff\\n' % n) for n in range(10_000)]"
    process = start(code)
    wait_for(lambda: not process.alive)
    assert process.log_tail(lines=2) == ["line 9998 �", "line 9999 �"]


def test_guardian_forgets_groups_that_were_stopped() -> None:
    assert groups_left(["+10\n", "+11\n", "-10\n", "-12\n"]) == {11}


def test_free_ports_are_distinct() -> None:
    assert len(set(free_ports(20))) == 20


async def test_stopping_several_does_not_block_the_loop(start: Start) -> None:
    processes = [start(DEAF), start(DEAF)]
    for process in processes:
        wait_for(process.log_tail)
    begun = time.monotonic()
    await asyncio.gather(*(asyncio.to_thread(process.stop, 0.3) for process in processes))
    assert time.monotonic() - begun < 0.6
