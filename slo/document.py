"""Reads SLO documents: OpenSLO v1 YAML in, frozen objectives out; every fault with file, line, key and remedy.

What OpenSLO has no field for is an annotation (`slo.openslo.ANNOTATIONS`). A threshold stands in its document
alone: a goodput document names the SLOs whose conditions it joins and restates none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from documents import Document, DocumentError, load_all
from slo.objective import Condition, Objective, RequestField, TimeWindow
from slo.openslo import ALL_OF, REQUEST_CLASS, REQUEST_FIELD, ObjectiveSpec, SloDocument

SHIPPED = Path(__file__).parent / "objectives"

_Source = Document[SloDocument]


def shipped_names() -> list[str]:
    """Names that `load_objectives` finds without a path."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_objectives(names_or_paths: Iterable[str | Path]) -> list[Objective]:
    """Objectives of these documents, in order; a bare name is a shipped document.

    SLOs that `prefixwatch.dev/all-of` names are looked for among the documents given, then in the same
    folder, then among the shipped ones. Raises DocumentError.
    """
    sources = [source for item in names_or_paths for source in _read(_locate(item))]
    for source in sources:
        _check_consistent(source)
    _refuse_duplicates(sources)
    by_name = {source.content.metadata.name: source for source in sources}
    return [objective for source in sources for objective in _objectives(source, by_name)]


def _locate(item: str | Path) -> Path:
    path = Path(item)
    if path.is_file():
        return path
    shipped = SHIPPED / f"{item}.yaml"
    if path.name == str(item) and shipped.is_file():
        return shipped
    raise DocumentError(f"{item}: no such SLO document: give a file, or one of {', '.join(shipped_names())}")


def _read(path: Path) -> list[_Source]:
    sources = load_all(path, SloDocument)
    if not sources:
        raise DocumentError(f"{path}:1: empty: write an OpenSLO v1 document of kind SLO")
    return sources


def _check_consistent(source: _Source) -> None:
    """What spans several keys of a document."""
    document = source.content
    given = document.metadata.annotations.keys() & {REQUEST_FIELD, ALL_OF}
    if len(given) != 1:
        raise source.error(("metadata", "annotations"), f"give exactly one of {REQUEST_FIELD} and {ALL_OF}")
    is_threshold = document.spec.indicator.spec.thresholdMetric is not None
    for position, spec in enumerate(document.spec.objectives):
        key = ("spec", "objectives", position)
        if is_threshold and (spec.op is None or spec.value is None):
            raise source.error(key, "a thresholdMetric needs op and value here: add them")
        if not is_threshold and (spec.op is not None or spec.value is not None):
            raise source.error(key, "op and value belong to a thresholdMetric: take them out, or change the indicator")


def _refuse_duplicates(sources: Sequence[_Source]) -> None:
    seen: dict[str, _Source] = {}
    for source in sources:
        name = source.content.metadata.name
        if name in seen:
            where = f"{seen[name].name}:{seen[name].line(('metadata', 'name'))}"
            raise source.error(("metadata", "name"), f"{name!r} is taken by {where}: rename one of them")
        seen[name] = source


def _objectives(source: _Source, by_name: dict[str, _Source]) -> list[Objective]:
    document = source.content
    window = document.spec.timeWindow[0]
    classes = document.metadata.annotations.get(REQUEST_CLASS, "*")
    title = document.metadata.displayName or document.metadata.name
    several = len(document.spec.objectives) > 1
    return [
        Objective(
            name=f"{document.metadata.name}/{position}" if several else document.metadata.name,
            title=spec.displayName or title,
            service=document.spec.service,
            target=spec.ratio,
            conditions=_conditions(source, spec, by_name),
            window=TimeWindow(window.duration, window.isRolling),
            request_classes=tuple(_split(classes)),
        )
        for position, spec in enumerate(document.spec.objectives)
    ]


def _conditions(source: _Source, spec: ObjectiveSpec, by_name: dict[str, _Source]) -> tuple[Condition, ...]:
    annotations = source.content.metadata.annotations
    if ALL_OF in annotations:
        members = [_member(source, name, by_name) for name in _split(annotations[ALL_OF])]
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


def _member(source: _Source, name: str, by_name: dict[str, _Source]) -> tuple[Condition, ...]:
    key = ("metadata", "annotations", ALL_OF)
    beside = Path(source.name).parent / f"{name}.yaml"
    member = by_name.get(name)
    if member is None:
        path = beside if beside.is_file() else SHIPPED / f"{name}.yaml"
        if not path.is_file():
            raise source.error(key, f"no SLO named {name!r}: load it too, or name one of {', '.join(shipped_names())}")
        member = _read(path)[0]
        _check_consistent(member)
    specs = member.content.spec.objectives
    if ALL_OF in member.content.metadata.annotations or len(specs) > 1:
        raise source.error(key, f"{name!r} must have one objective and no all-of of its own: name its parts instead")
    return _conditions(member, specs[0], by_name)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
