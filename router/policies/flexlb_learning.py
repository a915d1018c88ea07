"""FlexLB with its learning predictor: as `flexlb_formula`, with prefill times learned worker by worker.

T_prefill is a LearningPredictor (`router.prefill_predictor`), one a worker, in memory only. It starts nearly blind
to the cache (4,096 tokens: 320.5 ms uncached, 318.5 ms cached) and Adam's fixed step moves it slowly: after 200
batches it credits a hit with a few ms of what it saves, after thousands with about half. Kept as its authors wrote it;
`flexlb_formula` with `calibration` is the fair comparison. A prediction isn't clamped at 0.

A batch's label is the time to its last member's first token, counted from its dispatch or from when the worker was
through with the batch before, if that was later: FlexLB takes the engine's `execution_time_ms`, which engines here
don't give. A batch with a failed member teaches nothing.

Defaults: as flexlb_formula, without `calibration`.

Source: alibaba/rtp-llm `rtp_llm/flexlb`, CostBasedPrefillStrategy with the LearningPredictor.
"""

from __future__ import annotations

from router.policies.flexlb_formula import FlexLbFormula, FlexLbOptions
from router.prefill_predictor import LearningPredictor, PrefillPredictor


class FlexLbLearning(FlexLbFormula):
    """Least predicted prefill, in-flight and batching time, prefill times learned on line."""

    name = "flexlb_learning"
    source = "FlexLB (alibaba/rtp-llm), learning predictor"
    Options = FlexLbOptions

    def _make_predictor(self) -> PrefillPredictor:
        return LearningPredictor()
