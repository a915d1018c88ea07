"""Relabelling as Prometheus does it, reduced to the actions that choose and name targets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from prefixwatch.exporters.http.client_config import Strict

Labels = dict[str, str]

_GROUP = re.compile(r"\$(?:\$|(\d+)|\{(\w+)\}|([A-Za-z_]\w*))")


class RelabelRule(Strict):
    """One step. Regular expressions match whole values."""

    source_labels: tuple[str, ...] = Field(default=(), description="labels whose values are joined and matched")
    separator: str = Field(default=";", description="between the joined values")
    regex: str = Field(default="(.*)", description="what the joined values must be, from end to end")
    target_label: str = Field(default="", description="the label that replace writes")
    replacement: str = Field(default="$1", description="what is written; $1 is the first group")
    action: Literal["replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep"] = Field(
        default="replace", description="what a match does"
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        try:
            re.compile(self.regex)
        except re.error as error:
            raise ValueError(f"regex '{self.regex}' is not a regular expression: {error}") from error
        if self.action == "replace" and not self.target_label:
            raise ValueError("replace needs target_label, the label to write")
        if self.action in ("keep", "drop") and not self.source_labels:
            raise ValueError(f"{self.action} needs source_labels, the labels to look at")
        return self


def relabel(labels: Mapping[str, str], rules: Sequence[RelabelRule]) -> Labels | None:
    """The labels after all rules, None when one of them drops the target. Empty values are no labels."""
    current = {name: value for name, value in labels.items() if value}
    for rule in rules:
        if not _apply(rule, current):
            return None
    return current


def _apply(rule: RelabelRule, labels: Labels) -> bool:
    """Change `labels` by one rule; False when the target is dropped."""
    regex = re.compile(rule.regex, re.DOTALL)  # compiled once: the re module remembers
    if rule.action in ("labelmap", "labeldrop", "labelkeep"):
        _apply_to_names(rule, regex, labels)
        return True
    match = regex.fullmatch(rule.separator.join(labels.get(name, "") for name in rule.source_labels))
    if rule.action == "keep":
        return match is not None
    if rule.action == "drop":
        return match is None
    if match is not None:
        name, value = _expand(rule.target_label, match), _expand(rule.replacement, match)
        if value:
            labels[name] = value
        else:
            labels.pop(name, None)
    return True


def _apply_to_names(rule: RelabelRule, regex: re.Pattern[str], labels: Labels) -> None:
    for name, value in list(labels.items()):
        match = regex.fullmatch(name)
        if rule.action == "labelmap":
            if match is not None:
                labels[_expand(rule.replacement, match)] = value
        elif (match is None) == (rule.action == "labelkeep"):
            del labels[name]


def _expand(template: str, match: re.Match[str]) -> str:
    """`$1`, `${1}`, `${name}` by the match's groups; `$$` is a dollar; a group that isn't there is empty."""

    def group(reference: re.Match[str]) -> str:
        number, braced, name = reference.groups()
        key = number or braced or name
        if key is None:
            return "$"
        try:
            return match.group(int(key) if key.isdigit() else key) or ""
        except IndexError:
            return ""

    return _GROUP.sub(group, template)
