"""How the schedulers of three engines differ, as data for `engines.model.engine`.

vLLM (V1): running requests first, then waiting ones in order of arrival, prompts and generation in one step. When
blocks run out, the request admitted last is preempted and waits first in line, to be computed again.

SGLang: a step either computes prompts or generates, and prompts come first. The waiting requests are sorted by the
length of their cached prefix, the longest first, unless more than 128 wait (`--schedule-policy lpm`). When pages run
out, requests are *retracted* before the step: those that have generated the fewest tokens first, of these the longest
prompt. They wait last in line; what they had cached stays until it is evicted.

TensorRT-LLM (`GUARANTEED_NO_EVICT`): a request is admitted when its prompt and its longest possible answer fit beside
those of all running requests, so none is ever paused. Prompts and generation share a step (in-flight batching).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

EngineKind = Literal["vllm", "sglang", "tensorrt-llm"]
KINDS: tuple[EngineKind, ...] = get_args(EngineKind)

LONGEST_SORTED_QUEUE = 128
"""SGLang serves a longer queue in order of arrival."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The rules of a scheduler; the defaults are vLLM's."""

    prompts_first: bool = False
    """A step either computes prompts or generates. Out of blocks, the request that has generated least gives way, and
    waits last in line."""
    longest_match_first: bool = False
    """The waiting request with the longest cached prefix is next."""
    reserves_output: bool = False
    """Only what fits with its longest possible answer is admitted."""


SCHEDULING: dict[EngineKind, Scheduling] = {
    "vllm": Scheduling(),
    "sglang": Scheduling(prompts_first=True, longest_match_first=True),
    "tensorrt-llm": Scheduling(reserves_output=True),
}
