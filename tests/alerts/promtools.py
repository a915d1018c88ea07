"""The promtools of this machine: the installed one, and newer ones of scripts/install-promtools."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def promtools() -> dict[str, str]:
    """Paths by version; empty when there is none."""
    found = [shutil.which("promtool"), *map(str, sorted((ROOT / ".promtools").glob("*/promtool")))]
    return {version_of(path): path for path in found if path}


def ends() -> dict[str, str]:
    """The oldest and the newest: where both evaluate a rule alike, so do those between."""
    found = list(promtools().items())
    return dict([found[0], found[-1]]) if found else {}


def version_of(promtool: str) -> str:
    """2.42.0, without the packager's suffix."""
    told = subprocess.run([promtool, "--version"], capture_output=True, text=True, check=True)
    return (told.stdout or told.stderr).split()[2].split("+")[0]
