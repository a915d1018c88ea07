"""What users install: sdist → wheel → a fresh environment, used in a folder whose names would hide ours."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tarfile
import threading
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from hatch_build import restore_links
from prefixwatch.engines.fleet import start_simulated
from prefixwatch.engines.tiny_model import default_model_dir
from tests.stack.test_extras import Page

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
ROOMS = tuple(room for room in WHEEL["sources"] if room != "src")
POISON = 'raise RuntimeError("the file of the user, not ours")\n'


@dataclass(frozen=True, slots=True)
class Installed:
    """The environment, and a folder to work in that has a file or package by every name we might import."""

    python: Path
    folder: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.python.parent / "prefixwatch"), *arguments],
            cwd=self.folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    def ask(self, code: str) -> str:
        """What the environment's Python prints."""
        command = [str(self.python), "-P", "-c", code]
        done = subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True, env=environment())
        return done.stdout.strip()


def poison(folder: Path, *more: str) -> None:
    for name in (*ROOMS, "client", "plan", "report", *more):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(POISON)
    for name in ("statistics", "config", "run"):
        (folder / f"{name}.py").write_text(POISON)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def build(source: Path, kind: str, out: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    with tarfile.open(build(ROOT, "sdist", folder / "sdist")) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return build(source, "wheel", folder / "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    place = tmp_path_factory.mktemp("installed")
    venv.create(place / "venv", with_pip=False, symlinks=True)
    python = place / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True, timeout=300, env=environment())
    (packages,) = (place / "venv" / "lib").glob("python*/site-packages")
    # What we depend on is taken from the tests' own environment; a line here doesn't read the .pth files there.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    folder = place / "work"
    poison(folder, "prefixwatch", "numpy", "aiohttp", "typer")
    return Installed(python, folder)


def test_the_wheel_has_one_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"prefixwatch"}
    assert not [name for name in names if "__pycache__" in name or name.rpartition("/")[2].startswith("test_")]


def test_every_file_of_the_rooms_is_in_the_wheel(wheel: Path) -> None:
    """Rules, dashboards, pages, scenarios, catalogue and profiles included."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *ROOMS], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    files = {f"prefixwatch/{name}" for name in listed if name and (ROOT / name).is_file()}
    assert len(files) > 500
    assert files - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_links_that_a_checkout_holds_as_text_files_come_back(tmp_path: Path) -> None:
    """Git on Windows, and some archives, write a link as a file with its target; other files stay as they are."""
    package = tmp_path / "src" / "prefixwatch"
    package.mkdir(parents=True)
    (tmp_path / "alerts").mkdir()
    for name, text in (("alerts", "../../alerts"), ("router", "../../router"), ("slo", "../../etc"), ("a.py", "x")):
        (package / name).write_text(text)
    restore_links(package)
    assert {path.name: path.is_symlink() for path in package.iterdir()} == {
        "alerts": True, "router": False, "slo": False, "a.py": False,
    }  # fmt: skip
    assert (package / "alerts").resolve() == tmp_path / "alerts"


def test_it_is_the_installed_package_that_runs(installed: Installed) -> None:
    said = installed.ask("import prefixwatch; print(prefixwatch.__file__, prefixwatch.__version__)")
    assert str(installed.python.parents[1]) in said
    assert installed.run("--version").stdout.split()[1] == said.split()[1]


def test_the_exporter_scrapes(installed: Installed) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = installed.run("exporter", "--target", f"a=http://127.0.0.1:{server.server_port}", "--once")
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert re.search(r'prefixwatch_target_up\{.*target="a".*\} 1', done.stdout)


def test_rules_are_built(installed: Installed, tmp_path: Path) -> None:
    done = installed.run("slo", "build", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("*.yaml"))) > 10


def test_a_bench_runs_to_its_report(installed: Installed, tmp_path: Path) -> None:
    arguments = ["--workers", "1", "--repeats", "1", "--policy", "round_robin", "--out", str(tmp_path)]
    done = installed.run("bench", "smoke", *arguments)
    assert done.returncode in (0, 1, 3), done.stdout + done.stderr  # a verdict, whichever the machine allows
    assert "Traceback" not in done.stderr
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "requests.parquet").exists()


def test_the_stack_comes_up_and_stops(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("fleet: {workers: 1}\nrouter: {port: 0}\nexporter: {listen: '127.0.0.1:0'}\n")
    command = [str(installed.python.parent / "prefixwatch"), "up", "--config", str(tmp_path / "p.yaml")]
    with subprocess.Popen(
        [*command, "--folder", str(tmp_path / "up")],
        cwd=installed.folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("Ctrl-C"):
                process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0, "".join(said)
    assert said[-1].startswith("Ctrl-C"), "".join(said)


def test_locust_loads_the_installed_file(installed: Installed, tmp_path: Path) -> None:
    """Locust itself puts the current folder first: packages of the user's by the names of ours and its own win."""
    poison(tmp_path / "work")
    (engine,) = asyncio.run(start_simulated(1, default_model_dir(), tmp_path / "engines"))
    room = installed.ask("import prefixwatch.loadgen as room; print(room.__path__[0])")
    try:
        done = subprocess.run(
            [
                *(str(installed.python), "-P", "-m", "locust", "-f", f"{room}/locustfile.py", "--headless"),
                *("--host", engine.url, "--scenario", "smoke", "--model-dir", str(default_model_dir())),
                *("--out", str(tmp_path / "out")),
            ],
            cwd=tmp_path / "work", env=environment(), capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
    finally:
        engine.process.stop()
    assert "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "out" / "requests.parquet").exists(), done.stderr
