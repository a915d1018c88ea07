"""OpenSLO v1, field for field as its specification names them.

https://github.com/OpenSLO/OpenSLO: kinds SLO, SLI, DataSource, Service, AlertPolicy, AlertCondition and
AlertNotificationTarget. Unknown keys are errors, so that a typing slip can't switch an objective off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

ANNOTATION_PREFIX = "prefixwatch.dev/"
REQUEST_FIELD = ANNOTATION_PREFIX + "request-field"
ALL_OF = ANNOTATION_PREFIX + "all-of"
REQUEST_CLASS = ANNOTATION_PREFIX + "request-class"
TENANT = ANNOTATION_PREFIX + "tenant"
PROMPT_LENGTH = ANNOTATION_PREFIX + "prompt-length"
CACHE = ANNOTATION_PREFIX + "cache"
SESSION_TURN = ANNOTATION_PREFIX + "session-turn"
MINIMUM_EVENTS = ANNOTATION_PREFIX + "minimum-events"
MINIMUM_BAD_EVENTS = ANNOTATION_PREFIX + "minimum-bad-events"
ZERO_TOLERANCE = ANNOTATION_PREFIX + "zero-tolerance"
SEVERITY_MAX = ANNOTATION_PREFIX + "severity-max"
ABSENT_ALERT = ANNOTATION_PREFIX + "absent-alert"
SWITCH = ANNOTATION_PREFIX + "switch"
BUCKETS = ANNOTATION_PREFIX + "buckets"
UNKNOWN_WHILE = ANNOTATION_PREFIX + "unknown-while"
ANNOTATIONS = {
    REQUEST_FIELD: "the figure of a request that is graded: ttft_seconds, tpot_seconds, e2e_seconds, "
    "hit_ratio or completed",
    ALL_OF: "names of SLOs, comma-separated, whose conditions one request must all meet (goodput)",
    REQUEST_CLASS: "comma-separated patterns of the request classes that are graded; absent means all",
    TENANT: "comma-separated patterns of the tenants that are graded; absent means all",
    PROMPT_LENGTH: "the prompt lengths that are graded, in tokens: 512-2048 (above 512, up to 2048), or 32768+",
    CACHE: "the cache classes that are graded, comma-separated: hit, partial, miss",
    SESSION_TURN: "the turns of a session that are graded: first or later",
    MINIMUM_EVENTS: "events in an alert's long window below which it doesn't page; default 100",
    MINIMUM_BAD_EVENTS: "bad events in an alert's long window below which it doesn't page; default 5",
    ZERO_TOLERANCE: "true: any bad event pages, whatever the budget (OpenSLO has no target of 100 %)",
    SEVERITY_MAX: "ticket: never page; for objectives that users don't feel. Default: page",
    ABSENT_ALERT: "off: no alert when nothing measures this SLO",
    SWITCH: "how to switch on what measures this SLO; named by the alert on its absence",
    BUCKETS: "bucket bounds of a histogram of another exporter, comma-separated, to check thresholds against",
    UNKNOWN_WHILE: "data quality flags, comma-separated, during which this SLO counts nothing",
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_absent(cls, given: Any) -> Any:
        """`alertPolicies:` with nothing behind it, as OpenSLO's own examples have it."""
        if not isinstance(given, Mapping):
            return given
        return {key: value for key, value in given.items() if value is not None or key not in cls.model_fields}


class Metadata(_Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9]([-._A-Za-z0-9]{0,251}[A-Za-z0-9])?$")
    displayName: str | None = None
    labels: dict[str, str | list[str]] = {}
    annotations: dict[str, str] = {}

    @field_validator("annotations")
    @classmethod
    def _known(cls, annotations: dict[str, str]) -> dict[str, str]:
        for key in annotations:
            if key.startswith(ANNOTATION_PREFIX) and key not in ANNOTATIONS:
                raise ValueError(f"unknown annotation {key}: use one of {', '.join(ANNOTATIONS)}")
        return annotations


class SloMetadata(Metadata):
    """An SLO's name is a label's value, a file's name and part of a Kubernetes object's."""

    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")


