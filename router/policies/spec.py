"""A policy with its options as text, `loadaware{beta=0.5}`, and files of named variants.

    spec      = [ label ":" ] name [ "{" option "=" value { "," option "=" value } "}" ]
    specs     = spec { "," spec }

Values are YAML: numbers, `true`, text, lists, maps. The label is what results call it: by default the text itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import Field

from prefixwatch.documents import load
from prefixwatch.documents.section import Section

_SPEC = re.compile(r"(?:(?P<label>[\w.-]+)\s*:)?\s*(?P<name>[\w-]+)\s*(?:\{(?P<options>.*)\})?", re.DOTALL)
_OPTION = re.compile(r"\s*(\w+)\s*=\s*(.+?)\s*", re.DOTALL)


class PolicySpec(NamedTuple):
    """A policy, its options, and what results call it."""

    label: str
    name: str
    options: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The spec as text that `parse_spec` reads back, label included."""
        if not _is_word(self.label):
            return self.label
        options = ",".join(f"{key}={json.dumps(value)}" for key, value in self.options.items())
        spec = f"{self.name}{{{options}}}" if options else self.name
        return spec if spec == self.label else f"{self.label}:{spec}"


class _Variant(Section):
    policy: str
    options: dict[str, Any] = Field(default_factory=dict)


class _Variants(Section):
    policies: dict[str, _Variant] = Field(min_length=1)


def parse_spec(text: str) -> PolicySpec:
    """Read one spec. Raises ValueError, which says what is wrong with it."""
    found = _SPEC.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"'{text}' is not a policy: write name or name{{option=value,…}}")
    options: dict[str, Any] = {}
    shown = []
    for part in split(found["options"] or ""):
        option = _OPTION.fullmatch(part)
        if option is None:
            raise ValueError(f"'{part.strip()}' in '{text}' is not an option: write option=value")
        key, value = option.groups()
        if key in options:
            raise ValueError(f"option '{key}' is given twice in '{text}'")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"the value of option '{key}' in '{text}' can't be read") from error
        shown.append(f"{key}={value}")
    name = found["name"]
    return PolicySpec(found["label"] or (f"{name}{{{','.join(shown)}}}" if shown else name), name, options)


def split(text: str) -> list[str]:
    """The parts between commas that are outside of brackets and quotes; none that is empty."""
    return [part.strip() for part in _parts(text) if part.strip()]


def read_variants(file: Path) -> list[PolicySpec]:
    """The named variants of a `policies.yaml`. Raises DocumentError."""
    document = load(file, _Variants)
    return [PolicySpec(label, own.policy, own.options) for label, own in document.policies.items()]


def _parts(text: str) -> Iterator[str]:
    depth, quote, start, escaped = 0, "", 0, False
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote and not escaped else quote
            escaped = quote == '"' and character == "\\" and not escaped
        elif character in "\"'":
            quote = character
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
        elif character == "," and depth <= 0:
            yield text[start:position]
            start = position + 1
    yield text[start:]


def _is_word(label: str) -> bool:
    return re.fullmatch(r"[\w.-]+", label) is not None
