"""A mistake in a YAML file is reported with its file, its line, its key and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field

from prefixwatch.documents import DocumentError, load, parse_all


class Worker(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    blocks: int = Field(gt=0, description="KV blocks it holds")


class Fleet(BaseModel):
    model_config = ConfigDict(extra="forbid")
    workers: list[Worker]
    seed: int = 0


def problem(text: str) -> str:
    with pytest.raises(DocumentError) as caught:
        parse_all(text, Fleet, name="fleet.yaml")
    return str(caught.value)


def test_a_good_document_becomes_its_model() -> None:
    (document,) = parse_all("workers:\n  - {name: a, blocks: 3}\n", Fleet, name="fleet.yaml")
    assert document.content == Fleet(workers=[Worker(name="a", blocks=3)])


def test_what_only_shows_later_is_located_too() -> None:
    (document,) = parse_all("seed: 1\nworkers:\n  - {name: a, blocks: 3}\n", Fleet, name="fleet.yaml")
    assert str(document.error(("workers", 0, "colour"), "too bright")) == (
        "fleet.yaml:3: workers[0].colour: too bright"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "workers:\n  - name: a\n    blocks: 0\n",
            "fleet.yaml:3: workers[0].blocks: should be greater than 0, got 0; it is: KV blocks it holds",
        ),
        ("workers:\n  - name: a\n", "fleet.yaml:2: workers[0].blocks: missing: add it (KV blocks it holds)"),
        ("workers: []\nsede: 1\n", "fleet.yaml:2: sede: unknown key: did you mean 'seed'?"),
        (
            "workers:\n  - {name: a, blocks: 1, x: 1}\n",
            "fleet.yaml:2: workers[0].x: unknown key: use one of name, blocks",
        ),
        ("workers: []\nworkers: []\n", "fleet.yaml:2: workers: duplicate key: remove one of the two"),
        ("workers: [\n", "fleet.yaml:2: not valid YAML: expected the node content, but found '<stream end>'"),
        ("- 1\n", "fleet.yaml:1: expected a mapping of keys, found a list"),
    ],
)
def test_a_mistake_names_line_key_and_remedy(text: str, message: str) -> None:
    assert problem(text) == message


def test_every_mistake_is_told_at_once() -> None:
    assert problem("workers:\n  - {name: a, blocks: -1}\nseed: x\n").count("\n") == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"gone\.yaml: can't be read: No such file"):
        load(tmp_path / "gone.yaml", Fleet)
