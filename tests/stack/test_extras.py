"""The core installation runs the exporter, rules, diagnosis and dashboards; other commands name the extra they need."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from prefixwatch.stack.cli.extras import EXTRA_OF, remedy

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
WITHOUT_EXTRAS = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from prefixwatch.stack.cli.main import main
main(sys.argv[1:])
"""
PAGE = b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name="m"} 3.0\n'


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def without_extras(*arguments: str) -> subprocess.CompletedProcess[str]:
    blocked = {*EXTRA_OF, "numba", "llvmlite"}
    return subprocess.run(
        [sys.executable, "-P", "-c", f"BLOCKED = {blocked!r}{WITHOUT_EXTRAS}", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_exporter_scrapes(engine: str) -> None:
    done = without_extras("exporter", "--target", f"a={engine}", "--once")
    assert done.returncode == 0, done.stderr
    assert re.search(r'prefixwatch_target_up\{.*target="a".*\} 1', done.stdout)


@pytest.mark.parametrize(
    ("arguments", "files"), [(["slo", "build"], "*.yaml"), (["dashboards", "build"], "json/*.json")]
)
def test_rules_and_dashboards_are_written(arguments: list[str], files: str, tmp_path: Path) -> None:
    done = without_extras(*arguments, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob(files))


def test_a_diagnosis_asks_the_exporter() -> None:
    done = without_extras("diagnose", "--exporter", "http://127.0.0.1:1")
    assert (done.returncode, "its metrics can't be read" in " ".join(done.stderr.split())) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["bench", "smoke"], "bench|router"),
        (["simulate", "smoke"], "bench|router"),
        (["compare", "a", "b"], "bench"),
        (["slo", "grade", "a", "--slo", "ttft"], "bench"),
        (["dashboards", "preview", "--prometheus", "http://127.0.0.1:1"], "bench"),
        (["router", "--config", "a"], "router"),
        (["up"], "router"),
        (["engines", "list"], "router"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_command_names_the_extra_it_needs(arguments: list[str], extra: str) -> None:
    done = without_extras(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.fullmatch(
        rf"error: this command needs [a-z0-9.]+, which isn't installed: run pip install 'prefixwatch\[({extra})\]'",
        done.stderr.strip(),
    ), done.stderr


def test_every_package_of_an_extra_has_its_module_in_the_table() -> None:
    distributions = packages_distributions()
    for extra in ("router", "bench"):
        for requirement in PROJECT["optional-dependencies"][extra]:
            package = re.split(r"[<>=\[]", requirement)[0]
            modules = {module for module, names in distributions.items() if package in names}
            roots = {module.split(".")[0] for module, of in EXTRA_OF.items() if of == extra}
            assert package == "prefixwatch" or modules & roots, package


def test_another_missing_module_is_a_bug_and_not_an_extra() -> None:
    assert remedy(ModuleNotFoundError(name="pyarrowz")) is None
    assert remedy(ModuleNotFoundError(name="pyarrow.parquet")) is not None
