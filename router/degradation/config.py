"""The settings of the degradation chain."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from prefixwatch.documents.section import Settings
from prefixwatch.router.degradation.chain import Limits, Step

_StepName = Literal["re_sticky", "warm_pool", "smaller_model", "async_prefill"]


class DegradationConfig(Settings):
    """What the router does for a request class whose predicted TTFT exceeds its objective. Off unless `enabled`.

    The steps and their exits are in docs/caches-that-move.md.
    """

    enabled: bool = False
    """Needs a view of the caches: `cache_view.source` other than `none`, and a `model_dir`."""
    ttft_seconds: float = Field(default=2.0, gt=0)
    """The objective of a first token. Lower: the chain begins earlier."""
    classes: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Request classes with an objective of their own; each has its own state. All others share one. Lower: the chain
    begins earlier for that class."""
    steps: tuple[_StepName, ...] = ("re_sticky", "warm_pool", "smaller_model", "async_prefill")
    """The steps that may be taken, in this order: `re_sticky`, `warm_pool`, `smaller_model` (needs `smaller_models`),
    `async_prefill`."""
    opening_tokens: int = Field(default=256, ge=1)
    """Re-sticky: the part of a prompt that must be cached where the request goes. Larger: fewer workers qualify."""
    warm_pool_workers: int = Field(default=1, ge=1)
    """Workers that are reserved for misses at first. More: misses wait less, and hits have fewer workers."""
    warm_pool_most_ratio: float = Field(default=0.5, gt=0, lt=1)
    """The share of the workers that the pool may grow to while its backlog exceeds the objective. Higher: misses wait
    less in a long crowd, and hits have fewer workers."""
    miss_ratio: float = Field(default=0.25, gt=0)
    """A request is a miss when its uncached tokens take more than this share of the objective. Lower: more requests go
    to the pool, and hits wait for less."""
    smaller_models: dict[str, str] = Field(default_factory=dict)
    """A model, and the smaller one that may answer instead. Only for clients that send `Prefer: smaller-model`; the
    answer has `Preference-Applied: smaller-model`."""
    async_pending: int = Field(default=64, ge=1)
    """Asynchronous prefills at once; beyond them requests are served as usual. Only for clients that send
    `Prefer: respond-async`. Higher: more of a crowd waits aside, and for longer."""
    async_kept_seconds: float = Field(default=120.0, gt=0)
    """How long the client may take to send the request again. Longer: slow clients still find their prefill, and the
    places of `async_pending` are held by those that never come back."""
    exit_ratio: float = Field(default=0.7, gt=0, lt=1)
    """Steps end once the prediction is at most this share of the objective. Lower: later exits, fewer changes."""
    entry_seconds: float = Field(default=2.0, ge=0)
    """How long the prediction must exceed the objective before a step is taken. Longer: short bursts change nothing,
    and a crowd waits longer for relief."""
    dwell_seconds: float = Field(default=5.0, ge=0)
    """How long a step lasts at least before the next is taken, or it ends by relief; also between two workers that the
    pool grows by. Longer: each step has time to show what it does, and the chain gets to the next one later."""
    relief_seconds: float = Field(default=30.0, gt=0)
    """How long the prediction must be low before a step ends; doubled by every relapse. Longer: later exits, fewer
    changes."""
    rearm_seconds: float = Field(default=300.0, gt=0)
    """How long a class must be calm before a step that didn't help is tried again. Shorter: more steps are tried in
    vain; longer: more relapses are counted, and each doubles `relief_seconds`."""

    def limits(self, ttft_seconds: float | None = None) -> Limits:
        """The chain's numbers for a class with this objective; None: the common one."""
        return Limits(
            objective_seconds=self.ttft_seconds if ttft_seconds is None else ttft_seconds,
            exit_ratio=self.exit_ratio,
            entry_seconds=self.entry_seconds,
            dwell_seconds=self.dwell_seconds,
            relief_seconds=self.relief_seconds,
            rearm_seconds=self.rearm_seconds,
        )

    def chain(self) -> list[Step]:
        """The steps that can be taken."""
        steps = [Step(name) for name in self.steps]
        return [step for step in steps if step is not Step.SMALLER_MODEL or self.smaller_models]
