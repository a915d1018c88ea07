"""`prefixwatch exporter fingerprint`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prefixwatch.engines.tiny_model import make_tiny_model
from prefixwatch.exporters.caches.prefix_names import NamedPrefix
from prefixwatch.stack.cli.exporter import fingerprint
from prefixwatch.stack.cli.main import app
from prefixwatch.stack.errors import UsageError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def opening(tmp_path: Path) -> Path:
    file = tmp_path / "support.txt"
    file.write_text("You answer questions of customers. " * 20, encoding="utf-8")
    return file


def test_the_fingerprint_fits_the_configuration(model: Path, opening: Path) -> None:
    command = ["exporter", "fingerprint", "--model-dir", str(model), "--system-prompt", str(opening), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert NamedPrefix(name="support", fingerprint=found["fingerprint"]).fingerprint == found["fingerprint"]
    assert found["blocks"] == found["tokens"] // 16


def test_a_tenants_salt_comes_from_the_environment_and_changes_it(model: Path, opening: Path) -> None:
    plain = fingerprint(model, None, opening, 16, None)
    salted = fingerprint(model, None, opening, 16, "SALT", environment={"SALT": "s3cret"})
    assert plain["fingerprint"] != salted["fingerprint"]


@pytest.mark.parametrize(
    ("files", "salt_env", "why"),
    [
        ((None, None), None, "give one of"),
        (("a", "b"), None, "give one of"),
        (("a", None), "NO_SUCH", "no such environment variable"),
        (("a", None), None, "a can't be read"),
    ],
)
def test_what_is_wrong_is_said(
    model: Path, files: tuple[str | None, str | None], salt_env: str | None, why: str
) -> None:
    system_prompt, text = (Path(file) if file else None for file in files)
    with pytest.raises(UsageError, match=why):
        fingerprint(model, system_prompt, text, 16, salt_env, environment={})
