"""Folders read like a table of contents, and every module has one name."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path, PurePosixPath

import pytest

from tests.stack.test_wheel import ROOMS, ROOT

MOST_MODULES = 15
TRACKED = [
    name
    for name in subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")
    if name and (ROOT / name).is_file()
]  # fmt: skip
MODULES = [PurePosixPath(name) for name in TRACKED if name.endswith(".py") and name.split("/")[0] in ROOMS]


def test_no_folder_has_too_many_modules() -> None:
    """`__init__.py` is one of them, empty or not."""
    counts = Counter(str(path.parent) for path in MODULES)
    assert {folder: count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_no_module_has_the_name_of_a_folder_beside_it() -> None:
    folders = {str(path.parent) for path in MODULES}
    assert [str(path) for path in MODULES if str(path.with_suffix("")) in folders] == []


OLD_NAMES = [
    rf"\b(?:from|import)\s+(?:{'|'.join(ROOMS)})(?:\.\w|\s+import\s)",
    rf"-m[\"',\s]+(?:{'|'.join(ROOMS)})\.\w",
]


@pytest.mark.parametrize("pattern", OLD_NAMES)
def test_nothing_is_imported_by_a_rooms_bare_name(pattern: str) -> None:
    """In strings, pages and scripts too: in a checkout it would load a second copy of the module."""
    own = Path(__file__).relative_to(ROOT).as_posix()
    found = [
        f"{name}: {line.strip()}"
        for name in TRACKED
        if name.endswith((".py", ".md", ".toml", ".yaml", "Makefile", "Dockerfile")) or name.startswith("scripts/")
        if name != own
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
        if re.search(pattern, line)
    ]
    assert found == []


def test_the_modules_and_tests_of_make_mutants_are_there() -> None:
    script = (ROOT / "scripts" / "mutants").read_text(encoding="utf-8")
    table = script[script.index("MODULES:") : script.index("# One change of each kind")]
    named = re.findall(r"[a-z_]+(?:/[a-z_]+)+(?:\.py)?", table)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []
