"""SLOs as objectives on single requests: what a load test grades and the exporter counts.

What OpenSLO has no field for is an annotation (`slo.openslo.ANNOTATIONS`). A threshold stands in its document
alone: a goodput document names the SLOs whose conditions it joins and restates none of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from documents import DocumentError
from slo.library import SHIPPED, Library, Slo, read, shipped_names
from slo.objective import Condition, Objective, RequestField, TimeWindow
from slo.openslo import (
    ALL_OF,
    CACHE,
    PROMPT_LENGTH,
    REQUEST_CLASS,
    REQUEST_FIELD,
    SESSION_TURN,
    TENANT,
    ObjectiveSpec,
)
from slo.selection import CACHE_CLASSES, TURNS, Selection, parse_length

__all__ = ["SHIPPED", "is_request_slo", "load_objectives", "load_request_objectives", "shipped_names"]


def load_objectives(names_or_paths: Iterable[str | Path]) -> list[Objective]:
    """Objectives of these documents, in order; a bare name is a shipped document.

    SLOs that `prefixwatch.dev/all-of` names are looked for among the documents given, then in the same
    folder, then among the shipped ones. Raises DocumentError, also for an SLO that single requests can't be
    judged by.
    """
    library = read(names_or_paths)
    return [objective for source in library.slos for objective in objectives_of(source, library)]


def load_request_objectives(names_or_paths: Iterable[str | Path]) -> list[Objective]:
    """`load_objectives` of those documents that single requests can be judged by; the others are left out."""
    library = read(names_or_paths)
    return [o for source in library.slos if is_request_slo(source) for o in objectives_of(source, library)]


def is_request_slo(source: Slo) -> bool:
    """Whether an annotation says how a single request is judged."""
    return bool(source.content.metadata.annotations.keys() & {REQUEST_FIELD, ALL_OF})


def objective_name(source: Slo, position: int) -> str:
    """The SLO's name; with the objective's number where it has several."""
    name = source.content.metadata.name
    return f"{name}/{position}" if len(source.content.spec.objectives) > 1 else name


def objectives_of(source: Slo, library: Library) -> list[Objective]:
    """One SLO's objectives. Raises DocumentError."""
    document = source.content
    _check_request_slo(source)
    if document.spec.budgetingMethod != "Occurrences":
        raise source.error(
            ("spec", "budgetingMethod"),
            f"{document.spec.budgetingMethod} can't be judged request by request: use Occurrences, or take the "
            f"annotation {REQUEST_FIELD} out and use it for rules only",
        )
    check_thresholds(source, library)
    window = document.spec.timeWindow[0]
    classes = document.metadata.annotations.get(REQUEST_CLASS, "*")
    selection = selection_of(source)
    title = document.metadata.displayName or document.metadata.name
    return [
        Objective(
            name=objective_name(source, position),
            title=spec.displayName or title,
            service=document.spec.service,
            target=spec.ratio,
            conditions=_conditions(source, spec, library),
            window=TimeWindow(window.duration, window.isRolling),
            request_classes=tuple(_split(classes)),
            selection=selection,
        )
        for position, spec in enumerate(document.spec.objectives)
    ]


def check_thresholds(source: Slo, library: Library) -> None:
    """`op` and `value` stand where the indicator is a threshold, and only there.

    OpenSLO's own examples write `op: gt` beside ratios: that much is always meant.
    """
    for position, spec in enumerate(source.content.spec.objectives):
        indicator, _, _ = library.indicator(source, position)
        key = ("spec", "objectives", position)
        is_threshold = indicator.thresholdMetric is not None
        if is_threshold and (spec.op is None or spec.value is None):
            raise source.error(key, "a thresholdMetric needs op and value here: add them")
        if not is_threshold and (spec.value is not None or spec.op in ("lt", "lte")):
            raise source.error(key, "op and value belong to a thresholdMetric: take them out, or change the indicator")


def selection_of(source: Slo) -> Selection:
    """Which requests the annotations pick out. Raises DocumentError."""
    annotations = source.content.metadata.annotations
    low, high = -1.0, math.inf
    if PROMPT_LENGTH in annotations:
        try:
            low, high = parse_length(annotations[PROMPT_LENGTH])
        except ValueError as error:
            raise source.error(("metadata", "annotations", PROMPT_LENGTH), str(error)) from error
    caches = tuple(_split(annotations.get(CACHE, "")))
    for name in caches:
        if name not in CACHE_CLASSES:
            text = f"{name!r} is no cache class: use {', '.join(CACHE_CLASSES)}"
            raise source.error(("metadata", "annotations", CACHE), text)
    turn = annotations.get(SESSION_TURN)
    if turn is not None and turn not in TURNS:
        text = f"{turn!r} is no turn: use {' or '.join(TURNS)}"
        raise source.error(("metadata", "annotations", SESSION_TURN), text)
    return Selection(
        tenants=tuple(_split(annotations.get(TENANT, "*"))),
        above_tokens=low,
        up_to_tokens=high,
        caches=caches,
        turn=None if turn is None else "first" if turn == "first" else "later",
    )


def _check_request_slo(source: Slo) -> None:
    given = source.content.metadata.annotations.keys() & {REQUEST_FIELD, ALL_OF}
    if not given:
        raise source.error(
            ("metadata", "annotations"),
            "it doesn't say how one request is judged, so it can be used for rules but not to grade: give exactly one "
            f"of {REQUEST_FIELD} and {ALL_OF}",
        )
    if len(given) != 1:
        raise source.error(("metadata", "annotations"), f"give exactly one of {REQUEST_FIELD} and {ALL_OF}")


def _conditions(source: Slo, spec: ObjectiveSpec, library: Library) -> tuple[Condition, ...]:
    annotations = source.content.metadata.annotations
    if ALL_OF in annotations:
        members = [_member(source, name, library) for name in _split(annotations[ALL_OF])]
        return tuple(condition for member in members for condition in member)
    field = annotations[REQUEST_FIELD]
    key = ("metadata", "annotations", REQUEST_FIELD)
    if field not in set(RequestField):
        raise source.error(key, f"{field!r} is no figure of a request: use one of {', '.join(RequestField)}")
    if field == RequestField.COMPLETED:
        return (Condition(RequestField.COMPLETED, "gte", 1.0),)
    if spec.op is None or spec.value is None:
        raise source.error(key, f"{field} needs a threshold: make the indicator a thresholdMetric with op and value")
    return (Condition(RequestField(field), spec.op, spec.value),)


def _member(source: Slo, name: str, library: Library) -> tuple[Condition, ...]:
    key = ("metadata", "annotations", ALL_OF)
    member, among = next((slo for slo in library.slos if slo.content.metadata.name == name), None), library
    if member is None:
        beside = Path(source.name).parent / f"{name}.yaml"
        path = beside if beside.is_file() else SHIPPED / f"{name}.yaml"
        if not path.is_file():
            raise source.error(key, f"no SLO named {name!r}: load it too, or name one of {', '.join(shipped_names())}")
        among = read([path])
        if not among.slos:
            raise DocumentError(f"{path}:1: has no SLO, and {source.name} asks for {name!r} there")
        member = among.slos[0]
    if not is_request_slo(member):
        raise source.error(key, f"{name!r} doesn't say how one request is judged: give it {REQUEST_FIELD}")
    check_thresholds(member, among)
    specs = member.content.spec.objectives
    if ALL_OF in member.content.metadata.annotations or len(specs) > 1:
        raise source.error(key, f"{name!r} must have one objective and no all-of of its own: name its parts instead")
    return _conditions(member, specs[0], among)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
