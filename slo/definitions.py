"""OpenSLO documents → `SloDefinition`s, for recording rules and alerts.

An SLO that single requests are judged by is counted by the exporter, request by request, as
`prefixwatch_slo_requests_total{slo, verdict}`; so its threshold need not be a bucket bound. Every other SLO is read
from its indicator: counters, or a histogram cut at one of its bucket bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from documents import KeyPath
from slo import definition
from slo.definition import BurnCondition, Method, RatioIndicator, Slices, SloDefinition
from slo.document import check_thresholds, is_request_slo, objective_name, objectives_of
from slo.indicators import IndicatorReader, KnownMetrics
from slo.library import Library, Slo, read
from slo.openslo import (
    ABSENT_ALERT,
    MINIMUM_BAD_EVENTS,
    MINIMUM_EVENTS,
    SWITCH,
    UNKNOWN_WHILE,
    ZERO_TOLERANCE,
    ObjectiveSpec,
    Window,
)
from slo.promql import Selector
from slo.window import MONTHS, CalendarPeriod, seconds, zone_offsets

REQUEST_COUNTER = "prefixwatch_slo_requests_total"
REQUEST_SWITCH = (
    "give the exporter request records (a router of prefixwatch, spans, or probes) and name the SLO in exporter.slo"
)

_METHODS: Mapping[str, Method] = {
    "Occurrences": "occurrences",
    "Timeslices": "timeslices",
    "RatioTimeslices": "ratio_timeslices",
}

_DAYS = {"d": 1, "w": 7}
_LAST_DAY_OF_ANY_MONTH = 28


def load_slos(names_or_paths: Iterable[str | Path], known: KnownMetrics | None = None) -> list[SloDefinition]:
    """Every objective of every SLO of these documents, for rules. Raises DocumentError.

    With `known`, metrics that begin with `prefixwatch_` must be among them, and so must their labels.
    """
    library = read(names_or_paths)
    return [definition for source in library.slos for definition in _definitions(source, library, known)]


def _definitions(source: Slo, library: Library, known: KnownMetrics | None) -> list[SloDefinition]:
    check_thresholds(source, library)
    count = len(source.content.spec.objectives)
    rules: list[str | None] = [None] * count
    if is_request_slo(source):
        rules = [objective.rule for objective in objectives_of(source, library)]
    return [_definition(source, library, known, position, rules[position]) for position in range(count)]


def _definition(
    source: Slo, library: Library, known: KnownMetrics | None, position: int, request_rule: str | None
) -> SloDefinition:
    document = source.content
    annotations = document.metadata.annotations
    objective = document.spec.objectives[position]
    name = objective_name(source, position)
    window = document.spec.timeWindow[0]
    if request_rule is None:
        indicator, words = IndicatorReader(source, library, known).read(position)
        rule = f"{objective.ratio * 100:g} % of {words}"
    else:
        rule = request_rule
        total = Selector(REQUEST_COUNTER, (("slo", "=", name),))
        good = Selector(REQUEST_COUNTER, (("slo", "=", name), ("verdict", "=", "good")))
        indicator = RatioIndicator(total=total, good=good)
    window_seconds = seconds(window.duration)
    slices = _slices(source, objective, position, window_seconds)
    least, least_bad = definition.MINIMUM_EVENTS, definition.MINIMUM_BAD_EVENTS
    if slices is not None:
        least, least_bad = definition.MINIMUM_SLICES, definition.MINIMUM_BAD_SLICES
    return SloDefinition(
        name=name,
        title=objective.displayName or document.metadata.displayName or name,
        service=document.spec.service,
        description=document.spec.description,
        target=objective.ratio,
        rule=rule,
        window_seconds=window_seconds,
        indicator=indicator,
        method=_METHODS[document.spec.budgetingMethod],
        slices=slices,
        calendar=_calendar(source, window),
        conditions=tuple(_burn_conditions(source, library, window_seconds)),
        minimum_events=_count(source, MINIMUM_EVENTS, least),
        minimum_bad_events=_count(source, MINIMUM_BAD_EVENTS, least_bad),
        zero_tolerance=_choice(source, ZERO_TOLERANCE, {"true": True, "false": False}, default=False),
        absent_alert=_choice(source, ABSENT_ALERT, {"on": True, "off": False}, default=True),
        switch=annotations.get(SWITCH, REQUEST_SWITCH if request_rule else "see the runbook"),
        unknown_while=tuple(flag.strip() for flag in annotations.get(UNKNOWN_WHILE, "").split(",") if flag.strip()),
        place=f"{source.name}:{source.line(('spec', 'objectives', position))}",
        notes=tuple(_notes(source, library, objective)),
    )


def _notes(source: Slo, library: Library, objective: ObjectiveSpec) -> Iterable[str]:
    """What is read otherwise than it is written."""
    name = source.content.metadata.name
    if objective.compositeWeight not in (None, 1.0):
        yield f"{name}: compositeWeight is not used: every objective has a budget and alerts of its own"
    for spec, document, key in library.conditions(source):
        if spec.condition.op in ("lt", "lte"):
            place = f"{document.name}:{document.line((*key, 'op'))}"
            yield f"{place}: op {spec.condition.op} is read as gte, as a budget that isn't spent needs no alert"


def _slices(source: Slo, objective: ObjectiveSpec, position: int, window_seconds: int) -> Slices | None:
    key = ("spec", "objectives", position)
    method = source.content.spec.budgetingMethod
    if method == "Occurrences":
        if objective.timeSliceTarget is not None or objective.timeSliceWindow is not None:
            raise source.error(key, "timeSliceTarget and timeSliceWindow belong to Timeslices: take them out")
        return None
    if objective.timeSliceWindow is None:
        raise source.error(key, f"{method} needs timeSliceWindow here, such as 5m: add it")
    if method == "Timeslices" and objective.timeSliceTarget is None:
        raise source.error(key, "Timeslices needs timeSliceTarget here, such as 0.95: add it")
    length = seconds(objective.timeSliceWindow)
    if length < 60 or length > 3600 or 3600 % length:
        text = f"{objective.timeSliceWindow} doesn't divide an hour into slices of 1 to 60 minutes: use 1m, 5m or 10m"
        raise source.error((*key, "timeSliceWindow"), text)
    if length * 10 > window_seconds:
        text = f"a slice of {objective.timeSliceWindow} is over a tenth of the window: shorten it"
        raise source.error((*key, "timeSliceWindow"), text)
    return Slices(length, objective.timeSliceTarget or 0.0)


def _calendar(source: Slo, window: Window) -> CalendarPeriod | None:
    if window.calendar is None:
        return None
    key: KeyPath = ("spec", "timeWindow", 0)
    count, unit = int(window.duration[:-1]), window.duration[-1]
    days, months = count * _DAYS.get(unit, 0), count * MONTHS.get(unit, 0)
    if not days and not months:
        text = f"{window.duration} is not read as a calendar window: use d, w, M (months), Q or Y"
        raise source.error((*key, "duration"), text)
    try:
        start = datetime.fromisoformat(window.calendar.startTime)
        first, changes = zone_offsets(ZoneInfo(window.calendar.timeZone))
    except (ZoneInfoNotFoundError, ValueError) as error:
        name = "timeZone" if isinstance(error, ZoneInfoNotFoundError) else "startTime"
        told = {"timeZone": "is no time zone of the IANA database: write UTC or Europe/Berlin", "startTime": str(error)}
        text = f"{getattr(window.calendar, name)!r} {told[name]}"
        raise source.error((*key, "calendar", name), text) from error
    if months and start.day > _LAST_DAY_OF_ANY_MONTH:
        text = f"a period of months can't start on day {start.day}, which some months lack: use 1 to 28"
        raise source.error((*key, "calendar", "startTime"), text)
    return CalendarPeriod(days, months, int(start.replace(tzinfo=UTC).timestamp()), first, changes)


def _burn_conditions(source: Slo, library: Library, window_seconds: int) -> Iterable[BurnCondition]:
    for spec, document, key in library.conditions(source):
        condition = spec.condition
        length = seconds(condition.lookbackWindow)
        if length >= window_seconds:
            text = f"{condition.lookbackWindow} is as long as the SLO's window: use a shorter one"
            raise document.error((*key, "lookbackWindow"), text)
        yield BurnCondition(
            factor=condition.threshold,
            long_seconds=length,
            severity="page" if spec.severity.lower() in ("page", "critical", "high") else "ticket",
            hold_seconds=seconds(condition.alertAfter or "0s"),
            place=f"{document.name}:{document.line((*key, 'threshold'))}",
        )


def _count(source: Slo, annotation: str, default: float) -> float:
    given = source.content.metadata.annotations.get(annotation)
    if given is None:
        return default
    key = ("metadata", "annotations", annotation)
    try:
        value = float(given)
    except ValueError as error:
        raise source.error(key, f"{given!r} is no number: give a count of events") from error
    if not value > 0 or math.isinf(value):
        raise source.error(key, f"{given} is no count of events: give one above 0")
    return value


def _choice(source: Slo, annotation: str, choices: Mapping[str, bool], *, default: bool) -> bool:
    given = source.content.metadata.annotations.get(annotation)
    if given is None:
        return default
    if given not in choices:
        text = f"{given!r}: use {' or '.join(choices)}, in quotes"
        raise source.error(("metadata", "annotations", annotation), text)
    return choices[given]
