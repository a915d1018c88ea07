"""What a simulated fleet's engines let a policy know: what they say they hold, or the whole truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

from prefixwatch.engines.model.engine import EngineModel
from prefixwatch.engines.model.step_time import token_contexts
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.router.policy import Fleet, LoadReport, RouteRequest, ViewSource


def load_report(model: EngineModel, now_s: float) -> LoadReport:
    """What an engine says of its load; one without a limit of blocks says nothing of its KV use."""
    config = model.config
    limited = config.capacity_blocks is not None
    return LoadReport(
        now_s,
        running=model.running,
        waiting=model.waiting,
        kv_usage_ratio=model.kv_usage_ratio if limited else None,
        prefill_seconds_total=model.prefill_seconds,
        prefills_total=model.prefills,
        kv_capacity_tokens=(config.capacity_blocks or 0) * config.block_size if limited else None,
    )


class EngineView:
    """What the engines themselves say they hold, by this index."""

    source: ClassVar[ViewSource] = "events"

    def __init__(self, index: BlockIndex) -> None:
        self._index = index

    def depths(self, request: RouteRequest) -> Mapping[str, int]:
        return self._index.depths(request.blocks)

    def routed(self, request: RouteRequest, worker: str) -> None:
        return

    def worker_removed(self, worker: str) -> None:
        self._index.forget(worker)

    def block_count(self, worker: str) -> int:
        return self._index.block_count(worker)


class TruthView:
    """The engines' own pools, and the prompts that each will have computed by the time a newcomer's turn comes.

    Engines serve in order of arrival, so a newcomer also finds the blocks of the prompts before it.
    """

    source: ClassVar[ViewSource] = "events"

    def __init__(self) -> None:
        self._models: Mapping[str, EngineModel] = {}
        self._coming: dict[str, Counter[int]] = {}
        self._uncached_tokens: dict[str, int] = {}

    def watch(self, models: Mapping[str, EngineModel]) -> None:
        """These are the engines, by worker."""
        self._models = models
        self._coming = {worker: Counter() for worker in models}

    def depths(self, request: RouteRequest) -> Mapping[str, int]:
        blocks = request.blocks.tolist()
        found = {worker: self._depth(worker, blocks) for worker in self._models}
        return {worker: depth for worker, depth in found.items() if depth}

    def routed(self, request: RouteRequest, worker: str) -> None:
        blocks = request.blocks.tolist()
        cached = self._depth(worker, blocks) * request.block_size
        self._uncached_tokens[request.id] = _computed(request.prompt_tokens, cached, request.block_size)
        self._coming[worker].update(blocks)

    def settled(self, request: RouteRequest, worker: str) -> None:
        """The prompt is in the pool by now, or never will be."""
        self._uncached_tokens.pop(request.id, None)
        coming = self._coming[worker]
        for block in request.blocks.tolist():
            coming[block] -= 1
            if not coming[block]:
                del coming[block]

    def worker_removed(self, worker: str) -> None:
        self._coming[worker].clear()

    def block_count(self, worker: str) -> int:
        return self._models[worker].pool.cached_blocks

    def tell(self, fleet: Fleet, step_ends_s: Mapping[str, float]) -> None:
        """Fill in what only the truth knows; `step_ends_s` is when each engine's step in work ends."""
        for worker in fleet.workers:
            in_step_s = max(0.0, step_ends_s[worker.name] - fleet.now_seconds)
            worker.backlog_seconds = in_step_s + self._waiting_seconds(self._models[worker.name])
        config = self._models[fleet.workers[0].name].config

        def prefill_seconds(prompt_tokens: int, cached_tokens: int) -> float:
            cached = prompt_tokens - _computed(prompt_tokens, cached_tokens, config.block_size)
            return config.step_time.prefill_s(prompt_tokens, cached, config.max_num_batched_tokens)

        fleet.prefill_seconds = prefill_seconds

    def _depth(self, worker: str, blocks: Sequence[int]) -> int:
        pool, coming = self._models[worker].pool, self._coming[worker]
        for depth, block in enumerate(blocks):
            if block not in coming and block not in pool:
                return depth
        return len(blocks)

    def _waiting_seconds(self, model: EngineModel) -> float:
        """Seconds to prefill what the engine has beyond its step in work, decoding on in each of those steps."""
        tokens = prompts = decoding = held = 0
        contexts = 0.0
        for sequence, uncomputed in model.prompt_tokens_left():
            started = sequence.scheduled_s is not None
            left = uncomputed if started else self._uncached_tokens.get(sequence.id, uncomputed)
            if left:
                tokens, prompts = tokens + left, prompts + 1
                contexts += token_contexts(sequence.prompt_tokens - left, left)
            else:
                decoding, held = decoding + 1, held + sequence.prompt_tokens + sequence.generated_tokens
        if not prompts:
            return 0.0
        steps, time = -(-tokens // model.config.max_num_batched_tokens), model.config.step_time
        each_s = time.duration_s(tokens // steps, contexts / steps, max(1, prompts // steps), decoding, held)
        return steps * each_s


def _computed(prompt_tokens: int, cached_tokens: int, block_size: int) -> int:
    """Tokens an engine computes: at least the last, and whole blocks are reused."""
    return prompt_tokens - min(cached_tokens, max(prompt_tokens - 1, 0) // block_size * block_size)
