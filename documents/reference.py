"""Tables of a model's keys in Markdown, for references that are generated from the models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from prefixwatch.documents.durations import READS_DURATIONS

_NAMES: Mapping[Any, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    Path: "file",
    SecretStr: "secret text",
}


class Reference:
    """The keys of a model and of all models below it.

    `named` models have a name of their own, and are explained elsewhere on the page. A model that is used at several
    places is explained at the first one; the others refer to it.
    """

    def __init__(self, model: type[BaseModel], named: Mapping[Any, str] | None = None) -> None:
        self._names = {**_NAMES, **(named or {})}
        self.sections: dict[str, type[BaseModel]] = dict(self._found("", model, {}))
        """By path of keys, such as `targets[].tls_config`."""
        self._places = {model: path for path, model in self.sections.items()}

    def _found(
        self, path: str, model: type[BaseModel], seen: dict[type[BaseModel], str]
    ) -> Iterator[tuple[str, type[BaseModel]]]:
        if model in seen:
            return
        seen[model] = path
        yield path, model
        for name, field in model.model_fields.items():
            for inner, suffix in _models(field.annotation):
                if inner not in self._names:
                    yield from self._found(f"{path}.{field.alias or name}{suffix}".strip("."), inner, seen)

    def markdown(self) -> str:
        return "\n".join(self._section(path, model) for path, model in self.sections.items())

    def _section(self, path: str, model: type[BaseModel]) -> str:
        title = f"### `{path}`" if path else "### Top level"
        rows = "".join(self._row(path, name, field) for name, field in model.model_fields.items())
        return f"{title}\n\n{cleandoc(model.__doc__ or '')}\n\n| key | value | default | |\n|---|---|---|---|\n{rows}"

    def _row(self, path: str, name: str, field: FieldInfo) -> str:
        key = field.alias or name
        bounds = ", ".join(_bound(constraint) for constraint in field.metadata if _bound(constraint))
        kind = (
            "duration"
            if READS_DURATIONS in field.metadata
            else self._kind(field.annotation, f"{path}.{key}".strip("."))
        )
        text = " ".join((field.description or "").replace("|", "\\|").split())
        return f"| `{key}` | {kind + (f', {bounds}' if bounds else '')} | {_default(field)} | {text} |\n"

    def _kind(self, annotation: Any, path: str) -> str:
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Literal:
            return " \\| ".join(f"`{argument}`" for argument in arguments)
        inner = [self._kind(argument, path) for argument in arguments if argument not in (type(None), ...)]
        if origin is None:
            place = self._places.get(annotation)
            if place is None:
                return self._names.get(annotation, "any value")
            return "keys, see below" if place.removesuffix("[]").removesuffix(".*") == path else f"keys as in `{place}`"
        forms = {list: "list of {}", tuple: "list of {}", dict: "map of {} to {}", Annotated: "{}"}
        return forms.get(origin, " or ".join(dict.fromkeys(inner))).format(*inner)


def _models(annotation: Any, suffix: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, suffix
    marks = {list: "[]", tuple: "[]", dict: ".*"}
    for argument in get_args(annotation):
        yield from _models(argument, suffix or marks.get(get_origin(annotation), ""))


def _bound(constraint: Any) -> str:
    for attribute, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
        if (value := getattr(constraint, attribute, None)) is not None:
            return f"{sign} {value:,.15g}".replace(",", "")
    return ""


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required" if field.is_required() else ""
    if value is None or isinstance(value, BaseModel) or value in ("", [], {}, ()):
        return ""
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"
