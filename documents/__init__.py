"""YAML documents → pydantic models, with errors that name the file, the line and the key.

Every file that a person writes for prefixwatch (configuration, scenarios, SLOs, catalogues) is read here, so
that a mistake in any of them is reported the same way.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

Model = TypeVar("Model", bound=BaseModel)
KeyPath = tuple[str | int, ...]


_SECRET_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)|(?<=[?&])[^&\s']+")
"""A user name and password, or a query's parameter: messages end up in logs."""


class DocumentError(Exception):
    """A document can't be used. The message has one line per mistake: `file:line: key: what is wrong`."""


@dataclass(frozen=True, slots=True)
class Document(Generic[Model]):
    """A document's content, and where in which file each of its keys stands."""

    name: str
    content: Model
    lines: Mapping[KeyPath, int]

    def line(self, path: KeyPath) -> int:
        """The line of a key, or of the nearest key above it that the document has."""
        return next(self.lines[path[:depth]] for depth in range(len(path), -1, -1) if path[:depth] in self.lines)

    def error(self, path: KeyPath, message: str) -> DocumentError:
        """An error for what only shows when several keys, or documents, are seen together."""
        return DocumentError(f"{self.name}:{self.line(path)}: {_dotted(path) or 'document'}: {message}")


def load(path: Path | str, model: type[Model]) -> Model:
    """The one document of a YAML file as `model`."""
    documents = load_all(path, model)
    if len(documents) != 1:
        raise DocumentError(f"{path}: expected one document, found {len(documents)}")
    return documents[0].content


def parse(text: str, model: type[Model], *, name: str) -> Model:
    """The one document of a YAML text as `model`; `name` stands for the file in messages."""
    (document,) = parse_all(text, model, name=name)
    return document.content


def load_all(path: Path | str, model: type[Model]) -> list[Document[Model]]:
    """All documents of a YAML file (separated by `---`) as `model`."""
    return parse_all(_read(path), model, name=str(path))


def parse_all(text: str, model: type[Model], *, name: str) -> list[Document[Model]]:
    """All documents of a YAML text as `model`; `name` stands for the file in messages."""
    return [_validate(node, model, name) for node in _nodes(text, name)]


def _read(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from error


def _nodes(text: str, name: str) -> list[yaml.Node]:
    try:
        return [node for node in yaml.compose_all(text, Loader=yaml.SafeLoader) if node is not None]
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise DocumentError(f"{name}:{line}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise DocumentError(f"{name}: not valid YAML: {error}") from error


def load_kinds(path: Path | str, models: Mapping[str, type[BaseModel]], *, key: str = "kind") -> list[Document[Any]]:
    """All documents of a YAML file, each as the model of the kind that its `key` names."""
    text = _read(path)
    return [_validate(node, _chosen(node, models, key, str(path)), str(path)) for node in _nodes(text, str(path))]


def _chosen(node: yaml.Node, models: Mapping[str, type[BaseModel]], key: str, name: str) -> type[BaseModel]:
    place = f"{name}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode):
        found = "a list" if isinstance(node, yaml.SequenceNode) else "a text"
        raise DocumentError(f"{place}: expected a mapping of keys, found {found}")
    given = next((value for found, value in node.value if found.value == key), None)
    if given is None:
        raise DocumentError(f"{place}: {key}: missing: say which of {', '.join(models)} it is")
    text = given.value if isinstance(given, yaml.ScalarNode) else "a list or mapping"
    if text not in models:
        close = difflib.get_close_matches(text, models, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"use one of {', '.join(models)}"
        raise DocumentError(f"{name}:{given.start_mark.line + 1}: {key}: {text!r} is not read here: {hint}")
    return models[text]


def _validate(node: yaml.Node, model: type[Model], name: str) -> Document[Model]:
    lines: dict[KeyPath, int] = {}
    duplicates = [
        f"{name}:{line}: {_dotted(path)}: this key stands here twice" for path, line in _walk(node, (), lines)
    ]
    if duplicates:
        raise DocumentError("\n".join(duplicates))
    try:
        value = yaml.SafeLoader("").construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise DocumentError(f"{name}:{line}: {error.problem}") from error
    if not isinstance(value, Mapping):
        raise DocumentError(f"{name}:{node.start_mark.line + 1}: expected a mapping of keys, found {_kind(value)}")
    try:
        return Document(name, model.model_validate(value), lines)
    except ValidationError as error:
        messages = [_message(name, problem, lines, model) for problem in error.errors(include_url=False)]
        raise DocumentError("\n".join(messages)) from error


def _walk(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int]) -> Iterator[tuple[KeyPath, int]]:
    """Note the line of every key; yield the keys that stand twice in one mapping."""
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            here = (*path, str(key.value))
            lines[here] = key.start_mark.line + 1
            if key.value in seen:
                yield here, lines[here]
            seen.add(key.value)
            yield from _walk(value, here, lines)
    elif isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            yield from _walk(item, (*path, position), lines)


def _message(name: str, problem: Any, lines: Mapping[KeyPath, int], model: type[BaseModel]) -> str:
    path: KeyPath = tuple(step for step in problem["loc"] if step != "[key]")
    known = path
    while known and known not in lines:
        known = known[:-1]
    description = _description(model, path)
    if problem["type"] == "extra_forbidden":
        siblings = [field.alias or key for key, field in _section(model, path[:-1]).items()]
        close = difflib.get_close_matches(str(path[-1]), siblings, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"keys here are {', '.join(siblings) or 'not known'}"
        text = f"unknown key: {hint}"
    elif problem["type"] == "missing":
        text = f"missing: add it{f' ({description})' if description else ''}"
    else:
        text = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input ")
        if isinstance(problem.get("input"), str | int | float | bool):
            text += f", got {problem['input']!r}"
        text += f"; it is: {description}" if description else ""
    return f"{name}:{lines.get(known, 1)}: {_dotted(path) or 'document'}: {_SECRET_IN_ADDRESS.sub(r'***', text)}"


def _section(model: type[BaseModel], path: KeyPath) -> Mapping[str, FieldInfo]:
    """The keys that may stand where `path` leads, as far as nested models tell."""
    current: type[BaseModel] | None = model
    for step in path:
        if isinstance(step, str) and current is not None:
            field = current.model_fields.get(step)
            current = next(_models_in(field.annotation), None) if field else None
    return current.model_fields if current else {}


def _description(model: type[BaseModel], path: KeyPath) -> str:
    """What the key at `path`, or the list or map it stands in, means."""
    names = tuple(step for step in path if isinstance(step, str))
    for end in range(len(names), 0, -1):
        field = _section(model, names[: end - 1]).get(names[end - 1])
        if field and field.description:
            return field.description
    return ""


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)


def _dotted(path: KeyPath) -> str:
    return ".".join(f"[{step}]" if isinstance(step, int) else step for step in path).replace(".[", "[")


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    return "a list" if isinstance(value, list) else "a text" if isinstance(value, str) else type(value).__name__
