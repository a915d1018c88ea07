"""A simulated engine that looks like vLLM, SGLang or TensorRT-LLM from outside: OpenAI API, `/metrics`, KV events.

    python -m prefixwatch.engines.simulated.server --config engine.yaml
    python -m prefixwatch.engines.simulated.server --model-dir models/tiny --port 8001 --capacity-blocks 2000

`engines.model.engine` decides what happens and when; here are only sockets. Requests are tokenised with the model's
own tokenizer, so hits are as real as an engine's; answers are words of its vocabulary. Generated tokens are not
reusable as a prefix, which a real engine's are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import itertools
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

from aiohttp import web

from prefixwatch.documents import DocumentError, load, load_plain, validate
from prefixwatch.documents.errors import InputError
from prefixwatch.engines.errors import EngineError
from prefixwatch.engines.model.engine import EngineModel
from prefixwatch.engines.model.sequence import RequestError, SimRequest, TokenOut
from prefixwatch.engines.simulated.answer import Answer
from prefixwatch.engines.simulated.config import SimulatedEngineConfig
from prefixwatch.engines.simulated.kv_event_publisher import EventEncoder, KvEventPublisher, Prompt, PublisherError
from prefixwatch.engines.simulated.metrics import CONTENT_TYPE, EngineMetrics
from prefixwatch.engines.simulated.openai_api import (
    AnswerEncoder,
    ApiError,
    ChatRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
    parse_tokenize,
)
from prefixwatch.engines.simulated.output_words import OutputWords
from prefixwatch.engines.simulated.step_loop import StepLoop
from prefixwatch.engines.simulated.tensorrt_events import TensorrtEvents
from prefixwatch.kvcache.blocks import Tokens, as_tokens, block_hashes, namespace_root
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer, TokenizerError

VERSION = "0.32.0+simulated"
_MAX_BODY_BYTES = 64 * 1024 * 1024


class SimulatedEngine:
    """`await start()`, use `url`, `await stop()`; `wait()` returns only if the engine breaks."""

    def __init__(self, config: SimulatedEngineConfig) -> None:
        try:
            self._tokenizer = Tokenizer(config.model_dir)
        except TokenizerError as error:
            raise EngineError(str(error)) from error
        self.config = config
        self.model = EngineModel(config.engine_config())
        self._words = OutputWords(self._tokenizer, config.seed)
        block_hashes(as_tokens([0] * config.block_size), config.block_size)  # loads the compiled kernel, not a request
        self._metrics = EngineMetrics(self.model, config.served_model_name)
        self._loop = StepLoop(self.model, self._deliver)
        self._encoder = EventEncoder(config.block_size, secrets.randbits(64), config.kind)
        self._fetched = None
        if config.kind == "tensorrt-llm":
            self._fetched = TensorrtEvents(config.block_size, self._encoder.engine_id)
        self._publisher: KvEventPublisher | None = None
        self._prompts: dict[str, Prompt] = {}  # only while events are published
        self._answers: dict[str, Answer] = {}
        self._ids = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._runner = web.AppRunner(self._app(), handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        self.url = ""

    @property
    def publisher(self) -> KvEventPublisher | None:
        """Where KV events go while the engine runs; None if they are off."""
        return self._publisher

    async def start(self) -> None:
        """Listens when it returns. Raises EngineError for an address in use."""
        config = self.config
        await self._runner.setup()
        try:
            if config.kv_events_endpoint is not None:
                self._publisher = KvEventPublisher(
                    config.kv_events_endpoint, config.replay_endpoint, config.kv_events_topic
                )
                self._tasks.append(asyncio.create_task(self._publisher.serve_replays()))
            await web.TCPSite(self._runner, config.host, config.port, backlog=1024).start()
        except PublisherError as error:
            await self.stop()
            raise EngineError(str(error)) from error
        except OSError as error:
            await self.stop()
            raise EngineError(_listen_problem(config, error)) from error
        self._tasks.append(asyncio.create_task(self._loop.run()))
        port = self._runner.addresses[0][1]
        self.url = f"http://{config.host}:{port}"

    async def wait(self) -> None:
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()
        await self._runner.cleanup()
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_api_errors])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._render_metrics),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.post("/simulation/slow_factor", self._slow_down),
                web.post("/tokenize", self._tokenize),
            ]
        )
        if self.config.kind == "tensorrt-llm":
            app.add_routes(
                [
                    web.get("/prometheus/metrics", self._render_metrics),
                    web.post("/kv_cache_events", self._kv_cache_events),
                ]
            )
        if self.config.kind == "sglang":
            app.add_routes([web.post("/flush_cache", self._reset_prefix_cache)])
        return app

    def _deliver(self, tokens: list[TokenOut], _now_s: float) -> None:
        self._metrics.on_tokens(tokens)
        events = self.model.drain_events()
        if self._fetched is not None:
            self._fetched.add(events, self._prompts)
        if self._publisher is not None:
            self._publisher.publish(self._encoder.encode(events, self._prompts))
        for token in tokens:
            self._answers[token.request_id].on_token(token)

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        arrival_s = monotonic()
        request = parse_chat(await http.read())
        self._check_model(request.model)
        return await self._generate(http, request, self._chat_tokens(request), "chatcmpl-", arrival_s)

    async def _completion(self, http: web.Request) -> web.StreamResponse:
        arrival_s = monotonic()
        request = parse_completion(await http.read())
        self._check_model(request.model)
        if isinstance(request.prompt, str):
            tokens = self._tokenizer.encode(request.prompt, add_special_tokens=True)
        else:
            tokens = self._known_tokens(request.prompt)
        return await self._generate(http, request, tokens, "cmpl-", arrival_s)

    async def _generate(
        self, http: web.Request, request: GenerationRequest, tokens: Tokens, prefix: str, arrival_s: float
    ) -> web.StreamResponse:
        config = self.config
        max_tokens, reason = self._output_limit(request, len(tokens))
        salt = None if config.ignore_cache_salt else request.cache_salt
        blocks = block_hashes(tokens, config.block_size, root=namespace_root(salt=salt)).tolist()
        request_id = str(next(self._ids))
        answer_id = prefix + (http.headers.get("X-Request-Id") or secrets.token_hex(16))
        encoder = AnswerEncoder(request, answer_id, config.served_model_name, len(tokens), config.usage_fields)
        answer = Answer(self._words, tokens, encoder)
        response = await _open_stream(http) if request.stream else None
        if response is not None:
            answer.stream_to(http)
        sim = SimRequest(request_id, blocks, len(tokens), max_tokens, arrival_s, reason)
        async with self._submitted(sim, Prompt(tokens, blocks, request.cache_salt), answer):
            token = await answer.last
        if response is not None:
            await response.write_eof()
            return response
        text = self._words.text(answer.sequence, token.position + 1)
        cached_tokens = token.sequence.cached_tokens or 0
        body = encoder.whole(text, token.finish_reason or reason, token.position + 1, cached_tokens)
        return web.Response(body=body, content_type="application/json")

    @contextlib.asynccontextmanager
    async def _submitted(self, sim: SimRequest, prompt: Prompt, answer: Answer) -> AsyncIterator[None]:
        """The request is in the model; when its client leaves, it leaves too."""
        try:
            self.model.submit(sim)
        except RequestError as error:
            raise ApiError(400, str(error)) from error
        self._answers[sim.id] = answer
        if self._publisher is not None or self._fetched is not None:
            self._prompts[sim.id] = prompt
        try:
            self._loop.wake()
            yield
        finally:
            self.model.abort(sim.id, monotonic())
            del self._answers[sim.id]
            self._prompts.pop(sim.id, None)

    def _output_limit(self, request: GenerationRequest, prompt_tokens: int) -> tuple[int, str]:
        """Tokens to generate and why the answer ends there. Raises ApiError 400 where they don't fit the model."""
        limit = self.config.max_model_len
        if prompt_tokens < 1:
            raise ApiError(400, "the prompt has no tokens")
        wanted = request.output_limit()
        if prompt_tokens + (wanted or 1) > limit:
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens. However, your request has {prompt_tokens} "
                f"input tokens and asks for {wanted or 'at least 1'} output tokens. Please shorten either.",
            )
        if wanted is not None:
            return wanted, "length"
        room = limit - prompt_tokens
        if request.ignore_eos or self.config.default_output_tokens >= room:
            return room, "length"
        return self.config.default_output_tokens, "stop"

    def _chat_tokens(self, request: ChatRequest) -> Tokens:
        try:
            return self._tokenizer.encode_chat(
                request.messages, request.cache_salt or "", tools=request.tools, **request.chat_template_kwargs
            )
        except TokenizerError as error:
            raise ApiError(400, str(error), param="messages") from error

    def _known_tokens(self, ids: list[int]) -> Tokens:
        highest, size = max(ids), self._tokenizer.vocabulary_size
        if highest >= size:
            raise ApiError(400, f"token id {highest} is not in the model's vocabulary of {size} tokens", param="prompt")
        return as_tokens(ids)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.config.served_model_name:
            raise ApiError(404, f"The model `{name}` does not exist.", "NotFoundError", "model")

    async def _models(self, _http: web.Request) -> web.Response:
        name, limit = self.config.served_model_name, self.config.max_model_len
        model = {"id": name, "object": "model", "owned_by": "prefixwatch", "root": name, "max_model_len": limit}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _http: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _http: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _render_metrics(self, _http: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _slow_down(self, http: web.Request) -> web.Response:
        """A fault during a run: `{"slow_factor": 3}`; 1 is the engine's own speed."""
        factor = (await http.json())["slow_factor"]
        self.model.config = replace(
            self.model.config, step_time=self.config.engine_config().step_time.scaled(float(factor))
        )
        return web.json_response({"slow_factor": factor})

    async def _reset_prefix_cache(self, _http: web.Request) -> web.Response:
        """200 in any case, as vLLM; the body says whether requests in work prevented it."""
        return web.json_response({"success": self.model.reset_prefix_cache()})

    async def _kv_cache_events(self, _http: web.Request) -> web.Response:
        assert self._fetched is not None
        return web.json_response(self._fetched.fetch())

    async def _tokenize(self, http: web.Request) -> web.Response:
        request = parse_tokenize(await http.read())
        self._check_model(request.model)
        if request.messages is not None:
            chat = ChatRequest(
                messages=request.messages, tools=request.tools, chat_template_kwargs=request.chat_template_kwargs
            )
            tokens = self._chat_tokens(chat)
        else:
            special = request.add_special_tokens is not False
            tokens = self._tokenizer.encode(request.prompt or "", add_special_tokens=special)
        answer = {"count": len(tokens), "max_model_len": self.config.max_model_len, "tokens": tokens.tolist()}
        return web.json_response({**answer, "token_strs": None})


@web.middleware
async def _api_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return web.Response(status=error.status, body=error.body(), content_type="application/json")


async def _open_stream(http: web.Request) -> web.StreamResponse:
    """Headers go out at once, long before the first token, as vLLM's do."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(http)
    return response


def _listen_problem(config: SimulatedEngineConfig, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {config.port} on {config.host} is in use: choose another with --port, or 0 for any free one"
    return f"can't listen on {config.host}:{config.port}: {error.strerror or error}"


async def serve(config: SimulatedEngineConfig) -> None:
    """Run until SIGTERM or SIGINT; prints one line with the address when ready. Raises EngineError."""
    engine = SimulatedEngine(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await engine.start()
    print(f"simulated engine ready: {engine.url} model {config.served_model_name}", flush=True)
    waits = [asyncio.create_task(engine.wait()), asyncio.create_task(stop.wait())]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in waits:
            task.cancel()
        await engine.stop()


def _config_from(arguments: Sequence[str]) -> SimulatedEngineConfig:
    """The file's values, overridden by the options. Raises DocumentError."""
    parser = argparse.ArgumentParser(
        prog="python -m prefixwatch.engines.simulated.server", description="Serve a simulated engine."
    )
    parser.add_argument("--config", type=Path, help="YAML or JSON file with any of the values below")
    for name in SimulatedEngineConfig.model_fields:
        if name != "step_time":  # a table: only in the file
            parser.add_argument("--" + name.replace("_", "-"))
    options = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    file = options.pop("config", None)
    if file and not options:
        return load(file, SimulatedEngineConfig)
    values = (load_plain(file) or {}) if file else {}
    if not isinstance(values, dict):
        raise DocumentError(f"{file}: expected a mapping of settings, for example `port: 8001`")
    return validate({**values, **options}, SimulatedEngineConfig, lambda path: str(file or "options"))


def serve_file(file: Path) -> None:
    """Serve the engine that a configuration file describes, until SIGINT or SIGTERM. Raises InputError."""
    _run(load(file, SimulatedEngineConfig))


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        _run(_config_from(sys.argv[1:] if arguments is None else arguments))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(config: SimulatedEngineConfig) -> None:
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        runner.run(serve(config))


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed: every token is a socket write, and it makes those cheaper."""
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


if __name__ == "__main__":
    sys.exit(main())
