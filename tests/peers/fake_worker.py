"""An engine for routers that only needs to be there: it counts what it is sent, and answers when told to.

It has what the SGLang gateway, smg and vllm-project/router ask of an engine before and beside the requests.
"""

from __future__ import annotations

import asyncio
from typing import Any
from zlib import crc32

from aiohttp import web

MODEL = "fake"
HELD = "held"
SERVER_INFO = {
    "model_path": MODEL,
    "served_model_name": MODEL,
    "tokenizer_path": "",
    "dp_size": 1,
    "version": "0.0",
    "disaggregation_mode": "null",
}
MODEL_INFO = {"model_path": MODEL, "served_model_name": MODEL, "tokenizer_path": "", "is_generation": True}
MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "fake"}]}
ANSWERS: dict[str, Any] = {
    "/health": {},
    "/get_server_info": SERVER_INFO,
    "/server_info": SERVER_INFO,
    "/get_model_info": MODEL_INFO,
    "/model_info": MODEL_INFO,
    "/v1/models": MODELS,
    "/version": {"version": "0.32.0"},
}


class FakeWorker:
    """Listens on a free port. Its number joins `arrivals` with each completion, which is answered at once, or, where
    its `user` is HELD, as soon as `open` is set.
    """

    def __init__(self, number: int, arrivals: asyncio.Queue[int], open_: asyncio.Event) -> None:
        self._number = number
        self._arrivals = arrivals
        self._open = open_

    async def start(self) -> None:
        app = web.Application()
        for path in ANSWERS:
            app.router.add_get(path, self._inform)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/completions/render", self._render)
        app.router.add_post("/tokenize", self._render)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _inform(self, request: web.Request) -> web.Response:
        return web.json_response(ANSWERS[request.path])

    async def _complete(self, request: web.Request) -> web.Response:
        held = (await request.json()).get("user") == HELD
        self._arrivals.put_nowait(self._number)
        if held:
            await self._open.wait()
        choice = {"index": 0, "text": " done", "finish_reason": "length"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response(
            {"id": "x", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice], "usage": usage}
        )

    async def _render(self, request: web.Request) -> web.Response:
        """Token ids for routers that ask an engine for them: a word each."""
        tokens = [crc32(word.encode()) % 30_000 for word in (await request.json())["prompt"].split()]
        if request.path == "/tokenize":
            return web.json_response({"count": len(tokens), "max_model_len": 8192, "tokens": tokens})
        return web.json_response([{"request_id": "r", "token_ids": tokens, "model": MODEL, "sampling_params": {}}])
