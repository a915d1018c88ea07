"""What Dynamo's own selection service makes of a fleet. Run by the peers' Python; a JSON line in, a JSON line out.

First `{"block_size", "kv_events": [endpoint, …]}`: a worker for each endpoint, numbered from 0. Then, in any order:

    {"hash": tokens, "block_size"}       → content hashes
    {"held": [[tokens, [blocks by worker]], …], "patience_seconds"}
                                         → [[blocks by worker], …] as found, once it is so or the patience ends
    {"workers", "earlier", "tokens"}     → {"chosen", "cost", "costs"}

`earlier` are `[tokens, worker, what]`: requests booked in turn, then left `prefilling`, `decoding` or `ended`. `costs`
are those of placing `tokens`, by worker, each asked for as if it were the only one allowed. Every booking is undone.
Options of the policy are set by Dynamo's environment variables; the override in a request has no effect here.

A cost is in no answer of the service, only in its log. So standard error is led through a pipe that is read here.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

MODEL = "model"


def redirect_log() -> Any:
    """Reader of this process's standard error, where the service logs."""
    read, write = os.pipe()
    sys.stderr = os.fdopen(os.dup(2), "w")  # Python's own stays where it was
    os.dup2(write, 2)
    os.environ |= {"DYN_LOGGING_JSONL": "1", "DYN_LOG": "error,dynamo_kv_router::scheduling::selector=info"}
    return os.fdopen(read)


class Oracle:
    def __init__(self, log: Any) -> None:
        from dynamo._core import SelectionService  # type: ignore[import-not-found]  # noqa: PLC0415, logs from here on

        self._service = SelectionService(indexer_threads=1)
        self._log = log

    async def add_workers(self, block_size: int, kv_events: list[str]) -> None:
        for number, endpoint in enumerate(kv_events):
            worker = {"worker_id": number, "model_name": MODEL, "block_size": block_size}
            # Nobody calls the engine itself; a worker without an address just isn't schedulable.
            await self._service.upsert_worker(
                worker | {"endpoint": "http://127.0.0.1:1", "kv_events_endpoint": endpoint}
            )

    async def await_held(self, held: list[tuple[list[int], list[int]]], patience_seconds: float) -> list[list[int]]:
        deadline = time.monotonic() + patience_seconds
        while True:
            found = [await self._overlaps(tokens, len(blocks)) for tokens, blocks in held]
            if found == [blocks for _, blocks in held] or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.001)

    async def place(self, workers: int, earlier: list[tuple[list[int], int, str]], tokens: list[int]) -> dict[str, Any]:
        for number, (prompt, worker, state) in enumerate(earlier):
            await self._select(prompt, [worker], selection_id=str(number))
            if state in {"decoding", "ended"}:
                await self._service.prefill_complete(str(number))
            if state == "ended":
                await self._service.free_reservation(str(number))
        everyone = list(range(workers))
        chosen, cost = await self._select(tokens, everyone)
        costs = [(await self._select(tokens, [worker]))[1] for worker in everyone]
        for number, (_, _, state) in enumerate(earlier):
            if state != "ended":
                await self._service.free_reservation(str(number))
        return {"chosen": chosen, "cost": cost, "costs": costs}

    async def _overlaps(self, tokens: list[int], workers: int) -> list[int]:
        answer = await self._service.overlap_scores({"model_name": MODEL, "token_ids": tokens})
        by_worker = {each["worker_id"]: int(each["device_blocks"]) for each in answer["workers"]}
        return [by_worker[worker] for worker in range(workers)]

    async def _select(self, tokens: list[int], allowed: list[int], selection_id: str = "") -> tuple[int, float]:
        """The worker, and its cost by the log; booked with a selection id, just asked without."""
        request = {"model_name": MODEL, "token_ids": tokens, "allowed_worker_ids": allowed}
        if selection_id:
            await self._service.select_and_reserve(request | {"selection_id": selection_id})
        else:
            await self._service.select(request)
        line = self._log.readline()
        try:
            logged = json.loads(line)
            return int(logged["worker_id"]), float(logged["logit"])
        except (ValueError, KeyError) as error:
            raise RuntimeError(f"not the log of a selection: {line}") from error


async def serve(oracle: Oracle) -> None:
    from dynamo._core import compute_block_hash_for_seq  # noqa: PLC0415

    for line in sys.stdin:
        asked = json.loads(line)
        if "kv_events" in asked:
            await oracle.add_workers(**asked)
            answer: Any = None
        elif "hash" in asked:
            answer = compute_block_hash_for_seq(asked["hash"], asked["block_size"])
        elif "held" in asked:
            answer = await oracle.await_held(**asked)
        else:
            answer = await oracle.place(**asked)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(Oracle(redirect_log())))
