"""Policies of other packages, as docs/policies.md shows them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
CHOOSE = """
from prefixwatch.router.policies import POLICIES, make_policy
from prefixwatch.router.policy import Fleet, RouteRequest, Worker, NO_TOKENS
import numpy as np
near = make_policy("near", options={"hit_weight": 2.0})
request = RouteRequest("r", 64, NO_TOKENS, np.arange(4, dtype=np.uint64), 16)
fleet = Fleet([Worker("a", in_flight=9), Worker("b", in_flight=1)], lambda _: {"a": 4, "b": 2}, 0.0)
print(near.choose(request, fleet))
"""


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def run(folder: Path, code: str, entries: str) -> subprocess.CompletedProcess[str]:
    """Run code where a package with these entry points is installed."""
    (folder / "my_policies.py").write_text(block("python"))
    package = folder / "mine-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[prefixwatch.policies]\n{entries}\n")
    path = os.pathsep.join([str(folder), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_documented_policy_is_a_policy_like_any_other(tmp_path: Path) -> None:
    assert 'near = "my_policies:Near"' in block("toml")
    done = run(tmp_path, CHOOSE, "near = my_policies:Near")
    assert done.returncode == 0, done.stderr
    assert "worker='b', reason='hit_sacrificed'" in done.stdout
    assert "scores={'a': 0.8, 'b': 2.0}" in done.stdout


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("gone = my_policies:Gone", "plug-in gone = my_policies:Gone of package mine can't be imported"),
        ("absent = no_such_module:X", "No module named 'no_such_module'"),
        ("options = my_policies:NearOptions", "is not a subclass of prefixwatch.router.policy.Policy"),
        ("score = my_policies:Near\nagain = my_policies:Near", "another policy is called 'near'"),
    ],
)
def test_a_plugin_at_fault_is_named(tmp_path: Path, entry: str, said: str) -> None:
    code = "from prefixwatch.router.errors import RouterError\ntry:\n import prefixwatch.router.policies\n"
    done = run(tmp_path, code + "except RouterError as error:\n print(error)", entry)
    assert said in done.stdout, done.stderr
