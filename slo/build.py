"""OpenSLO documents → objectives on single requests, and definitions for recording rules, in one pass over each SLO.

An SLO with `prefixwatch.dev/request-field` or `all-of` judges single requests: a load test grades it, and the exporter
counts it as `prefixwatch_slo_requests_total{slo, verdict}`, so its threshold does not have to be a bucket bound. Every
other SLO is read from its indicator: counters, or a histogram cut at one of its bucket bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from prefixwatch.documents import DocumentError, KeyPath, durations
from prefixwatch.slo import openslo, rule_model
from prefixwatch.slo.indicators import IndicatorReader, KnownMetrics
from prefixwatch.slo.objective import Condition, Objective, RequestField
from prefixwatch.slo.openslo import ALL_OF, REQUEST_FIELD, ObjectiveSpec, Window
from prefixwatch.slo.promql import Selector
from prefixwatch.slo.read import SHIPPED, Library, Slo, read, shipped_names
from prefixwatch.slo.rule_model import BurnCondition, Method, RatioIndicator, Slices, SloDefinition
from prefixwatch.slo.selection import CACHE_CLASSES, TURNS, Selection, parse_length
from prefixwatch.slo.window import MONTHS, CalendarPeriod, zone_offsets

__all__ = ["SHIPPED", "load_objectives", "load_request_objectives", "load_slos", "shipped_names"]

REQUEST_COUNTER = "prefixwatch_slo_requests_total"
REQUEST_SWITCH = (
    "give the exporter request records (a router of prefixwatch, spans, or probes) and name the SLO in exporter.slo"
)

_METHODS: Mapping[str, Method] = {
    "Occurrences": "occurrences",
    "Timeslices": "timeslices",
    "RatioTimeslices": "ratio_timeslices",
}
_SEVERITIES: Mapping[str, Literal["page", "ticket"]] = {"page": "page", "ticket": "ticket"}
_DAYS = {"d": 1, "w": 7}
_LAST_DAY_OF_ANY_MONTH = 28
_Value = TypeVar("_Value")


def load_objectives(names_or_paths: Iterable[str | Path]) -> list[Objective]:
    """Objectives of these documents, in order; a bare name is a shipped document.

    SLOs named in `prefixwatch.dev/all-of` are looked up among the given documents, then in the same folder, then among
    the shipped ones. Raises DocumentError, also for an SLO that does not judge single requests.
    """
    return [objective for reader in _readers(names_or_paths) for objective in reader.objectives()]


def load_request_objectives(names_or_paths: Iterable[str | Path]) -> list[Objective]:
    """`load_objectives` without the SLOs that do not judge single requests."""
    return [o for reader in _readers(names_or_paths) if reader.judges_requests for o in reader.objectives()]


def load_slos(names_or_paths: Iterable[str | Path], known: KnownMetrics | None = None) -> list[SloDefinition]:
    """Every objective of every SLO of these documents, for rules. Raises DocumentError.

    With `known`, metrics that begin with `prefixwatch_` must be among them, and so must their labels.
    """
    return [definition for reader in _readers(names_or_paths) for definition in reader.definitions(known)]


def _readers(names_or_paths: Iterable[str | Path]) -> list[_SloReader]:
    library = read(names_or_paths)
    return [_SloReader(source, library) for source in library.slos]


class _SloReader:
    """One SLO document; its objectives share everything but target and threshold."""

    def __init__(self, source: Slo, library: Library) -> None:
        self._source = source
        self._library = library
        self._spec = source.content.spec
        self._annotations = source.content.metadata.annotations
        self._name = source.content.metadata.name
        self._window = self._spec.timeWindow[0]
        self._check_thresholds()

    @property
    def judges_requests(self) -> bool:
        """Whether an annotation says how a single request is judged."""
        return bool(self._annotations.keys() & {REQUEST_FIELD, ALL_OF})

    def objectives(self) -> list[Objective]:
        """What single requests are judged by. Raises DocumentError."""
        self._check_request_slo()
        selection = self._selection()
        classes = tuple(_split(self._annotations.get(openslo.REQUEST_CLASS, "*")))
        return [
            Objective(
                name=self._objective_name(position),
                title=self._title(spec),
                service=self._spec.service,
                target=spec.ratio,
                conditions=self._conditions(spec),
                request_classes=classes,
                selection=selection,
            )
            for position, spec in enumerate(self._spec.objectives)
        ]

    def definitions(self, known: KnownMetrics | None) -> list[SloDefinition]:
        """The same objectives as recording rules need them. Raises DocumentError."""
        rules = [objective.rule for objective in self.objectives()] if self.judges_requests else None
        return [
            self._definition(position, spec, known, rules[position] if rules else None)
            for position, spec in enumerate(self._spec.objectives)
        ]

    def _definition(
        self, position: int, spec: ObjectiveSpec, known: KnownMetrics | None, request_rule: str | None
    ) -> SloDefinition:
        name = self._objective_name(position)
        if request_rule is None:
            indicator, words = IndicatorReader(self._source, self._library, known).read(position)
            rule, switch = f"{spec.ratio * 100:g} % of {self._of_slices(spec)}{words}", "see the runbook"
        else:
            total = Selector(REQUEST_COUNTER, (("slo", "=", name),))
            indicator = RatioIndicator(
                total, good=Selector(REQUEST_COUNTER, (*total.matchers, ("verdict", "=", "good")))
            )
            rule, switch = request_rule, REQUEST_SWITCH
        window_seconds = _seconds(self._window.duration)
        slices = self._slices(spec, position, window_seconds)
        least, least_bad = (
            (rule_model.MINIMUM_SLICES, rule_model.MINIMUM_BAD_SLICES)
            if slices
            else (rule_model.MINIMUM_EVENTS, rule_model.MINIMUM_BAD_EVENTS)
        )
        return SloDefinition(
            name=name,
            title=self._title(spec),
            service=self._spec.service,
            description=self._spec.description,
            target=spec.ratio,
            rule=rule,
            window_seconds=window_seconds,
            indicator=indicator,
            method=_METHODS[self._spec.budgetingMethod],
            slices=slices,
            calendar=self._calendar(self._window),
            conditions=tuple(self._burn_conditions(window_seconds)),
            minimum_events=self._count(openslo.MINIMUM_EVENTS, least),
            minimum_bad_events=self._count(openslo.MINIMUM_BAD_EVENTS, least_bad),
            zero_tolerance=self._choice(openslo.ZERO_TOLERANCE, {"true": True, "false": False}, default=False),
            severity_max=self._choice(openslo.SEVERITY_MAX, _SEVERITIES, default="page"),
            absent_alert=self._choice(openslo.ABSENT_ALERT, {"on": True, "off": False}, default=True),
            switch=self._annotations.get(openslo.SWITCH, switch),
            unknown_while=tuple(_split(self._annotations.get(openslo.UNKNOWN_WHILE, ""))),
            place=f"{self._source.name}:{self._source.line(('spec', 'objectives', position))}",
            notes=tuple(self._notes(spec)),
        )

    def _objective_name(self, position: int) -> str:
        """The SLO's name; with the objective's number if there are several."""
        return f"{self._name}/{position}" if len(self._spec.objectives) > 1 else self._name

    def _title(self, spec: ObjectiveSpec) -> str:
        return spec.displayName or self._source.content.metadata.displayName or self._name

    def _notes(self, spec: ObjectiveSpec) -> Iterable[str]:
        """What is interpreted differently from what the document says."""
        if spec.compositeWeight not in (None, 1.0):
            yield f"{self._name}: compositeWeight is not used: every objective has a budget and alerts of its own"
        for condition, document, key in self._library.conditions(self._source):
            if condition.condition.op in ("lt", "lte"):
                place = f"{document.name}:{document.line((*key, 'op'))}"
                yield (
                    f"{place}: op {condition.condition.op} is read as gte, as a budget that isn't spent needs no alert"
                )

    def _check_thresholds(self) -> None:
        """`op` and `value` belong to threshold indicators only.

        OpenSLO's own examples write `op: gt` beside ratios: that much is always meant.
        """
        for position, spec in enumerate(self._spec.objectives):
            indicator, _, _ = self._library.indicator(self._source, position)
            key = ("spec", "objectives", position)
            is_threshold = indicator.thresholdMetric is not None
            if is_threshold and (spec.op is None or spec.value is None):
                raise self._source.error(key, "a thresholdMetric needs op and value here: add them")
            if not is_threshold and (spec.value is not None or spec.op in ("lt", "lte")):
                text = "op and value belong to a thresholdMetric: take them out, or change the indicator"
                raise self._source.error(key, text)

    def _check_request_slo(self) -> None:
        if not self.judges_requests:
            raise self._annotation_error(
                None,
                "it doesn't say how one request is judged, so it can be used for rules but not to grade: give exactly "
                f"one of {REQUEST_FIELD} and {ALL_OF}",
            )
        if {REQUEST_FIELD, ALL_OF} <= self._annotations.keys():
            raise self._annotation_error(None, f"give exactly one of {REQUEST_FIELD} and {ALL_OF}")
        if self._spec.budgetingMethod != "Occurrences":
            raise self._source.error(
                ("spec", "budgetingMethod"),
                f"{self._spec.budgetingMethod} can't be judged request by request: use Occurrences, or take the "
                f"annotation {REQUEST_FIELD} out and use it for rules only",
            )

    def _conditions(self, spec: ObjectiveSpec) -> tuple[Condition, ...]:
        if ALL_OF in self._annotations:
            members = [self._member(name) for name in _split(self._annotations[ALL_OF])]
            return tuple(condition for member in members for condition in member)
        field = self._annotations[REQUEST_FIELD]
        if field not in set(RequestField):
            text = f"{field!r} is not a request metric: use one of {', '.join(RequestField)}"
            raise self._annotation_error(REQUEST_FIELD, text)
        if field == RequestField.COMPLETED:
            return (Condition(RequestField.COMPLETED, "gte", 1.0),)
        if spec.op is None or spec.value is None:
            text = f"{field} needs a threshold: make the indicator a thresholdMetric with op and value"
            raise self._annotation_error(REQUEST_FIELD, text)
        return (Condition(RequestField(field), spec.op, spec.value),)

    def _member(self, name: str) -> tuple[Condition, ...]:
        """The condition of an SLO that `all-of` names."""
        source, library = next((slo for slo in self._library.slos if slo.content.metadata.name == name), None), None
        if source is None:
            beside = Path(self._source.name).parent / f"{name}.yaml"
            path = beside if beside.is_file() else SHIPPED / f"{name}.yaml"
            if not path.is_file():
                text = f"no SLO named {name!r}: load it too, or name one of {', '.join(shipped_names())}"
                raise self._annotation_error(ALL_OF, text)
            library = read([path])
            if not library.slos:
                raise DocumentError(f"{path}:1: has no SLO, and {self._source.name} asks for {name!r} there")
            source = library.slos[0]
        member = _SloReader(source, library or self._library)
        if not member.judges_requests:
            text = f"{name!r} doesn't say how one request is judged: give it {REQUEST_FIELD}"
            raise self._annotation_error(ALL_OF, text)
        objectives = source.content.spec.objectives
        if ALL_OF in source.content.metadata.annotations or len(objectives) > 1:
            text = f"{name!r} must have one objective and no all-of of its own: name its parts instead"
            raise self._annotation_error(ALL_OF, text)
        return member._conditions(objectives[0])

    def _selection(self) -> Selection:
        """Which requests the annotations select."""
        low, high = -1.0, math.inf
        if openslo.PROMPT_LENGTH in self._annotations:
            try:
                low, high = parse_length(self._annotations[openslo.PROMPT_LENGTH])
            except ValueError as error:
                raise self._annotation_error(openslo.PROMPT_LENGTH, str(error)) from error
        caches = tuple(_split(self._annotations.get(openslo.CACHE, "")))
        for name in caches:
            if name not in CACHE_CLASSES:
                text = f"{name!r} is not a cache class: use {', '.join(CACHE_CLASSES)}"
                raise self._annotation_error(openslo.CACHE, text)
        turn = self._annotations.get(openslo.SESSION_TURN)
        if turn is not None and turn not in TURNS:
            raise self._annotation_error(openslo.SESSION_TURN, f"{turn!r} is not a turn: use {' or '.join(TURNS)}")
        return Selection(
            tenants=tuple(_split(self._annotations.get(openslo.TENANT, "*"))),
            above_tokens=low,
            up_to_tokens=high,
            caches=caches,
            turn=None if turn is None else "first" if turn == "first" else "later",
        )

    def _slices(self, spec: ObjectiveSpec, position: int, window_seconds: int) -> Slices | None:
        key: KeyPath = ("spec", "objectives", position)
        method = self._spec.budgetingMethod
        if method == "Occurrences":
            if spec.timeSliceTarget is not None or spec.timeSliceWindow is not None:
                text = "timeSliceTarget and timeSliceWindow belong to Timeslices: take them out"
                raise self._source.error(key, text)
            return None
        if spec.timeSliceWindow is None:
            raise self._source.error(key, f"{method} needs timeSliceWindow here, such as 5m: add it")
        if method == "Timeslices" and spec.timeSliceTarget is None:
            raise self._source.error(key, "Timeslices needs timeSliceTarget here, such as 0.95: add it")
        length = _seconds(spec.timeSliceWindow)
        if length < 60 or length > 3600 or 3600 % length:
            text = f"{spec.timeSliceWindow} doesn't divide an hour into slices of 1 to 60 minutes: use 1m, 5m or 10m"
            raise self._source.error((*key, "timeSliceWindow"), text)
        if length * 10 > window_seconds:
            text = f"a slice of {spec.timeSliceWindow} is over a tenth of the window: shorten it"
            raise self._source.error((*key, "timeSliceWindow"), text)
        return Slices(length, spec.timeSliceTarget or 0.0)

    def _of_slices(self, spec: ObjectiveSpec) -> str:
        """How a rule in words begins where time slices are counted."""
        if self._spec.budgetingMethod != "Timeslices" or spec.timeSliceTarget is None:
            return ""
        return f"time slices of {spec.timeSliceWindow}, each good from {spec.timeSliceTarget * 100:g} % of "

    def _calendar(self, window: Window) -> CalendarPeriod | None:
        if window.calendar is None:
            return None
        key: KeyPath = ("spec", "timeWindow", 0)
        count, unit = int(window.duration[:-1]), window.duration[-1]
        days, months = count * _DAYS.get(unit, 0), count * MONTHS.get(unit, 0)
        if not days and not months:
            text = f"{window.duration} is not a calendar window: use d, w, M (months), Q or Y"
            raise self._source.error((*key, "duration"), text)
        try:
            start = datetime.fromisoformat(window.calendar.startTime)
        except ValueError as error:
            text = f"{window.calendar.startTime!r} {error}"
            raise self._source.error((*key, "calendar", "startTime"), text) from error
        try:
            first, changes = zone_offsets(ZoneInfo(window.calendar.timeZone))
        except (ZoneInfoNotFoundError, ValueError) as error:
            text = f"{window.calendar.timeZone!r} is not an IANA time zone: write UTC or Europe/Berlin"
            raise self._source.error((*key, "calendar", "timeZone"), text) from error
        if months and start.day > _LAST_DAY_OF_ANY_MONTH:
            text = f"a period of months can't start on day {start.day}, which some months lack: use 1 to 28"
            raise self._source.error((*key, "calendar", "startTime"), text)
        return CalendarPeriod(days, months, int(start.replace(tzinfo=UTC).timestamp()), first, changes)

    def _burn_conditions(self, window_seconds: int) -> Iterable[BurnCondition]:
        for spec, document, key in self._library.conditions(self._source):
            condition = spec.condition
            length = _seconds(condition.lookbackWindow)
            if length >= window_seconds:
                text = f"{condition.lookbackWindow} is as long as the SLO's window: use a shorter one"
                raise document.error((*key, "lookbackWindow"), text)
            yield BurnCondition(
                factor=condition.threshold,
                long_seconds=length,
                severity="page" if spec.severity.lower() in ("page", "critical", "high") else "ticket",
                hold_seconds=_seconds(condition.alertAfter or "0s"),
                place=f"{document.name}:{document.line((*key, 'threshold'))}",
            )

    def _count(self, annotation: str, default: float) -> float:
        given = self._annotations.get(annotation)
        if given is None:
            return default
        try:
            value = float(given)
        except ValueError as error:
            text = f"{given!r} is not a number: give a number of events"
            raise self._annotation_error(annotation, text) from error
        if not value > 0 or math.isinf(value):
            raise self._annotation_error(annotation, f"{given} must be a number of events greater than 0")
        return value

    def _choice(self, annotation: str, choices: Mapping[str, _Value], *, default: _Value) -> _Value:
        given = self._annotations.get(annotation)
        if given is None:
            return default
        if given not in choices:
            raise self._annotation_error(annotation, f"{given!r}: use {' or '.join(choices)}, in quotes")
        return choices[given]

    def _annotation_error(self, annotation: str | None, text: str) -> DocumentError:
        key = ("metadata", "annotations")
        return self._source.error(key if annotation is None else (*key, annotation), text)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _seconds(duration: str) -> int:
    return round(durations.seconds(duration, durations.NOMINAL))
