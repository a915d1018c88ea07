"""YAML documents → pydantic models, with errors that name the file, the line and the key.

Every file that a person writes for prefixwatch (configuration, scenarios, SLOs, catalogues) is read here, so that any
mistake in any of them ends in a DocumentError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from prefixwatch.documents import yaml_tree
from prefixwatch.documents.errors import InputError
from prefixwatch.documents.hints import did_you_mean

Model = TypeVar("Model", bound=BaseModel)
KeyPath = tuple[str | int, ...]

_SECRET_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)|(?<=[?&])[^&=\s']+=[^&\s']*")
"""A user name and password, or a query's parameter: messages end up in logs."""
_MOST_MESSAGES = 20
_LONGEST_VALUE = 80
_LONGEST_MESSAGE = 600


class DocumentError(InputError):
    """A document can't be used. The message has one line per mistake: `file:line: key: what is wrong`."""


@dataclass(frozen=True, slots=True)
class Document(Generic[Model]):
    """A document's content, and the line of each of its keys."""

    name: str
    content: Model
    lines: Mapping[KeyPath, int]

    def line(self, path: KeyPath) -> int:
        """The line of a key, or of the nearest key above it that the document has."""
        return _line(self.lines, path)

    def error(self, path: KeyPath, message: str) -> DocumentError:
        """An error that only shows when several keys or documents are seen together."""
        return DocumentError(f"{self.name}:{self.line(path)}: {_dotted(path) or 'document'}: {message}")


def _line(lines: Mapping[KeyPath, int], path: KeyPath) -> int:
    return next(lines[path[:depth]] for depth in range(len(path), -1, -1) if path[:depth] in lines)


def load(path: Path | str, model: type[Model]) -> Model:
    """The one document of a YAML file as `model`. Raises DocumentError, like everything here."""
    return parse(_read(path), model, name=str(path))


def parse(text: str, model: type[Model], *, name: str) -> Model:
    """The one document of a YAML text as `model`; `name` is the file's name in messages."""
    documents = parse_all(text, model, name=name)
    if len(documents) == 1:
        return documents[0].content
    remedy = "it is empty" if not documents else "remove the others, and the lines '---' between them"
    raise DocumentError(f"{name}: expected one document, found {len(documents)}: {remedy}")


def load_all(path: Path | str, model: type[Model]) -> list[Document[Model]]:
    """All documents of a YAML file (separated by `---`) as `model`."""
    return parse_all(_read(path), model, name=str(path))


def parse_all(text: str, model: type[Model], *, name: str) -> list[Document[Model]]:
    """All documents of a YAML text as `model`; `name` is the file's name in messages."""
    return [_validate(node, model, name) for node in _nodes(text, name)]


def parse_plain(text: str, *, name: str) -> Any:
    """The plain value of a YAML text (mappings, lists, scalars); None for an empty text. Raises DocumentError."""
    try:
        return yaml_tree.plain(text)
    except yaml.YAMLError as error:
        raise _not_yaml(name, error) from error


def load_plain(path: Path | str) -> Any:
    """The plain value of a YAML file."""
    return parse_plain(_read(path), name=str(path))


def _read(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path}: not a text in UTF-8: save it as UTF-8") from error
    except (OSError, ValueError) as error:
        raise DocumentError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from error


def _nodes(text: str, name: str) -> list[yaml.Node]:
    try:
        return yaml_tree.compose(text)
    except yaml.YAMLError as error:
        raise _not_yaml(name, error) from error


def _not_yaml(name: str, error: yaml.YAMLError) -> DocumentError:
    line, cause = yaml_tree.problem(error)
    return DocumentError(f"{name}{f':{line}' if line else ''}: not valid YAML: {cause}")


def load_kinds(path: Path | str, models: Mapping[str, type[BaseModel]]) -> list[Document[Any]]:
    """All documents of a YAML file, each as the model that its key `kind` names. A list stands for its items, as in
    OpenSLO's own examples."""
    name = str(path)
    roots = _nodes(_read(path), name)
    nodes = [item for root in roots for item in (root.value if isinstance(root, yaml.SequenceNode) else [root])]
    return [_validate(node, _chosen(node, models, name), name) for node in nodes]


