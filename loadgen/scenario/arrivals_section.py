"""The `arrivals` section of a scenario: when requests come."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from prefixwatch.loadgen.scenario.arrivals import RateCurve, Stage, constant_rate, diurnal_rate, staged_rate
from prefixwatch.loadgen.scenario.section import Section


class StageKeys(Section):
    """A stretch of the run with a rate of its own: a step, or with `to_rate_per_second` a ramp."""

    seconds: float = Field(gt=0, description="how long it lasts")
    rate_per_second: float = Field(ge=0, description="requests a second, at its start")
    to_rate_per_second: float | None = Field(
        default=None, ge=0, description="requests a second at its end; left out: a step, the same throughout"
    )

    @property
    def end_rate(self) -> float:
        return self.rate_per_second if self.to_rate_per_second is None else self.to_rate_per_second


class DiurnalKeys(Section):
    """A day's rise and fall: a cosine between two rates."""

    low_per_second: float = Field(ge=0, description="requests a second at the quietest")
    high_per_second: float = Field(gt=0, description="requests a second at the peak")
    period_seconds: float = Field(default=86_400, gt=0, description="length of a day; shorten it to see one in a run")
    peak_seconds: float = Field(default=0.0, ge=0, description="when the first peak is, from the start of the run")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low_per_second > self.high_per_second:
            raise ValueError("low_per_second is above high_per_second: swap them")
        return self


_RATES = ("rate_per_second", "stages", "diurnal")
_NEEDS = {
    "poisson": _RATES,
    "gamma": _RATES,
    "constant": _RATES,
    "closed": ("concurrency",),
    "trace": ("file",),
}
_GOES_WITH = {
    **{kind: {"kind", *_RATES} for kind in ("poisson", "constant")},
    "gamma": {"kind", *_RATES, "burstiness"},
    "closed": {"kind", "concurrency", "requests"},
    "trace": {"kind", "file", "format", "speed", "limit"},
}


class Arrivals(Section):
    """When requests come. All kinds but `closed` are open loop: times are drawn beforehand and never wait for answers.

    A closed loop sends the next request when an answer is there, and so hides a stall from its own figures: a run of it
    says so.
    """

    kind: Literal["poisson", "gamma", "constant", "closed", "trace"] = Field(
        default="poisson",
        description="the arrival process: poisson; gamma (see burstiness); constant (evenly spaced); closed (a number "
        "of users, each of which sends when its last answer is complete); trace (a file's time stamps)",
    )
    rate_per_second: float | None = Field(
        default=None,
        gt=0,
        description="requests a second on average, all turns and branches of a session counted; sessions start at "
        "this rate divided by their mean number of requests",
    )
    stages: list[StageKeys] | None = Field(
        default=None, min_length=1, description="ramps and steps, one after another, instead of one rate"
    )
    diurnal: DiurnalKeys | None = Field(default=None, description="a rate that rises and falls, instead of a fixed one")
    burstiness: float = Field(
        default=1.0, ge=0.001, description="kind gamma: shape of the gaps; 1 is Poisson, 0.25 has twice its variation"
    )
    concurrency: int | None = Field(default=None, ge=1, description="kind closed: users, each with one request at most")
    requests: int | None = Field(
        default=None, ge=1, description="kind closed: requests in all; default: 50 for every user"
    )
    file: Path | None = Field(default=None, description="kind trace: the file with the time stamps")
    format: str | None = Field(default=None, description="kind trace: its format; default: detected from the content")
    speed: float = Field(default=1.0, gt=0, description="kind trace: this many times as fast as recorded")
    limit: int | None = Field(default=None, ge=1, description="kind trace: only this number of requests from the start")

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        needed = _NEEDS[self.kind]
        given = [key for key in needed if getattr(self, key) is not None]
        if len(given) != 1:
            meaning = type(self).model_fields[needed[0]].description
            several = ", one of them" if given else ""
            raise ValueError(f"kind {self.kind} needs {' or '.join(needed)}{several}; {needed[0]} is {meaning}")
        if strange := sorted(self.model_fields_set - _GOES_WITH[self.kind]):
            raise ValueError(f"{', '.join(strange)} doesn't go with kind {self.kind}: take it out, or change the kind")
        return self

    @property
    def closed(self) -> bool:
        return self.kind == "closed"

    def curve(self, duration_seconds: float, share: float = 1.0) -> RateCurve:
        """The rate over the run, times `share`. For kinds that have one."""
        if self.stages is not None:
            stages = [Stage(s.seconds, share * s.rate_per_second, share * s.end_rate) for s in self.stages]
            return staged_rate(stages, duration_seconds)
        if self.diurnal is not None:
            day = self.diurnal
            low, high = share * day.low_per_second, share * day.high_per_second
            return diurnal_rate(low, high, day.period_seconds, day.peak_seconds, duration_seconds)
        assert self.rate_per_second is not None
        return constant_rate(share * self.rate_per_second, duration_seconds)

    def at_rate(self, rate_per_second: float, duration_seconds: float) -> Arrivals:
        """The same process and shape with another mean rate. Raises ValueError for a kind without a rate."""
        if self.kind in ("closed", "trace"):
            raise ValueError(f"arrivals of kind {self.kind} have no rate to set: use poisson, gamma or constant")
        mean = self.curve(duration_seconds).total / duration_seconds
        factor = rate_per_second / mean
        if self.stages is not None:
            stages = [
                stage.model_copy(
                    update={
                        "rate_per_second": stage.rate_per_second * factor,
                        "to_rate_per_second": stage.end_rate * factor,
                    }
                )
                for stage in self.stages
            ]
            return self.model_copy(update={"stages": stages})
        if self.diurnal is not None:
            day = self.diurnal
            low, high = day.low_per_second * factor, day.high_per_second * factor
            scaled = day.model_copy(update={"low_per_second": low, "high_per_second": high})
            return self.model_copy(update={"diurnal": scaled})
        return self.model_copy(update={"rate_per_second": rate_per_second})
