"""The grade of a policy, as summary.json has it: a figure that nothing supports is None, never 0."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

Limits = tuple[float, float] | None
_BLOCKS = "95 % limits, from blocks of the run drawn anew; null with too few requests"
_SHARE = "95 % limits: no narrower than Wilson's, nor than blocks of the run drawn anew; null with too few requests"


class Graded(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Percentiles(Graded):
    """Exact, interpolated between order statistics; null without a single request."""

    p50: float | None
    p95: float | None
    p99: float | None


class Interval(Graded):
    """95 % limits of each percentile, from blocks of the run drawn anew; null with too few requests."""

    p50: Limits
    p95: Limits
    p99: Limits


class RequestCounts(Graded):
    scheduled: int = Field(description="all requests of the measured phase")
    sent: int = Field(description="those that left the load generator")
    completed: int
    refused: int
    failed: int
    timed_out: int
    cut_off: int = Field(description="still running when the run ended")
    warm_up: int = Field(default=0, description="sent and logged, but left out of every grade: due in the warm-up")
    cool_down: int = Field(default=0, description="the same, due in the cool-down")


class Samples(Graded):
    """How many requests each latency figure stands on."""

    ttft: int
    ttft_hit: int
    ttft_partial: int
    ttft_miss: int
    tpot: int


class PrefixGrade(Graded):
    """Reuse as the engines report it, over the requests for which they report any figure, zero included."""

    prompt_tokens: int | None
    hit_tokens: int | None
    hit_ratio: float | None = Field(description="hit_tokens / prompt_tokens")
    block_hit_ratio: float | None = Field(description="full blocks reused / full blocks of the prompts")
    hit_ratio_ci95: Limits = Field(default=None, description=_BLOCKS)
    block_hit_ratio_ci95: Limits = Field(default=None, description=_BLOCKS)
    hit_tokens_mean: float | None = Field(default=None, description="hit tokens a request")
    hit_tokens_mean_ci95: Limits = Field(default=None, description=_BLOCKS)
    hit_tokens_p50: float | None = Field(description="of hit tokens by request")
    hit_tokens_p50_ci95: Limits = Field(default=None, description=_BLOCKS)
    hit_tokens_p95: float | None
    hit_tokens_p95_ci95: Limits = Field(default=None, description=_BLOCKS)
    expected_hit_tokens: int | None = Field(
        default=None,
        description="what one infinite cache for the whole fleet would have given the same requests, told from the "
        "plan alone; a policy that spreads a prefix over n workers has it computed n times",
    )


class HotspotGrade(Graded):
    """How unevenly prompt tokens were spread over the workers; see `grade_hotspot`."""

    max_over_mean: float | None
    overloaded_share: float | None
    top_share: float | None


class PredictionCount(Graded):
    requests: int
    predicted_tokens: int
    delivered_tokens: int


class PredictionGrade(Graded):
    """Hit tokens as the router predicted and the engines reported them, over the requests for which both are known."""

    requests: int
    predicted_tokens: int | None
    delivered_tokens: int | None
    within_block_ratio: float | None = Field(description="share of the requests predicted to within one block")
    by_cause: dict[str, PredictionCount] = Field(
        description="what became of the predictions, most tokens apart first; see kvcache/prediction.py"
    )


class ObjectiveGrade(Graded):
    name: str
    rule: str = Field(description="the objective in words")
    objective: float = Field(description="share of requests that should be good")
    measured: float | None = Field(description="share that was good")
    ok: bool | None = Field(description="measured >= objective; null when no request counts")
    ci95: tuple[float, float] | None = Field(description="Wilson interval of the share")
    good: int
    total: int
    excluded: int = Field(description="requests of its classes that it doesn't apply to, such as unstreamed answers")


class ClassGrade(Graded):
    """The requests of one class, where a run has several."""

    requests: RequestCounts
    ttft_ms: Percentiles
    ttft_ms_ci95: Interval | None = None
    goodput_ratio: float | None = Field(description="requests that met every objective of the class, of all scheduled")
    goodput_ci95: tuple[float, float] | None
    objectives: list[ObjectiveGrade] = Field(description="objectives that cover the class, over its requests alone")


class PolicyGrade(Graded):
    requests: RequestCounts
    ttft_ms: Percentiles
    ttft_hit_ms: Percentiles
    ttft_partial_ms: Percentiles
    ttft_miss_ms: Percentiles
    tpot_ms: Percentiles
    ttft_ms_ci95: Interval | None = None
    ttft_hit_ms_ci95: Interval | None = None
    ttft_partial_ms_ci95: Interval | None = None
    ttft_miss_ms_ci95: Interval | None = None
    tpot_ms_ci95: Interval | None = None
    ttft_from_send_ms_ci95: Interval | None = None
    e2e_ms_ci95: Interval | None = None
    itl_ms_ci95: Interval | None = None
    chunk_gap_ms_ci95: Interval | None = None
    router_decision_us_ci95: Interval | None = None
    ttft_from_send_ms: Percentiles | None = Field(
        default=None, description="first token after the actual sending; ttft_ms counts from the scheduled time"
    )
    client_lag_ms: Percentiles | None = Field(default=None, description="sending after the scheduled time")
    e2e_ms: Percentiles | None = Field(default=None, description="scheduled time to the end, completed requests")
    itl_ms: Percentiles | None = Field(
        default=None,
        description="inter-token latency: gaps of answers that came token by token, so that a gap is a token's",
    )
    chunk_gap_ms: Percentiles | None = Field(
        default=None,
        description="gaps between reads that brought content, of all answers; a read may hold many tokens",
    )
    samples: Samples
    prefix: PrefixGrade
    goodput_rps: float | None = Field(description="requests a second that met every objective of their class")
    goodput_ratio: float | None = Field(description="the same, as a share of all scheduled requests")
    goodput_ci95: tuple[float, float] | None = Field(description="Wilson interval of goodput_ratio")
    goodput_rps_ci95: Limits = Field(default=None, description=_SHARE)
    not_completed_ratio: float | None = Field(
        default=None, description="refused, failed, timed out and cut off, as a share of all scheduled requests"
    )
    not_completed_ratio_ci95: Limits = Field(default=None, description=_SHARE)
    output_tokens_per_second: float | None = Field(
        default=None, description="output tokens of completed requests that came while the plan ran, by its seconds"
    )
    output_tokens_per_second_ci95: Limits = Field(default=None, description=_BLOCKS)
    hotspot: HotspotGrade
    router_decision_us: Percentiles
    reasons: dict[str, int] = Field(
        default_factory=dict, description="requests by the policy's branch that placed them, most first"
    )
    prediction: PredictionGrade | None = Field(
        default=None, description="null where no request has both a predicted and a reported figure"
    )
    isolation_violations: int | None
    objectives: list[ObjectiveGrade]
    classes: dict[str, ClassGrade] = Field(
        default_factory=dict, description="by request class; empty where all requests are of one"
    )