def _chosen(node: yaml.Node, models: Mapping[str, type[BaseModel]], name: str) -> type[BaseModel]:
    place = f"{name}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode):
        found = "a list" if isinstance(node, yaml.SequenceNode) else "a text"
        raise DocumentError(f"{place}: expected a mapping of keys, found {found}")
    given = next((value for found, value in node.value if found.value == "kind"), None)
    if given is None:
        raise DocumentError(f"{place}: kind: missing: give one of {', '.join(models)}")
    text = given.value if isinstance(given, yaml.ScalarNode) else "a list or mapping"
    if text not in models:
        hint = did_you_mean(text, models)
        line = given.start_mark.line + 1
        raise DocumentError(f"{name}:{line}: kind: {_cut(repr(text))} isn't supported in this file: {hint}")
    return models[text]


def _validate(node: yaml.Node, model: type[Model], name: str) -> Document[Model]:
    lines: dict[KeyPath, int] = {}
    problems = [f"{name}:{line}: {text}" for line, text in _walk(node, (), lines)]
    if problems:
        raise DocumentError(_listed(problems))
    try:
        value = yaml_tree.construct(node)
    except yaml.YAMLError as error:
        raise _not_yaml(name, error) from error
    if not isinstance(value, Mapping):
        raise DocumentError(f"{name}:{node.start_mark.line + 1}: expected a mapping of keys, found {_kind(value)}")
    return Document(name, validate(value, model, lambda path: f"{name}:{_line(lines, path)}"), lines)


def validate(value: Any, model: type[Model], place: Callable[[KeyPath], str]) -> Model:
    """`value` as `model`; `place` says where a key was given. Raises DocumentError with one line per mistake."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise DocumentError(
            _listed([_message(problem, model, place) for problem in error.errors(include_url=False)])
        ) from error


def _listed(problems: list[str]) -> str:
    more = len(problems) - _MOST_MESSAGES
    return "\n".join(problems[:_MOST_MESSAGES] + ([f"and {more} more mistakes"] if more > 0 else []))


def _walk(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int]) -> Iterator[tuple[int, str]]:
    """Note the line of every key; yield the line of each key that can't be used, and why."""
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                yield line, f"{_dotted(path) or 'document'}: a key must be a text, not a list or mapping"
                continue
            here = (*path, key.value)
            lines[here] = line
            if key.value in seen:
                yield line, f"{_dotted(here)}: duplicate key: remove one of the two"
            seen.add(key.value)
            yield from _walk(value, here, lines)
    elif isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            yield from _walk(item, (*path, position), lines)


def _message(problem: Any, model: type[BaseModel], place: Callable[[KeyPath], str]) -> str:
    path: KeyPath = tuple(step for step in problem["loc"] if step != "[key]")
    description = _description(model, path)
    if problem["type"] == "extra_forbidden":
        siblings = [field.alias or key for key, field in _section(model, path[:-1]).items()]
        text = f"unknown key: {did_you_mean(path[-1], siblings) if siblings else 'remove it'}"
    elif problem["type"] == "missing":
        text = f"missing: add it{f' ({description})' if description else ''}"
    else:
        text = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input ")
        if isinstance(problem.get("input"), str | int | float | bool):
            text += "" if _is_secret(model, path) else f", got {_cut(repr(problem['input']))}"
        text = text[:_LONGEST_MESSAGE] + (f"; it is: {description}" if description else "")
    return f"{place(path)}: {_dotted(path) or 'document'}: {_SECRET_IN_ADDRESS.sub(r'***', text)}"


def _section(model: type[BaseModel], path: KeyPath) -> Mapping[str, FieldInfo]:
    """The keys allowed at `path`, as far as the nested models define them."""
    current: type[BaseModel] | None = model
    for step in path:
        if isinstance(step, str) and current is not None:
            field = current.model_fields.get(step)
            current = next(_models_in(field.annotation), None) if field else None
    return current.model_fields if current else {}


def _description(model: type[BaseModel], path: KeyPath) -> str:
    """The description of the key at `path`, or of the list or map that contains it."""
    names = tuple(step for step in path if isinstance(step, str))
    for end in range(len(names), 0, -1):
        field = _section(model, names[: end - 1]).get(names[end - 1])
        if field and field.description:
            return field.description
    return ""


def _is_secret(model: type[BaseModel], path: KeyPath) -> bool:
    """Whether the value at `path` is a secret: it must not appear in a message."""
    names = tuple(step for step in path if isinstance(step, str))
    fields = (_section(model, names[:end]).get(names[end]) for end in range(len(names)))
    return any("Secret" in str(field.annotation) and not any(_models_in(field.annotation)) for field in fields if field)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)


def _dotted(path: KeyPath) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else _cut(str(step)) for step in path)
    return ".".join(steps).replace(".[", "[")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "…"


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    return "a list" if isinstance(value, list) else "a text" if isinstance(value, str) else type(value).__name__
