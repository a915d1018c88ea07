"""YAML text → node trees and plain values, within fixed limits on size, depth and expansion.

PyYAML raises a dozen exception types for malformed scalars (`2026-99-99`, `!!int abc`), recurses without a limit and
expands aliases exponentially. Here every such input ends in a YAMLError with a mark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.reader import ReaderError

MAX_CHARACTERS = 4 * 2**20
MAX_DEPTH = 64
MAX_NODES = 250_000
"""With every alias replaced by what it refers to."""
_MAX_INTEGER = 10**300
"""Anything larger overflows a float."""

_SCALAR_ERRORS = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError)
"""What PyYAML's constructors raise for a scalar that doesn't fit its tag."""


@dataclass(slots=True)
class _Extent:
    """Size of a subtree with its aliases expanded."""

    nodes: int = 1
    depth: int = 1

    def add(self, child: _Extent) -> None:
        self.nodes += child.nodes
        self.depth = max(self.depth, child.depth + 1)


class _Loader(yaml.SafeLoader):
    """A SafeLoader that checks the limits while it composes, and marks every error."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open: list[_Extent] = []
        self._anchored: dict[str, _Extent] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        if not self._open:
            self._anchored = {}
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if event.anchor not in self._anchored:
                raise _error(event, f"alias *{event.anchor} refers to a value that contains it")
            extent = self._anchored[event.anchor]
        else:
            if len(self._open) >= MAX_DEPTH:
                raise _error(event, f"nested more than {MAX_DEPTH} levels deep")
            self._open.append(_Extent())
            node = super().compose_node(parent, index)
            extent = self._open.pop()
            if isinstance(event, yaml.NodeEvent) and event.anchor:
                self._anchored[event.anchor] = extent
        if self._open:
            self._open[-1].add(extent)
            extent = self._open[-1]
        if extent.nodes > MAX_NODES:
            raise _error(event, f"more than {MAX_NODES:,} values, aliases expanded: split the file")
        if len(self._open) + extent.depth - 1 > MAX_DEPTH:
            raise _error(event, f"nested more than {MAX_DEPTH} levels deep, aliases expanded")
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except _SCALAR_ERRORS as error:
            raise _error(node, f"{_text(node)} is not a valid {_kind(node)}") from error
        if isinstance(value, int) and abs(value) > _MAX_INTEGER:
            raise _error(node, "a number of more than 300 digits")
        if isinstance(value, str) and not _is_unicode(value):
            raise _error(node, "a text with half of a surrogate pair, which is not a character")
        return value


def compose(text: str) -> list[yaml.Node]:
    """The documents of a text as node trees, empty ones left out. Raises yaml.YAMLError."""
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"{len(text):,} characters; the limit is {MAX_CHARACTERS:,}")
    return list(_documents(text))


def _documents(text: str) -> Iterator[yaml.Node]:
    try:
        loader = _Loader(text)
    except ReaderError as error:
        mark = yaml.Mark("", 0, text.count("\n", 0, error.position), 0, "", 0)
        problem = f"character {text[error.position]!r} isn't allowed"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark) from error
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                yield node
    except _SCALAR_ERRORS as error:  # the scanner's own: "\UFFFFFFFF", `%YAML 99…9`
        problem = f"a character or version number that doesn't exist ({error})"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=loader.get_mark()) from error


def construct(node: yaml.Node) -> Any:
    """The plain value of a node tree from `compose`. Raises yaml.YAMLError."""
    return _Loader("").construct_document(node)


def plain(text: str) -> Any:
    """The plain value of a text with at most one document; None for an empty one. Raises yaml.YAMLError."""
    nodes = compose(text)
    if len(nodes) > 1:
        raise _error(nodes[1], f"expected one document, found {len(nodes)}")
    return construct(nodes[0]) if nodes else None


def problem(error: yaml.YAMLError) -> tuple[int | None, str]:
    """Line (from 1; None if unknown) and cause of an error, in one line of text."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return None, str(error)
    mark = error.problem_mark or error.context_mark
    # Of a duplicate anchor, the problem is only "second occurrence".
    cause = error.context if str(error.context).startswith("found duplicate") else error.problem
    return mark.line + 1 if mark else None, " ".join(str(cause).split(";")[0].split())


def _error(at: Any, text: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=at.start_mark)


def _text(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        return "a list or mapping"
    return repr(node.value if len(node.value) <= 40 else node.value[:40] + "…")


def _kind(node: yaml.Node) -> str:
    return {"int": "integer", "bool": "boolean", "timestamp": "date"}.get(kind := node.tag.rpartition(":")[2], kind)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
