"""scripts/run-tests: both parts run, a failure is asked again alone, and nothing but a pass ends with 0."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTEST = """#!/bin/sh
# Ends with the next code of the file that is named after its part, heavy or light.
for part in heavy light; do
    case "$*" in *.pytest_cache/$part*) break ;; esac
done
echo "$*" >> calls
code=$(head -n 1 $part)
sed -i 1d $part
exit "$code"
"""


@pytest.mark.parametrize(
    ("heavy", "light", "result", "asked"),
    [
        ([0], [0], 0, 2),
        ([1, 0], [0], 0, 3),
        ([1, 0], [1, 0], 0, 4),
        ([1, 1], [0], 1, 3),
        ([0], [1, 1], 1, 3),
        ([1, 5], [0], 5, 3),
        ([2], [0], 2, 2),
        ([0], [5], 5, 2),
        ([137], [0], 137, 2),
    ],
)
def test_only_a_pass_ends_with_0(tmp_path: Path, heavy: list[int], light: list[int], result: int, asked: int) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/run-tests", tmp_path / "scripts")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    fake = tmp_path / ".venv/bin/pytest"
    fake.write_text(PYTEST)
    fake.chmod(0o755)
    for part, codes in (("heavy", heavy), ("light", light)):
        (tmp_path / part).write_text("".join(f"{code}\n" for code in codes))

    done = subprocess.run([tmp_path / "scripts/run-tests"], capture_output=True, text=True, check=False)

    calls = (tmp_path / "calls").read_text().splitlines()
    assert (done.returncode, len(calls)) == (result, asked), done.stdout + done.stderr
    assert sum("--last-failed" in call for call in calls) == asked - 2
