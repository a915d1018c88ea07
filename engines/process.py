"""Processes that this program starts and answers for: engines, and what else a local stack runs beside them.

Each runs in its own process group, because engines have children that outlive a killed parent (vLLM's core processes
do), and its output goes to a file, which every failure message names and quotes. Groups are stopped when the
interpreter exits, and by a guardian process if it is killed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import psutil

from prefixwatch.engines import guardian
from prefixwatch.engines.errors import EngineError

_POLL_SECONDS = 0.1
_KILL_SECONDS = 5.0
STOP_GRACE_SECONDS = 6.0
_QUOTED_LINES = 15
_QUOTED_BYTES = 16_384


class ProcessFailed(EngineError):
    """A process didn't start, ended on its own, or never got ready. The message needs no context."""


class ManagedProcess:
    """One running command and everything it starts.

    `environment` replaces the inherited one. The log file is created with its folder and emptied first.
    Raises ProcessFailed if the command can't be run at all.
    """

    def __init__(
        self, name: str, command: Sequence[str], log_file: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log_file = log_file
        self._command = tuple(command)
        self._environment = environment
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("wb") as log:
            try:
                self._popen = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=None if environment is None else dict(environment),
                    start_new_session=True,
                )
            except OSError as error:
                raise ProcessFailed(f"{name} can't be started: {command[0]}: {error.strerror}") from error
        self._stopped = False
        _watch(self)

    @property
    def pid(self) -> int:
        """The command's process id, which is also the id of its group."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether the command itself still runs; its children may outlive it until `stop`."""
        return self._popen.poll() is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for the signal that ended it, as in `subprocess`."""
        return self._popen.poll()

    def again(self) -> ManagedProcess:
        """The same command once more, in the same environment; whatever is left of this one is killed first.

        The log file is the same too, so what it says of this life is gone. Raises ProcessFailed like the constructor.
        """
        self.kill()
        return ManagedProcess(self.name, self._command, self.log_file, self._environment)

    def describe(self) -> str:
        """The process and how it ended, in words."""
        code = self.exit_code
        if code is None:
            return f"{self.name} is running (pid {self.pid})"
        if code < 0:
            return f"{self.name} was killed by {signal.Signals(-code).name}"
        return f"{self.name} ended with exit code {code}"

    def failure(self, problem: str) -> ProcessFailed:
        """An error for this process that names its log and quotes the end of it."""
        lines = self.log_tail()
        quoted = "\n".join(f"  {line}" for line in lines) if lines else "  (it wrote nothing)"
        return ProcessFailed(f"{problem}; the end of its log {self.log_file}:\n{quoted}")

    def check(self) -> None:
        """Raises ProcessFailed if the process has ended."""
        if not self.alive:
            raise self.failure(self.describe())

    def log_tail(self, lines: int = _QUOTED_LINES) -> list[str]:
        """The last lines of its output."""
        with self.log_file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _QUOTED_BYTES))
            return log.read().decode(errors="replace").splitlines()[-lines:]

    async def wait_ready(self, url: str, timeout_seconds: float) -> None:
        """Returns once this process answers 200 at `url`. Raises ProcessFailed if it ends first or time runs out.

        An answer of somebody else who listens on that port doesn't count.
        """
        deadline = time.monotonic() + timeout_seconds
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while True:
                if not self.alive:
                    raise self.failure(f"{self.describe()} before it was ready")
                answer = await _answer(session, url)
                if answer == "200":
                    if await asyncio.to_thread(self._listens_on, urlsplit(url).port):
                        return
                    answer = "200, but from another process that listens on this port"
                if time.monotonic() >= deadline:
                    raise self.failure(
                        f"{self.name} wasn't ready after {timeout_seconds:g} s ({url} answered: {answer})"
                    )
                await asyncio.sleep(_POLL_SECONDS)

    def _listens_on(self, port: int | None) -> bool:
        """Whether a process of the group does; True if the system doesn't let us look."""
        members = list(group_members(self.pid))
        try:
            connections = [one for member in members for one in member.net_connections("tcp")]
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections)

    def stop(self, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """Ends the whole group: SIGTERM, and SIGKILL for what is left after the grace. Safe to call again."""
        stop_all([self], grace_seconds)

    def kill(self) -> None:
        """Ends the whole group at once with SIGKILL."""
        if self._stopped:
            return
        self._signal(signal.SIGKILL)
        self._popen.wait()
        self._wait_gone(_KILL_SECONDS)
        self._stopped = True
        _unwatch(self)

    def pause(self) -> None:
        """Stops the whole group where it is, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a paused group go on."""
        self._signal(signal.SIGCONT)

    def _wait_gone(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        pause = 0.02
        while self._group_lives() and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, 0.25)  # looking for members reads every process of the machine

    def _signal(self, number: signal.Signals) -> None:
        # macOS answers EPERM where only zombies are left in the group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _group_lives(self) -> bool:
        """Whether any member still runs; zombies that nobody has reaped don't count."""
        if self.alive:
            return True
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return any(True for _ in group_members(self.pid))


def stop_all(processes: Iterable[ManagedProcess], grace_seconds: float = STOP_GRACE_SECONDS) -> None:
    """Ends these groups at the same time, with one grace for all of them; ones already gone are no error."""
    running = [process for process in processes if not process._stopped]
    for process in running:
        process._signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    for process in running:
        process._wait_gone(deadline - time.monotonic())
    for process in running:
        process._signal(signal.SIGKILL)
    for process in running:
        process.kill()


def group_members(group: int) -> Iterator[psutil.Process]:
    """Live processes of a process group."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def free_ports(count: int) -> list[int]:
    """Distinct loopback TCP ports that nothing listens on at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def free_port() -> int:
    """A loopback TCP port that nothing listens on at the moment."""
    return free_ports(1)[0]


async def _answer(session: aiohttp.ClientSession, url: str) -> str:
    """The status of a GET, or why there was none."""
    try:
        async with session.get(url) as response:
            return str(response.status)
    except aiohttp.ClientConnectorError as error:
        return error.os_error.strerror or str(error.os_error)
    except (aiohttp.ClientError, TimeoutError) as error:
        return str(error) or type(error).__name__


_watched: set[ManagedProcess] = set()
_guarded: set[int] = set()
"""Process groups on the guardian's list, those of `_watched` among them."""
_guardian_lock = threading.Lock()
_guardian: subprocess.Popen[str] | None = None


def _watch(process: ManagedProcess) -> None:
    _watched.add(process)
    _guard(process.pid)


def _unwatch(process: ManagedProcess) -> None:
    _watched.discard(process)
    _unguard(process.pid)


@contextlib.contextmanager
def guarded(group: int) -> Iterator[None]:
    """The guardian ends this process group if this interpreter dies meanwhile, even by SIGKILL."""
    _guard(group)
    try:
        yield
    finally:
        _unguard(group)


def _guard(group: int) -> None:
    _guarded.add(group)
    _tell_guardian(f"+{group}\n")


def _unguard(group: int) -> None:
    _guarded.discard(group)
    _tell_guardian(f"-{group}\n")


def _tell_guardian(line: str) -> None:
    """Starts the guardian with the first process; it lives as long as this interpreter."""
    global _guardian  # noqa: PLW0603 - one guardian an interpreter
    with _guardian_lock:
        if _guardian is None or _guardian.poll() is not None:
            _guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # not ours: whoever reads it would wait for the guardian as well
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
            line = "".join(f"+{group}\n" for group in _guarded)
        assert _guardian.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            _guardian.stdin.write(line)
            _guardian.stdin.flush()


@atexit.register
def _stop_all() -> None:
    stop_all(list(_watched), guardian.GRACE_SECONDS)
    if _guardian is not None:
        _guardian.communicate()
