"""Whatever a YAML file holds: a document, or one DocumentError with the file and, where there is one, the line."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from prefixwatch.documents import DocumentError, load, load_kinds, load_plain, parse, parse_all, parse_plain
from prefixwatch.documents.yaml_tree import MAX_CHARACTERS, MAX_DEPTH, MAX_NODES


class Anything(BaseModel):
    model_config = ConfigDict(extra="allow")
    kind: str = ""
    a: Any = None
    port: int = Field(default=0, le=65_535)
    names: dict[str, list[int]] = {}
    secret: SecretStr | None = Field(default=None, min_length=16)


def problem(text: str) -> str:
    with pytest.raises(DocumentError) as caught:
        parse(text, Anything, name="a.yaml")
    return str(caught.value)


def alias_bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


def alias_ladder(levels: int) -> str:
    return "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, levels))


BAD = {
    "a date that isn't one": ("port: 2026-99-99\n", "a.yaml:1: not valid YAML: '2026-99-99' is not a valid date"),
    "a time that isn't one": ("a:\n  - 2026-02-30T99:99:99Z\n", "a.yaml:2: not valid YAML: '2026-02-30T99:99:99Z' is"),
    "a list as key": ("b: 1\n? [a]\n: 1\n", "a.yaml:2: document: a key must be a text, not a list or mapping"),
    "a mapping as key": ("? {a: b}\n: 1\n", "a.yaml:1: document: a key must be a text, not a list or mapping"),
    "a list in itself": ("a: &a [*a]\n", "a.yaml:1: not valid YAML: alias *a refers to a value that contains it"),
    "a mapping in itself": ("a: &a\n  b: *a\n", "a.yaml:2: not valid YAML: alias *a refers to a value that contains"),
    "merged into itself": ("a: &a\n  <<: *a\n", "a.yaml:2: not valid YAML: alias *a refers to a value that contains"),
    "text as integer": ("a: !!int abc\n", "a.yaml:1: not valid YAML: 'abc' is not a valid integer"),
    "nothing as integer": ("a: !!int ''\n", "a.yaml:1: not valid YAML: '' is not a valid integer"),
    "text as float": ("a: !!float abc\n", "a.yaml:1: not valid YAML: 'abc' is not a valid float"),
    "text as boolean": ("a: !!bool maybe\n", "a.yaml:1: not valid YAML: 'maybe' is not a valid boolean"),
    "text as date": ("a: !!timestamp abc\n", "a.yaml:1: not valid YAML: 'abc' is not a valid date"),
    "5,000 digits": (f"a: {'9' * 5000}\n", "a.yaml:1: not valid YAML: '99999999999999999999"),
    "5,000 hexadecimal digits": (f"a: 0x{'f' * 5000}\n", "a.yaml:1: not valid YAML: a number of more than 300 digits"),
    "3,000 sexagesimal places": (f"a: 1{':59' * 3000}\n", "a.yaml:1: not valid YAML: a number of more than 300 digits"),
    "5,000 levels of lists": ("a: " + "[" * 5000 + "]" * 5000, "a.yaml:1: not valid YAML: nested more than"),
    "2,000 levels of keys": (
        "".join(" " * i + "a:\n" for i in range(2000)),
        f"a.yaml:{MAX_DEPTH}: not valid YAML: nested more than {MAX_DEPTH} levels deep",
    ),
    "levels through aliases": (alias_ladder(MAX_DEPTH), "nested more than 64 levels deep, aliases expanded"),
    "an alias bomb": (alias_bomb(9), "not valid YAML: more than 250,000 values, aliases expanded: split the file"),
    "a code point that isn't one": ('a: "\\UFFFFFFFF"\n', "a.yaml:1: not valid YAML: a character or version"),
    "half a surrogate pair": ('b: 1\na: "\\ud800"\n', "a.yaml:2: not valid YAML: a text with half of a surrogate"),
    "a zero byte": ("a: 1\nb: \0\n", "a.yaml:2: not valid YAML: character '\\x00' isn't allowed"),
    "a version that isn't one": (f"%YAML {'9' * 5000}.1\n---\na: 1\n", "a.yaml:1: not valid YAML: "),
    "Python": ("a: !!python/object/apply:os.system ['true']\n", "a.yaml:1: not valid YAML: could not determine a"),
    "base 64 that isn't any": ("a: !!binary '====x'\n", "a.yaml:1: not valid YAML: "),
    "a scalar as pairs": ("a: !!pairs 5\n", "a.yaml:1: not valid YAML: expected a sequence"),
    "an anchor twice": ("a: &x 1\nb: &x 2\n", "a.yaml:2: not valid YAML: found duplicate anchor 'x'"),
    "nothing": ("", "a.yaml: expected one document, found 0: it is empty"),
    "a comment only": ("# nothing\n", "a.yaml: expected one document, found 0: it is empty"),
    "two documents": ("a: 1\n---\na: 2\n", "a.yaml: expected one document, found 2: remove the others"),
    "a key twice": ("a: 1\na: 2\n", "a.yaml:2: a: duplicate key: remove one of the two"),
    "a number beyond any port": (f"port: {'9' * 299}\n", "a.yaml:1: port: "),
    "an int as key": ("1: 2\n", "a.yaml:1: "),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_each_kind_of_bad_yaml_has_one_message_with_its_line(kind: str) -> None:
    text, message = BAD[kind]
    found = problem(text)
    assert message in found
    assert len(found) < 1000


def test_a_huge_file_is_refused_unread() -> None:
    assert "the limit is" in problem("a: " + "x" * MAX_CHARACTERS)


def test_an_alias_bomb_takes_little_memory() -> None:
    tracemalloc.start()
    try:
        problem(alias_bomb(12))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5e6


def test_aliases_that_stay_within_the_limits_are_read() -> None:
    assert parse("a: &x [1, 2]\nb: *x\n", Anything, name="a.yaml").model_dump()["b"] == [1, 2]


def test_as_many_values_as_the_limit_says(tmp_path: Path) -> None:
    rows = ", ".join(["*a"] * (MAX_NODES // 101 - 2))
    text = f"a: &a [{', '.join('x' * 100)}]\nb: [{rows}]\n"
    assert len(parse_plain(text, name="a.yaml")["b"]) == MAX_NODES // 101 - 2


def test_ten_thousand_mistakes_make_one_screen() -> None:
    with pytest.raises(DocumentError) as caught:
        parse(f"names: {{{', '.join(f'k{i}: x' for i in range(10_000))}}}\n", Anything, name="a.yaml")
    lines = str(caught.value).splitlines()
    assert (len(lines), lines[-1]) == (21, "and 9980 more mistakes")


def test_a_secret_is_not_shown() -> None:
    text = problem("secret: hunter2\n")
    assert "a.yaml:1: secret: " in text
    assert "hunter2" not in text


@pytest.mark.parametrize("bytes_", [b"\xff\xfea\x00", b"a: \x80\n"])
def test_a_file_that_is_not_utf_8(bytes_: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(bytes_)
    with pytest.raises(DocumentError, match=r"a\.yaml: not a text in UTF-8: save it as UTF-8"):
        load(tmp_path / "a.yaml", Anything)


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert load(tmp_path / "a.yaml", Anything).a == 1


@pytest.mark.parametrize("name", [".", "gone.yaml", "a\0b"])
def test_a_path_that_is_no_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="can't be read"):
        load_plain(f"{tmp_path}/{name}")


def refusal(read: Callable[[], object]) -> str | None:
    """The message of the only kind of error there may be."""
    try:
        read()
    except DocumentError as error:
        return str(error)
    return None


SCALARS = st.sampled_from(
    ["x", "1", "-1", "1.5", "1e999", ".nan", ".inf", "true", "~", "2026-01-01", "2026-13-01", "1:59:59", "0x1f", "0o7",
     "''", '"\\ud800"', '"\\UFFFFFFFF"', "'9999'", "9" * 4400, "!!int x", "!!float x", "!!bool x", "!!null x",
     "!!binary x", "!!timestamp x", "!!int ''", "!!str 1", "!x y", "*a", "*b", "<<",
     "=", "\0", "\t", "- -", "%", "@", "`", "|", ">-"]
)  # fmt: skip


def flow(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    anchor = st.sampled_from(["", "", "&a ", "&b ", "!!set ", "!!omap ", "!!pairs ", "!!map ", "!!seq ", "!!str "])
    lists = st.lists(children, max_size=4).map(lambda items: f"[{', '.join(items)}]")
    maps = st.lists(st.tuples(children, children), max_size=4).map(
        lambda items: "{" + ", ".join(f"? {key} : {value}" for key, value in items) + "}"
    )
    return st.tuples(anchor, lists | maps).map("".join)


TREES = st.recursive(SCALARS, flow, max_leaves=12)
KEYS = st.sampled_from(["kind", "a", "port", "names", "secret", "<<", "a b", "1", "~", "? [x]\n", "&a x", "*a"])
BLOCKS = st.lists(st.tuples(KEYS, TREES), max_size=5).map(lambda rows: "".join(f"{k}: {v}\n" for k, v in rows))
TEXTS = st.lists(BLOCKS, max_size=3).map("---\n".join) | st.text(max_size=80) | TREES


@settings(max_examples=400)
@given(TEXTS)
@example("a: !!set {a, b}\n")
@example("%YAML 9.9\n---\na: 1\n")
@example("<<: 5\n")
def test_nothing_but_a_document_error_is_ever_raised(text: str) -> None:
    for read in (
        lambda: parse(text, Anything, name="a.yaml"),
        lambda: parse_all(text, Anything, name="a.yaml"),
        lambda: parse_plain(text, name="a.yaml"),
    ):
        message = refusal(read)
        assert message is None or re.match(r"a\.yaml(:\d+)?: \S", message.encode().decode())


@settings(max_examples=100)
@given(TEXTS)
def test_nor_for_files_of_several_kinds(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("kinds") / "a.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    message = refusal(lambda: load_kinds(path, {"x": Anything}))
    assert message is None or message.startswith(str(path))


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.integers(-(10**6), 10**6) | st.text(max_size=20) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
)


@given(VALUES)
def test_what_yaml_writes_is_read_as_it_was(value: Any) -> None:
    assert parse_plain(yaml.safe_dump(value), name="a.yaml") == value