class MetricSource(_Strict):
    metricSourceRef: str | None = None
    type: str | None = None
    spec: dict[str, Any] = {}


class Metric(_Strict):
    metricSource: MetricSource


class RatioMetric(_Strict):
    counter: bool | None = Field(default=None, description="true: the queries name counters")
    good: Metric | None = None
    bad: Metric | None = None
    total: Metric | None = None
    rawType: Literal["success", "failure"] | None = None
    raw: Metric | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.raw is not None:
            if self.rawType is None or self.good or self.bad or self.total:
                raise ValueError("raw goes with rawType, and without good, bad and total")
        elif self.total is None or (self.good is None) == (self.bad is None):
            raise ValueError("give either good or bad beside total")
        return self


class IndicatorSpec(_Strict):
    description: str | None = None
    thresholdMetric: Metric | None = None
    ratioMetric: RatioMetric | None = None

    @model_validator(mode="after")
    def _one_metric(self) -> Self:
        if (self.thresholdMetric is None) == (self.ratioMetric is None):
            raise ValueError("give exactly one of thresholdMetric and ratioMetric")
        return self


class Indicator(_Strict):
    metadata: Metadata
    spec: IndicatorSpec


class Calendar(_Strict):
    startTime: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2})?)?$")
    timeZone: str

    @field_validator("startTime", mode="before")
    @classmethod
    def _without_quotes(cls, given: Any) -> Any:
        """YAML reads an unquoted time as one."""
        return given.isoformat() if isinstance(given, date | datetime) else given


