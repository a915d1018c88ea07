"""A request's body → what routing needs to know of it: tokens, blocks, and the body to send on.

Pure and thread-safe, so that long prompts can be read beside the event loop. What can't be tokenised (a template
that refuses, content of an unknown shape) is still routed and sent on: the engine is the judge of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import msgspec
import numpy as np

from kvcache.blocks import Hashes, Tokens, as_tokens, block_hashes, namespace_root
from kvcache.tokenizer import Tokenizer, TokenizerError
from router.config import TenantsConfig
from router.errors import BadRequest
from router.policy import NO_TOKENS

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_NO_BLOCKS: Hashes = np.empty(0, dtype=np.uint64)


class _Body(msgspec.Struct):
    """The fields of an OpenAI request that matter here; any may be missing or of a wrong type."""

    model: Any = ""
    stream: Any = False
    messages: Any = None
    prompt: Any = None
    tools: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    cache_salt: Any = None
    add_special_tokens: Any = True
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template_kwargs: Any = None


_decode = msgspec.json.Decoder(_Body).decode


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as read. `tokens` is None where nobody needs them or they can't be known."""

    body: bytes
    model: str
    stream: bool
    max_output_tokens: int
    tokens: Tokens | None
    blocks: Hashes
    tokenize_seconds: float
    hash_seconds: float
    text: str = ""
    """As `RouteRequest.text`."""
    salted: bool = False
    """The engine is told to keep the blocks apart."""
    batch: bool = False
    """There are further prompts in the body, of which nothing is known here."""


class PromptReader:
    """Reads bodies as the engines behind the router would."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        block_size: int,
        tenants: TenantsConfig,
        adapters: frozenset[str] = frozenset(),
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._tokenizer = tokenizer
        self._block_size = block_size
        self._tenants = tenants
        self._adapters = adapters
        self._clock = clock

    def warm_up(self) -> None:
        """Load the compiled hash, which takes from 0.2 s to some seconds, before a request has to wait for it."""
        block_hashes(as_tokens(range(self._block_size)), self._block_size)

    def read(self, path: str, body: bytes, tenant: str, *, tokens: bool, blocks: bool, text: bool = False) -> Prompt:
        """Parse, and tokenise and hash where wanted; where text is wanted and there is none, its tokens are read.

        Raises BadRequest when the body is no JSON object.
        """
        try:
            fields = _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequest(f"the body is not a JSON object: {error}") from error
        claimed = fields.cache_salt if isinstance(fields.cache_salt, str) else None
        salt = self._tenants.salt_for(tenant, claimed)
        if salt != claimed:
            body = _with_salt(body, salt)
        model = fields.model if isinstance(fields.model, str) else ""
        words = (_chat_text(fields.messages) if path == CHAT else _prompt_text(fields.prompt)) if text else ""
        begun = self._clock()
        ids = self._tokens(path, fields) if tokens or blocks or (text and not words) else None
        tokenized = self._clock()
        hashes = _NO_BLOCKS
        if blocks and ids is not None:
            root = namespace_root(salt, model if model in self._adapters else None)
            hashes = block_hashes(ids, self._block_size, root=root)
        return Prompt(
            body=body,
            model=model,
            stream=fields.stream is True,
            max_output_tokens=_positive(fields.max_completion_tokens) or _positive(fields.max_tokens),
            tokens=ids,
            blocks=hashes,
            tokenize_seconds=tokenized - begun,
            hash_seconds=self._clock() - tokenized,
            text=words,
            salted=bool(salt),
            batch=path == COMPLETIONS and _is_batch(fields.prompt),
        )

    def _tokens(self, path: str, fields: _Body) -> Tokens | None:
        try:
            return self._chat_tokens(fields) if path == CHAT else self._prompt_tokens(fields)
        except (TokenizerError, TypeError, ValueError, AttributeError, KeyError, OverflowError):
            return None

    def _chat_tokens(self, fields: _Body) -> Tokens | None:
        if self._tokenizer is None or not isinstance(fields.messages, list):
            return None
        arguments: dict[str, Any] = dict(fields.chat_template_kwargs or {})
        for name in ("add_generation_prompt", "continue_final_message"):
            value = getattr(fields, name)
            if value is not None:
                arguments[name] = value
        return self._tokenizer.encode_chat(fields.messages, tools=fields.tools, **arguments)

    def _prompt_tokens(self, fields: _Body) -> Tokens | None:
        """A batch of prompts is routed by its first."""
        prompt = fields.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list):
            return as_tokens(prompt)
        if isinstance(prompt, str) and self._tokenizer is not None:
            return self._tokenizer.encode(prompt, add_special_tokens=fields.add_special_tokens is not False)
        return None


def tokens_or_none(prompt: Prompt) -> Tokens:
    """The prompt's tokens, or the empty array."""
    return NO_TOKENS if prompt.tokens is None else prompt.tokens


def _chat_text(messages: Any) -> str:
    """The texts of a chat, joined by newlines."""
    texts: list[str] = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "\n".join(texts)


def _prompt_text(prompt: Any) -> str:
    """A prompt that is text, or the first of a batch of such; otherwise empty."""
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    return first if isinstance(first, str) else ""


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)


def _with_salt(body: bytes, salt: str | None) -> bytes:
    fields = msgspec.json.decode(body)
    fields["cache_salt"] = salt
    return msgspec.json.encode(fields)


def _positive(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
