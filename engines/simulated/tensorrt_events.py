"""KV events as TensorRT-LLM gives them: a list that waits until it is fetched (`POST /kv_cache_events`).

`stored` names the parent and the blocks with their tokens, `removed` the hashes. Source: TensorRT-LLM 1.2,
`KVCacheEventSerializer`. The oldest are dropped when nobody fetches them (`event_buffer_max_size`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prefixwatch.engines.model.accounts import BlockEvent, BlockEvicted, BlocksStored
from prefixwatch.engines.simulated.kv_event_publisher import Prompt

BUFFERED_EVENTS = 10_000


class TensorrtEvents:
    """Collects block events until they are fetched; `engine_id` is the id that the engine gives a chain hash."""

    def __init__(self, block_size: int, engine_id: Callable[[int], int]) -> None:
        self._block_size = block_size
        self._engine_id = engine_id
        self._next_id = 0
        self._waiting: deque[dict[str, Any]] = deque(maxlen=BUFFERED_EVENTS)

    def add(self, events: Iterable[BlockEvent], prompts: Mapping[str, Prompt]) -> None:
        """`prompts` has every request that an event names."""
        for event in events:
            if isinstance(event, BlocksStored):
                data = self._stored(event, prompts[event.request_id])
            elif isinstance(event, BlockEvicted):
                data = {"type": "removed", "block_hashes": [self._engine_id(event.block)]}
            else:
                continue
            self._waiting.append({"event_id": self._next_id, "data": data})
            self._next_id += 1

    def fetch(self) -> list[dict[str, Any]]:
        """The events since the last call."""
        found = list(self._waiting)
        self._waiting.clear()
        return found

    def _stored(self, event: BlocksStored, prompt: Prompt) -> dict[str, Any]:
        size, first = self._block_size, event.first
        blocks = [
            {
                "type": "stored_block",
                "block_hash": self._engine_id(prompt.blocks[k]),
                "tokens": [
                    {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                    for token in prompt.tokens[k * size : (k + 1) * size].tolist()
                ],
                "cache_level": 0,
                "priority": 35,
            }
            for k in range(first, first + event.count)
        ]
        parent = self._engine_id(prompt.blocks[first - 1]) if first else None
        return {"type": "stored", "parent_hash": parent, "blocks": blocks}