class Window(_Strict):
    duration: str = Field(pattern=r"^[1-9][0-9]*[mhdwMQY]$", description="a length such as 30d, 4w or 1M")
    isRolling: bool
    calendar: Calendar | None = None

    @model_validator(mode="before")
    @classmethod
    def _rolling_unless_calendar(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("isRolling") is None:
            return {**given, "isRolling": given.get("calendar") is None}
        return given

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.isRolling and self.calendar is not None:
            raise ValueError("a rolling window has no calendar: take it out, or set isRolling to false")
        if not self.isRolling and self.calendar is None:
            raise ValueError("a calendar window needs a calendar with startTime and timeZone: add it")
        if self.isRolling and self.duration[-1] in "MQY":
            raise ValueError(f"{self.duration} differs in length: a rolling window is given in m, h, d or w, as 30d")
        return self


class ObjectiveSpec(_Strict):
    displayName: str | None = None
    op: Literal["lte", "gte", "lt", "gt"] | None = None
    value: float | None = None
    target: float | None = Field(default=None, gt=0)
    targetPercent: float | None = Field(default=None, gt=0)
    timeSliceTarget: float | None = Field(default=None, gt=0, le=1)
    timeSliceWindow: str | None = Field(default=None, pattern=r"^[1-9][0-9]*[smhd]$")
    indicator: Indicator | None = None
    indicatorRef: str | None = None
    compositeWeight: float | None = Field(default=None, gt=0)

    @field_validator("timeSliceWindow", mode="before")
    @classmethod
    def _minutes(cls, given: Any) -> Any:
        """A bare number is minutes."""
        return f"{given}m" if re.fullmatch(r"[1-9][0-9]*", str(given)) else given

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if (self.target is None) == (self.targetPercent is None):
            raise ValueError("give exactly one of target (0.95) and targetPercent (95)")
        if self.ratio >= 1:
            raise ValueError(
                "a target of 100 % leaves no error budget: use one below it, such as 0.999; for what must never happen "
                f"use 0.99999 and the annotation {ZERO_TOLERANCE}: true"
            )
        return self

    @property
    def ratio(self) -> float:
        return self.target if self.target is not None else (self.targetPercent or 0.0) / 100


class AlertConditionValue(_Strict):
    kind: Literal["burnrate"] = "burnrate"
    op: Literal["lte", "gte", "lt", "gt"]
    threshold: float = Field(gt=0, description="burn rate: how many times the even rate the budget is spent")
    lookbackWindow: str = Field(pattern=r"^[1-9][0-9]*[mhdw]$")
    alertAfter: str | None = Field(default=None, pattern=r"^[0-9]+[smhdw]$")


class AlertConditionSpec(_Strict):
    description: str | None = None
    severity: str
    condition: AlertConditionValue


class AlertConditionInline(_Strict):
    kind: Literal["AlertCondition"] | None = None
    conditionRef: str | None = None
    metadata: Metadata | None = None
    spec: AlertConditionSpec | None = None


class AlertPolicySpec(_Strict):
    description: str | None = None
    alertWhenBreaching: bool = False
    alertWhenResolved: bool = False
    alertWhenNoData: bool = False
    conditions: list[AlertConditionInline] = Field(min_length=1)
    notificationTargets: list[dict[str, Any]] = []


class AlertPolicyInline(_Strict):
    kind: Literal["AlertPolicy"] | None = None
    alertPolicyRef: str | None = None
    metadata: Metadata | None = None
    spec: AlertPolicySpec | None = None


class Spec(_Strict):
    description: str = ""
    service: str = Field(min_length=1)
    indicator: Indicator | None = None
    indicatorRef: str | None = None
    timeWindow: list[Window] = Field(min_length=1, max_length=1)
    budgetingMethod: Literal["Occurrences", "Timeslices", "RatioTimeslices"]
    objectives: list[ObjectiveSpec] = Field(min_length=1)
    alertPolicies: list[str | AlertPolicyInline] = []

    @model_validator(mode="after")
    def _one_indicator(self) -> Self:
        both = self.indicator is not None and self.indicatorRef is not None
        none = self.indicator is None and self.indicatorRef is None
        if both or (none and not any(o.indicator or o.indicatorRef for o in self.objectives)):
            raise ValueError("give exactly one of indicator and indicatorRef")
        return self


class Top(_Strict):
    """What every kind has."""

    apiVersion: Literal["openslo/v1"]
    metadata: Metadata

    @model_validator(mode="before")
    @classmethod
    def _known_version(cls, given: Any) -> Any:
        """One message on a document of another version, not one for each key that differs."""
        version = given.get("apiVersion") if isinstance(given, Mapping) else None
        if not isinstance(version, str) or version == "openslo/v1":
            return given
        text = f"should be 'openslo/v1', got {version!r}"
        if version == "openslo/v1alpha":
            text += (
                ": in v1 queries are in indicator.spec (ratioMetric, thresholdMetric), and timeWindows "
                "{count: 30, unit: Day} is timeWindow {duration: 30d, isRolling: true}: rewrite it"
            )
        error = InitErrorDetails(type=PydanticCustomError("openslo_version", "{text}", {"text": text}),
                                 loc=("apiVersion",), input=None)  # fmt: skip
        raise ValidationError.from_exception_data(cls.__name__, [error])


class SloDocument(Top):
    """One OpenSLO v1 document of kind SLO."""

    kind: Literal["SLO"]
    metadata: SloMetadata
    spec: Spec


class SliDocument(Top):
    kind: Literal["SLI"]
    spec: IndicatorSpec


class DataSourceSpec(_Strict):
    description: str | None = None
    type: str
    connectionDetails: Any = None


class DataSourceDocument(Top):
    kind: Literal["DataSource"]
    spec: DataSourceSpec


class ServiceDocument(Top):
    kind: Literal["Service"]
    spec: dict[str, Any] = {}


class AlertPolicyDocument(Top):
    kind: Literal["AlertPolicy"]
    spec: AlertPolicySpec


class AlertConditionDocument(Top):
    kind: Literal["AlertCondition"]
    spec: AlertConditionSpec


class NotificationTargetSpec(_Strict):
    description: str | None = None
    target: str


class NotificationTargetDocument(Top):
    kind: Literal["AlertNotificationTarget"]
    spec: NotificationTargetSpec


KINDS: Mapping[str, type[Top]] = {
    "SLO": SloDocument,
    "SLI": SliDocument,
    "DataSource": DataSourceDocument,
    "Service": ServiceDocument,
    "AlertPolicy": AlertPolicyDocument,
    "AlertCondition": AlertConditionDocument,
    "AlertNotificationTarget": NotificationTargetDocument,
}
