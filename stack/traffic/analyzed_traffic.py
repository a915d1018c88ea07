"""The traffic that `analyze` looks at, from a scenario or a recording, with texts where they are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prefixwatch.documents import DocumentError
from prefixwatch.kvcache.blocks import Tokens, block_hashes, namespace_root
from prefixwatch.kvcache.prompts.mending import ChatPrompt
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer, TokenizerError
from prefixwatch.loadgen.hygiene.causes import SentPrompt
from prefixwatch.loadgen.plan.planner import planned_prompts
from prefixwatch.loadgen.plan.prompts import PromptWriter
from prefixwatch.loadgen.recordings.analysis import SeenPrompt
from prefixwatch.loadgen.recordings.request import RecordedRequest, Recording
from prefixwatch.loadgen.scenario.model import load_scenario


@dataclass(frozen=True, slots=True)
class Traffic:
    """Prompts in their order; `sent` is empty where texts aren't known."""

    seen: list[SeenPrompt]
    sent: list[SentPrompt]
    block_size: int
    notes: list[str]

    @property
    def shares_known(self) -> bool:
        """Whether anything can be said about reuse."""
        return any(len(prompt.blocks) or prompt.tokens is not None for prompt in self.seen)


def of_scenario(name: str, tokenizer: Tokenizer, block_size: int, *, seed: int, limit: int | None) -> Traffic:
    """The requests that a run would send. Raises DocumentError, PromptError."""
    planned = planned_prompts(load_scenario(name), PromptWriter(tokenizer), seed=seed, nonce="analyze")
    seen, sent = list[SeenPrompt](), list[SentPrompt]()
    for request, tokens in planned:
        if limit is not None and request.index >= limit:
            break
        prompt = ChatPrompt(tuple(request.messages), request.tools)
        own = SentPrompt(prompt, tokens, request.tenant, request.model, request.salt)
        sent.append(own)
        seen.append(_seen(own, block_size, request.scheduled_s, request.session))
    return Traffic(seen, sent, block_size, [])


def of_recording(recording: Recording, tokenizer: Tokenizer, block_size: int) -> Traffic:
    """A recording's requests; a trace has a block size of its own. Raises DocumentError."""
    requests = list(enumerate(recording.requests))
    if recording.block_tokens is not None:
        seen = [_lengths(k, request, request.block_ids or ()) for k, request in requests]
        return Traffic(seen, [], recording.block_tokens, recording.notes)
    if any(request.messages is None for request in recording.requests):
        return Traffic([_lengths(k, request, ()) for k, request in requests], [], block_size, recording.notes)
    sent = list(_sent(recording, tokenizer))
    seen = [
        _seen(own, block_size, request.arrival_s, request.session or f"r{k}")
        for own, (k, request) in zip(sent, requests, strict=True)
    ]
    return Traffic(seen, sent, block_size, recording.notes)


def _sent(recording: Recording, tokenizer: Tokenizer) -> Iterator[SentPrompt]:
    for request in recording.requests:
        assert request.messages is not None
        prompt = ChatPrompt(request.messages, request.tools)
        try:
            tokens = encoded(prompt, tokenizer)
        except TokenizerError as error:
            raise DocumentError(f"{request.where}: the model's chat template refuses it: {error}") from error
        yield SentPrompt(prompt, tokens, request.tenant, request.model, request.salt)


def encoded(prompt: ChatPrompt, tokenizer: Tokenizer) -> Tokens:
    """Token ids of a prompt. Raises TokenizerError."""
    return tokenizer.encode_chat([dict(message) for message in prompt.messages], tools=prompt.tools)


def _seen(own: SentPrompt, block_size: int, arrival_s: float | None, session: str) -> SeenPrompt:
    root = namespace_root(own.salt, own.model or None)
    return SeenPrompt(
        arrival_s=arrival_s,
        namespace=str(root),
        session=session,
        prompt_tokens=len(own.tokens),
        blocks=block_hashes(own.tokens, block_size, root=root),
        tokens=own.tokens,
    )


def _lengths(number: int, request: RecordedRequest, ids: tuple[int, ...]) -> SeenPrompt:
    return SeenPrompt(
        arrival_s=request.arrival_s,
        namespace="",
        session=request.session or f"r{number}",
        prompt_tokens=request.prompt_tokens or 0,
        blocks=np.array(ids, dtype=np.uint64),
    )
