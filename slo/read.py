"""OpenSLO files read together: documents by kind and name, with the references between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from prefixwatch.documents import Document, DocumentError, KeyPath, load_kinds
from prefixwatch.documents.hints import did_you_mean
from prefixwatch.slo.openslo import (
    KINDS,
    AlertConditionDocument,
    AlertConditionInline,
    AlertConditionSpec,
    AlertPolicyDocument,
    AlertPolicyInline,
    AlertPolicySpec,
    DataSourceDocument,
    IndicatorSpec,
    MetricSource,
    SliDocument,
    SloDocument,
    Top,
)

SHIPPED = Path(__file__).parent / "objectives"
ON_ENGINES = SHIPPED / "engines"
"""Those on what engines measure themselves."""

Slo = Document[SloDocument]
_Kind = TypeVar("_Kind", bound=Top)


def shipped_names() -> list[str]:
    """Names of the shipped documents."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def locate(item: str | Path) -> Path:
    """A file, or the shipped document of this name. Raises DocumentError."""
    path = Path(item)
    if path.is_file():
        return path
    if path.name == str(item):
        for shipped in (SHIPPED / f"{item}.yaml", ON_ENGINES / f"{item}.yaml"):
            if shipped.is_file():
                return shipped
    known = ", ".join((*shipped_names(), *(each.stem for each in sorted(ON_ENGINES.glob("*.yaml")))))
    raise DocumentError(f"{item}: no such SLO document: give a file, or one of {known}")


@dataclass(frozen=True, slots=True)
class Library:
    """Documents in the order they were read; names are unique within a kind."""

    documents: list[Document[Any]] = field(default_factory=list)

    @property
    def slos(self) -> list[Slo]:
        return [document for document in self.documents if isinstance(document.content, SloDocument)]

    def find(self, kind: type[_Kind], name: str) -> Document[_Kind] | None:
        found = (d for d in self.documents if isinstance(d.content, kind) and d.content.metadata.name == name)
        return next(found, None)

    def indicator(self, source: Slo, position: int) -> tuple[IndicatorSpec, Document[Any], KeyPath]:
        """The indicator of an objective and its place: inline, in its SLO, or in an SLI document."""
        spec, key = source.content.spec, ("spec", "objectives", position)
        own = spec.objectives[position]
        if own.indicator is not None:
            return own.indicator.spec, source, (*key, "indicator", "spec")
        if own.indicatorRef is not None:
            return self._referred(source, own.indicatorRef, (*key, "indicatorRef"))
        if spec.indicator is not None:
            return spec.indicator.spec, source, ("spec", "indicator", "spec")
        if spec.indicatorRef is not None:
            return self._referred(source, spec.indicatorRef, ("spec", "indicatorRef"))
        raise source.error(key, "has no indicator: add one here, or give the whole SLO one")

    def _referred(self, source: Slo, name: str, key: KeyPath) -> tuple[IndicatorSpec, Document[Any], KeyPath]:
        document = self.find(SliDocument, name)
        if document is None:
            raise source.error(key, self._missing(SliDocument, "SLI", name))
        return document.content.spec, document, ("spec",)

    def source_type(self, source: Document[Any], metric: MetricSource, key: KeyPath) -> str:
        """The system that a query is for, in lower case; empty if the document does not say."""
        if metric.metricSourceRef is None:
            return (metric.type or "").lower()
        found = self.find(DataSourceDocument, metric.metricSourceRef)
        if found is None and metric.type is None:
            text = self._missing(DataSourceDocument, "DataSource", metric.metricSourceRef)
            raise source.error((*key, "metricSourceRef"), f"{text}, or give type: Prometheus")
        return (metric.type or (found.content.spec.type if found else "")).lower()

    def conditions(self, source: Slo) -> list[tuple[AlertConditionSpec, Document[Any], KeyPath]]:
        """Burn-rate conditions of the SLO's alert policies, with the place of each."""
        found = []
        for position, item in enumerate(source.content.spec.alertPolicies):
            policy, document, key = self._policy(source, item, ("spec", "alertPolicies", position))
            for place, condition in enumerate(policy.conditions):
                found.append(self._condition(document, condition, (*key, "conditions", place)))
        return found

    def _policy(
        self, source: Slo, item: str | AlertPolicyInline, key: KeyPath
    ) -> tuple[AlertPolicySpec, Document[Any], KeyPath]:
        if isinstance(item, AlertPolicyInline) and item.spec is not None:
            return item.spec, source, (*key, "spec")
        name = item if isinstance(item, str) else item.alertPolicyRef
        document = self.find(AlertPolicyDocument, name or "")
        if name is None or document is None:
            raise source.error(key, self._missing(AlertPolicyDocument, "AlertPolicy", name or ""))
        return document.content.spec, document, ("spec",)

    def _condition(
        self, document: Document[Any], item: AlertConditionInline, key: KeyPath
    ) -> tuple[AlertConditionSpec, Document[Any], KeyPath]:
        if item.spec is not None:
            return item.spec, document, (*key, "spec", "condition")
        found = self.find(AlertConditionDocument, item.conditionRef or "")
        if found is None:
            raise document.error(key, self._missing(AlertConditionDocument, "AlertCondition", item.conditionRef or ""))
        return found.content.spec, found, ("spec", "condition")

    def _missing(self, kind: type[Top], title: str, name: str) -> str:
        known = [d.content.metadata.name for d in self.documents if isinstance(d.content, kind)]
        hint = did_you_mean(name, known, f"load the file that has it (read so far: {', '.join(known) or 'none'})")
        return f"no {title} named {name!r}: {hint}"


def read(items: Iterable[str | Path]) -> Library:
    """All documents of these files or shipped names. Raises DocumentError."""
    documents: list[Document[Any]] = []
    for item in items:
        path = locate(item)
        found = load_kinds(path, KINDS)
        if not found:
            raise DocumentError(f"{path}:1: empty: write an OpenSLO v1 document of kind SLO")
        documents += found
    _refuse_duplicates(documents)
    return Library(documents)


def _refuse_duplicates(documents: Iterable[Document[Any]]) -> None:
    seen: dict[tuple[str, str], Document[Any]] = {}
    for source in documents:
        name = source.content.metadata.name
        first = seen.setdefault((source.content.kind, name), source)
        if first is not source:
            where = f"{first.name}:{first.line(('metadata', 'name'))}"
            raise source.error(("metadata", "name"), f"{name!r} is taken by {where}: rename one of them")
