"""What only a simulator can tell a policy: the engines' true cache content and the work ahead of a newcomer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from engines.model import EngineModel
from engines.sequence import SequenceState
from engines.step_time import token_contexts
from router.policy import RouteRequest


class TruthView:
    """A cache view that is the engines' own pools, and the prompts that each will have computed by then.

    Engines serve in order of arrival, so a newcomer also finds the blocks of the prompts before it.
    """

    def __init__(self) -> None:
        self._models: dict[str, EngineModel] = {}
        self._coming: dict[str, Counter[int]] = {}

    def watch(self, worker: str, model: EngineModel) -> None:
        self._models[worker], self._coming[worker] = model, Counter()

    def depths(self, request: RouteRequest) -> Mapping[str, int]:
        blocks = request.blocks.tolist()
        found = {worker: self._depth(worker, blocks) for worker in self._models}
        return {worker: depth for worker, depth in found.items() if depth}

    def routed(self, request: RouteRequest, worker: str) -> None:
        self._coming[worker].update(request.blocks.tolist())

    def prefilled(self, request: RouteRequest, worker: str) -> None:
        """The prompt is in the pool by now, or never will be."""
        coming = self._coming[worker]
        for block in request.blocks.tolist():
            coming[block] -= 1
            if not coming[block]:
                del coming[block]

    def worker_removed(self, worker: str) -> None:
        del self._models[worker], self._coming[worker]

    def block_count(self, worker: str) -> int:
        return self._models[worker].pool.cached_blocks

    def _depth(self, worker: str, blocks: Sequence[int]) -> int:
        pool, coming = self._models[worker].pool, self._coming[worker]
        for depth, block in enumerate(blocks):
            if block not in coming and block not in pool:
                return depth
        return len(blocks)


def backlog_seconds(
    model: EngineModel, uncached_tokens: Mapping[str, int], step_end_s: float | None, now_s: float
) -> float:
    """Seconds until the engine has prefilled every prompt it has now, the step in work included.

    `uncached_tokens` says, by request, what of a waiting prompt is to be computed. Output tokens of the running
    requests cost their time in each of those steps.
    """
    tokens = contexts = 0.0
    prompts = 0
    decoding: list[SequenceState] = []
    for sequence in model.sequences:
        left = _prompt_tokens_left(model, sequence, uncached_tokens)
        if left <= 0:
            decoding.append(sequence)
            continue
        tokens += left
        contexts += token_contexts(sequence.prompt_tokens - left, left)
        prompts += 1
    seconds = 0.0 if step_end_s is None else max(0.0, step_end_s - now_s)
    if not prompts:
        return seconds
    time, budget = model.config.step_time, model.config.max_num_batched_tokens
    steps = -(-int(tokens) // budget)
    held = sum(sequence.prompt_tokens + sequence.generated_tokens for sequence in decoding)
    return (
        seconds
        + steps * time.duration_s(decode_sequences=len(decoding), context_tokens=held)
        + tokens * time.per_prefill_token_s
        + contexts * time.per_prefill_token_context_s
        + max(steps, prompts) * time.per_prefill_sequence_s
    )


def _prompt_tokens_left(model: EngineModel, sequence: SequenceState, uncached_tokens: Mapping[str, int]) -> int:
    """Prompt tokens not computed, and not being computed in the step in work."""
    if sequence.scheduled_s is None:
        return uncached_tokens[sequence.id]
    return sequence.prompt_tokens - sequence.computed_tokens - model.in_work(sequence)
