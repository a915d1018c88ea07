"""Files with documents of several kinds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from prefixwatch.documents import DocumentError, load_kinds


class Cat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: str
    lives: int


class Dog(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: str
    tricks: list[str]


KINDS: Mapping[str, type[BaseModel]] = {"Cat": Cat, "Dog": Dog}


def write(folder: Path, text: str) -> Path:
    path = folder / "pets.yaml"
    path.write_text(text)
    return path


def test_each_document_is_read_as_its_kind(tmp_path: Path) -> None:
    cat, dog = load_kinds(write(tmp_path, "kind: Cat\nlives: 9\n---\nkind: Dog\ntricks: [sit]\n"), KINDS)

    assert cat.content == Cat(kind="Cat", lives=9)
    assert dog.content == Dog(kind="Dog", tricks=["sit"])
    assert dog.line(("tricks",)) == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lives: 9\nkind: Catt\n", "pets.yaml:2: kind: 'Catt' isn't supported in this file: did you mean 'Cat'?"),
        ("lives: 9\nkind: Mouse\n", "pets.yaml:2: kind: 'Mouse' isn't supported in this file: use one of Cat, Dog"),
        ("lives: 9\n", "pets.yaml:1: kind: missing: give one of Cat, Dog"),
        ("- 1\n", "pets.yaml:1: expected a mapping of keys, found a text"),
        ("- - 1\n", "pets.yaml:1: expected a mapping of keys, found a list"),
        ("kind: Cat\nlives: many\n", "pets.yaml:2: lives: should be a valid integer"),
        ("kind: [Cat]\n", "pets.yaml:1: kind: "),
    ],
)
def test_a_wrong_kind_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DocumentError) as caught:
        load_kinds(write(tmp_path, text), KINDS)

    assert message in str(caught.value)
