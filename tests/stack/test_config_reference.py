"""docs/configuration.md and the JSON schema say what the models say, and the page's examples are valid."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from prefixwatch.documents import DocumentError
from prefixwatch.stack.config import load_config
from prefixwatch.stack.config_reference import (
    ENGINE_REFERENCE,
    MARKDOWN_FILE,
    REFERENCE,
    SCHEMA_FILE,
    markdown,
    schema,
)
from tests.stack.command_line import prefixwatch

PAGE = MARKDOWN_FILE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE.partition("## A simulated engine")[0], re.DOTALL)


def test_the_page_and_the_schema_are_up_to_date() -> None:
    """`python -m prefixwatch.stack.config_reference` rewrites them."""
    assert markdown() == PAGE
    assert json.loads(SCHEMA_FILE.read_text(encoding="utf-8")) == schema()


@pytest.mark.parametrize("reference", [REFERENCE, ENGINE_REFERENCE])
def test_every_key_says_what_it_is(reference: object) -> None:
    assert isinstance(reference, type(REFERENCE))
    silent = [
        f"{path}.{name}"
        for path, model in reference.sections.items()
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert silent == []
    assert [path for path, model in reference.sections.items() if not (model.__doc__ or "").strip()] == []


def test_every_section_is_on_the_page() -> None:
    assert {"router.policy", "exporter.scrape_configs[]", "exporter.otlp", "security", "tenants[]"} <= set(
        REFERENCE.sections
    )
    for path in filter(None, REFERENCE.sections):
        assert f"### `{path}`\n" in PAGE


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_examples_are_valid(text: str, tmp_path: Path) -> None:
    file = tmp_path / "prefixwatch.yaml"
    (tmp_path / "my-slo.yaml").touch()
    file.write_text(text)
    config = load_config(file, {})
    config.exporter_config(config.fleet.targets)


def test_the_pages_variables_are_valid() -> None:
    lines = re.findall(r"^    (PREFIXWATCH_\w+)=(.*)$", PAGE, re.MULTILINE)
    assert len(lines) == 4
    config = load_config(None, {name: value.strip("'") for name, value in lines})
    assert (config.router.port, config.router.policy.name, len(config.fleet.targets)) == (8100, "score", 1)


def test_a_file_is_checked_by_a_command(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(EXAMPLES[0])
    bad.write_text("router:\n  prot: 1\n")
    assert prefixwatch("config", "check", str(good)).out == f"{good}: valid; it sets exporter, slo, pricing\n"
    wrong = prefixwatch("config", "check", str(bad))
    assert (
        wrong.code,
        "bad.yaml:2: router.prot: unknown key: did you mean 'port'?" in " ".join(wrong.err.split()),
    ) == (
        2,
        True,
    )
    assert json.loads(prefixwatch("config", "schema").out) == schema()


def test_a_secret_is_not_printed(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(EXAMPLES[1])
    printed = prefixwatch("config", "check", str(file), "--json").out
    assert json.loads(printed)["tenants"][0]["name"] == "acme"
    assert "change-me-acme" not in printed
    with pytest.raises(DocumentError):
        load_config(file, {"PREFIXWATCH_SECURITY__HASH_SECRET": "short"})
