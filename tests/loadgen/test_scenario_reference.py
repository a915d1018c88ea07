from __future__ import annotations

import json

import pytest
import yaml
from pydantic import BaseModel

from prefixwatch.loadgen.scenario.model import SHIPPED_FOLDER, shipped_scenarios
from prefixwatch.loadgen.scenario.reference import MARKDOWN_FILE, REFERENCE, SCHEMA_FILE, markdown, schema


def test_the_reference_is_up_to_date() -> None:
    """`python -m prefixwatch.loadgen.scenario.reference` writes it anew."""
    assert MARKDOWN_FILE.read_text(encoding="utf-8") == markdown()
    assert json.loads(SCHEMA_FILE.read_text(encoding="utf-8")) == schema()


def test_every_key_and_every_shipped_scenario_is_in_it() -> None:
    text = MARKDOWN_FILE.read_text(encoding="utf-8")
    sections = REFERENCE.sections
    assert {"arrivals.stages[]", "groups.nesting[]", "sessions.forks", "tenants[].models[]", "replay"} <= set(sections)
    for path, model in sections.items():
        assert not path or f"### `{path}`" in text
        for name in model.model_fields:
            assert f"| `{name}` |" in text
    for name in shipped_scenarios():
        assert f"| `{name}` |" in text


@pytest.mark.parametrize("name", shipped_scenarios())
def test_a_shipped_scenario_explains_itself_and_uses_known_keys_only(name: str) -> None:
    content = yaml.safe_load((SHIPPED_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    assert set(content) <= set(schema()["properties"])
    assert len(content["description"]) > 40


def test_every_section_says_what_it_is() -> None:
    def undocumented(model: type[BaseModel]) -> bool:
        return not (model.__doc__ or "").strip()

    assert [path for path, model in REFERENCE.sections.items() if undocumented(model)] == []
