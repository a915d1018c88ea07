"""The part of OpenSLO v1 that is read here, field for field as its specification names them.

https://github.com/OpenSLO/OpenSLO: kind SLO with an inline indicator. Unknown keys are errors, so that a
typing slip can't switch an objective off.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

ANNOTATION_PREFIX = "prefixwatch.dev/"
REQUEST_FIELD = ANNOTATION_PREFIX + "request-field"
ALL_OF = ANNOTATION_PREFIX + "all-of"
REQUEST_CLASS = ANNOTATION_PREFIX + "request-class"
ANNOTATIONS = {
    REQUEST_FIELD: "the figure of a request that is graded: ttft_seconds, tpot_seconds, e2e_seconds or completed",
    ALL_OF: "names of SLOs, comma-separated, whose conditions one request must all meet (goodput)",
    REQUEST_CLASS: "comma-separated patterns of the request classes that are graded; absent means all",
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Metadata(_Strict):
    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
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


class MetricSource(_Strict):
    metricSourceRef: str | None = None
    type: str | None = None
    spec: dict[str, Any] = {}


class Metric(_Strict):
    metricSource: MetricSource


class RatioMetric(_Strict):
    counter: bool
    good: Metric | None = None
    bad: Metric | None = None
    total: Metric

    @model_validator(mode="after")
    def _one_side(self) -> Self:
        if (self.good is None) == (self.bad is None):
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
    startTime: str
    timeZone: str


class Window(_Strict):
    duration: str = Field(pattern=r"^[1-9][0-9]*[mhdwMQY]$")
    isRolling: bool
    calendar: Calendar | None = None


class ObjectiveSpec(_Strict):
    displayName: str | None = None
    op: Literal["lte", "gte", "lt", "gt"] | None = None
    value: float | None = None
    target: float | None = Field(default=None, gt=0)
    targetPercent: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if (self.target is None) == (self.targetPercent is None):
            raise ValueError("give exactly one of target (0.95) and targetPercent (95)")
        if self.ratio >= 1:
            raise ValueError("a target of 100 % leaves no error budget: use one below it, such as 0.999")
        return self

    @property
    def ratio(self) -> float:
        return self.target if self.target is not None else (self.targetPercent or 0.0) / 100


class Spec(_Strict):
    description: str = ""
    service: str
    indicator: Indicator
    timeWindow: list[Window] = Field(min_length=1, max_length=1)
    budgetingMethod: Literal["Occurrences"]
    objectives: list[ObjectiveSpec] = Field(min_length=1)
    alertPolicies: list[dict[str, Any] | str] = []


class SloDocument(_Strict):
    """One OpenSLO v1 document of kind SLO."""

    apiVersion: Literal["openslo/v1"]
    kind: Literal["SLO"]
    metadata: Metadata
    spec: Spec
