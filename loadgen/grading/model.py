"""The grade of a policy as summary.json has it. A figure that nothing supports has the value null, never 0."""

from __future__ import annotations

from typing import Self, TypeAlias

from pydantic import Field

from prefixwatch.documents.section import Section

Limits: TypeAlias = tuple[float, float] | None


class Figure(Section):
    """One figure: value, interval, unit and sample size. `loadgen.grading.figures` defines each name."""

    name: str
    unit: str = Field(description="ms, us, tokens, ratio, req/s, tokens/s; x is a multiple")
    value: int | float | None = Field(description="null: no request supports it")
    ci95: Limits = Field(
        description="95 % interval, mostly from resampled blocks of the run; null: too few requests, or none is given"
    )
    n: int | None = Field(description="how many values it rests on; null in a summary of schema 1 that has no count")


class RequestCounts(Section):
    scheduled: int = Field(description="all requests of the measured phase; the sum of the outcomes below")
    sent: int = Field(description="those that left the load generator")
    completed: int
    refused: int = Field(description="turned away for want of capacity")
    failed: int
    timed_out: int
    cut_off: int = Field(description="the answer had begun and broke off")
    cancelled: int = Field(description="still running when the run ended, and cancelled by the load generator")
    never_sent: int = Field(description="not sent, because the run was stopped")
    warm_up: int = Field(default=0, description="sent and logged, but left out of every grade: due in the warm-up")
    cool_down: int = Field(default=0, description="the same, due in the cool-down")


class PredictionCount(Section):
    requests: int
    predicted_tokens: int
    delivered_tokens: int


class PredictionGrade(Section):
    """Hit tokens as the router predicted and the engines reported them, over the requests for which both are known."""

    requests: int
    predicted_tokens: int | None
    delivered_tokens: int | None
    within_block_ratio: float | None = Field(description="share of the requests predicted to within one block")
    by_cause: dict[str, PredictionCount] = Field(
        description="outcomes of the predictions, the largest difference in tokens first; see kvcache/prediction.py"
    )


class ObjectiveGrade(Section):
    name: str
    rule: str = Field(description="the objective in words")
    objective: float = Field(description="share of requests that should be good")
    measured: float | None = Field(description="share that was good")
    ok: bool | None = Field(description="measured >= objective; null when no request counts")
    ci95: Limits = Field(description="Wilson interval of the share")
    good: int
    total: int
    excluded: int = Field(description="requests of its classes that it doesn't apply to, such as unstreamed answers")


class WithFigures(Section):
    requests: RequestCounts
    figures: list[Figure]
    objectives: list[ObjectiveGrade]

    def figure(self, name: str) -> Figure | None:
        """The figure of this name; None if this grade has none."""
        return next((figure for figure in self.figures if figure.name == name), None)

    def value(self, name: str) -> float | None:
        """The value of the figure of this name; None if it is unknown."""
        found = self.figure(name)
        return None if found is None else found.value

    def limits(self, name: str) -> Limits:
        """Its 95 % interval; None if there is none."""
        found = self.figure(name)
        return None if found is None else found.ci95

    def count(self, name: str) -> int | None:
        """How many values it rests on; None if that is unknown."""
        found = self.figure(name)
        return None if found is None else found.n

    def with_value(self, name: str, value: float | None) -> Self:
        """The same grade with another value for this figure."""
        changed = [each.model_copy(update={"value": value}) if each.name == name else each for each in self.figures]
        return self.model_copy(update={"figures": changed})


class ClassGrade(WithFigures):
    """The requests of one class, where a run has several; its objectives are those that cover the class."""


class PartReuse(Section):
    """Reuse of one block class, or of one named prefix, over the requests whose engine reports reuse."""

    name: str = Field(description="a block class (docs/locality.md), or a prefix: the group of the scenario")
    requests: int = Field(description="requests with such tokens")
    prompt_tokens: int
    hit_tokens: int

    @property
    def ratio(self) -> float:
        return self.hit_tokens / self.prompt_tokens


class SessionReuse(Section):
    """Hit ratios of sessions: hit tokens over prompt tokens of a session's requests after its first."""

    sessions: int = Field(description="sessions with a later request whose engine reports reuse")
    by_tenth: list[int] = Field(description="sessions by ratio: 0 to below 10 %, … , 90 to 100 %")
    below_80_share: float = Field(description="share of the sessions with a ratio below 80 %")
    below_80_ci95: Limits = Field(description="Wilson interval of that share")


class WeightedReuse(Section):
    """J = sum of w(k) hit tokens(k) / sum of w(k) prompt tokens(k) - lambda * P99 of the TTFT in seconds, k: block
    class."""

    value: float
    ci95: Limits = Field(description="from the far ends of both terms' 95 % intervals; null where one has none")
    weighted_hit_ratio: float
    ttft_p99_seconds: float
    tail_weight_per_second: float = Field(description="lambda")
    at_least: float | None = Field(description="the scenario's limit; null: not graded")


class ReuseGrade(Section):
    """Where reuse is and for whom."""

    block_classes: list[PartReuse] = Field(description="most prompt tokens first; empty where no plan names the parts")
    prefixes: list[PartReuse] = Field(
        description="of each named prefix its own tokens alone; most prompt tokens first, 20 at most"
    )
    sessions: SessionReuse | None = Field(description="null where no session has a later request")
    copies_mean: float | None = Field(
        default=None,
        description="workers that served a prefix within 30 s, mean over prefixes and windows by requests; null "
        "without named prefixes or workers",
    )
    locality: dict[str, float] = Field(
        description="temporal, spatial, identity, topological, and their norm: see docs/locality.md; mean of the "
        "repeats. A dimension of which nothing is known is left out"
    )
    weighted: WeightedReuse | None = Field(description="null without `reuse_objective`, or without what it weighs")


class PolicyGrade(WithFigures):
    cache_class_basis: dict[str, int] = Field(
        default={},
        description="requests of known cache class by what their class is measured against: reusable (what the plan "
        "had sent before) or whole_prompt; see docs/concepts.md",
    )
    reasons: dict[str, int] = Field(
        default_factory=dict, description="requests by the policy's branch that placed them, most first"
    )
    prediction: PredictionGrade | None = Field(
        default=None, description="null where no request has both a predicted and a reported figure"
    )
    isolation_violations: int | None = Field(description="requests that reused another tenant's cache; null: unknown")
    reuse: ReuseGrade | None = Field(default=None, description="null where no engine reports reuse")
    classes: dict[str, ClassGrade] = Field(
        default_factory=dict, description="by request class; empty where all requests are of one"
    )
