"""A request's body → what routing needs to know of it: tokens, blocks, and the body to send on.

Pure and thread-safe, so that long prompts can be read beside the event loop. What can't be tokenised (a template
that refuses, content of an unknown shape) is still routed and sent on: the engine is the judge of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import msgspec
import numpy as np

from prefixwatch.kvcache.blocks import Hashes, TokenIdsError, Tokens, as_tokens, block_hashes, namespace_root
from prefixwatch.kvcache.events.wire import Namespace
from prefixwatch.kvcache.index.keyed_blocks import BlockKey, names
from prefixwatch.kvcache.prompts.media import readable_tokens
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer, TokenizerError
from prefixwatch.router.errors import BadRequest
from prefixwatch.router.exchange.endpoints import CHAT, COMPLETIONS, GENERATING, READ
from prefixwatch.router.exchange.namespaces import Namespaces, with_only_this_salt
from prefixwatch.router.exchange.routing_key import RoutingKey, mended_chat, mended_text
from prefixwatch.router.policy import MAX_OUTPUT_TOKENS, NO_TOKENS
from prefixwatch.router.tenant_config import TenantsConfig

_NO_BLOCKS: Hashes = np.empty(0, dtype=np.uint64)


_ABSENT = msgspec.Raw(b"null")
_MEDIA_KEYS = frozenset({"image_url", "image", "input_audio", "audio_url", "audio", "video_url", "file", "source"})
"""Parts under these keys hold encoded media, which isn't tokenised."""


class _Body(msgspec.Struct):
    """The fields of an OpenAI request that matter here; any may be missing or of a wrong type."""

    model: Any = ""
    stream: Any = False
    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
    max_tokens: Any = None
    max_completion_tokens: Any = None
    cache_salt: Any = None
    extra_key: Any = None
    add_special_tokens: Any = True
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template_kwargs: msgspec.Raw = _ABSENT


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
    """The body carries a cache salt, so the engine keeps the blocks apart."""
    salt_root: int | None = None
    """The salt's namespace root; None without a salt."""
    batch: bool = False
    """The body holds more prompts, of which nothing is known here."""
    key: RoutingKey | None = None
    """What the policy sees instead; None where that is the prompt itself."""
    unread: str = ""
    """Why the tokens aren't known: `template`, `content`, `no_tokenizer` or `endpoint`. With `media`, the blocks end
    before the first message that holds an image, audio or the like."""


class PromptReader:
    """Reads bodies as the engines behind the router would."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        block_size: int,
        tenants: TenantsConfig,
        limits: PromptLimits | None = None,
        adapters: frozenset[str] = frozenset(),
        namespaces: Namespaces | None = None,
        routing_key: Sequence[str] = (),
        block_key: BlockKey | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._namespaces = namespaces
        self._block_key = block_key
        self._tokenizer = tokenizer
        self._block_size = block_size
        self._tenants = tenants
        self._limits = limits or PromptLimits()
        self._adapters = adapters
        self._routing_key = routing_key
        self._clock = clock

    def warm_up(self) -> None:
        """Load the compiled hash, which takes from 0.2 s to some seconds, before a request has to wait for it."""
        block_hashes(as_tokens(range(self._block_size)), self._block_size)

    def read(self, path: str, body: bytes, tenant: str, *, tokens: bool, blocks: bool, text: bool = False) -> Prompt:
        """Parse, and tokenise and hash where wanted. Where text is wanted and there is none, its tokens are read.

        Raises BadRequest when the body isn't a JSON object, exceeds a limit, or has a cache salt that isn't text.
        """
        try:
            fields = _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"the body is not a JSON object: {error}") from error
        extra_key = None
        if self._namespaces is not None:
            salt: str | None = (own := self._namespaces.salt(tenant))
            body = self._in_namespace(body, path, own)
        else:
            salt = self._salt(tenant, fields.cache_salt)
            keeps_key = fields.extra_key is None or not self._tenants.guards_salts
            if (salt != fields.cache_salt or not keeps_key) and (path in READ or path in GENERATING):
                body = _with_salt(body, salt, keeps_key=keeps_key)
            if keeps_key and fields.extra_key is not None:
                extra_key = _key_text(fields.extra_key)
        model = fields.model if isinstance(fields.model, str) else ""
        if path not in READ:
            return Prompt(
                body, model, fields.stream is True, 0, None, _NO_BLOCKS, 0.0, 0.0, salted=bool(salt),
                salt_root=namespace_root(salt), unread="endpoint",
            )  # fmt: skip
        begun = self._clock()
        words, ids, unread, batch, prompt = "", None, "", False, None
        if tokens or blocks or text:
            prompt = self._decoded(path, body, fields)
            words = (_chat_text(prompt) if path == CHAT else _prompt_text(prompt)) if text else ""
            batch = path == COMPLETIONS and _is_batch(prompt)
            if tokens or blocks or not words:
                ids, unread = self._tokens(path, prompt, fields, salt)
                if path == CHAT and ids is not None and readable_tokens(ids) < len(ids):
                    unread = "media"
        tokenized = self._clock()
        hashes, namespace = _NO_BLOCKS, Namespace(salt, model if model in self._adapters else None, extra_key)
        if blocks and ids is not None:
            hashes = self._hashes(ids, namespace)
        key = None
        if self._routing_key and prompt is not None:
            key = self._key(
                path, prompt, fields, salt, namespace=namespace, tokens=tokens or blocks, blocks=blocks, text=text
            )
        return Prompt(
            body=body,
            model=model,
            stream=fields.stream is True,
            max_output_tokens=_limit(fields.max_completion_tokens) or _limit(fields.max_tokens),
            tokens=ids,
            blocks=hashes,
            tokenize_seconds=tokenized - begun,
            hash_seconds=self._clock() - tokenized,
            text=words,
            key=key,
            salted=bool(salt),
            salt_root=namespace_root(salt),
            batch=batch,
            unread=unread,
        )

    def _hashes(self, ids: Tokens, namespace: Namespace) -> Hashes:
        if self._block_key is None:
            return block_hashes(ids, self._block_size, root=namespace.root())
        return names(self._block_key.states(ids, self._block_size, self._block_key.root(*namespace)))

    @staticmethod
    def _in_namespace(body: bytes, path: str, salt: str) -> bytes:
        try:
            return with_only_this_salt(body, path, salt)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"the body is not a JSON object: {error}") from error

    def _salt(self, tenant: str, claimed: Any) -> str | None:
        if claimed is not None and not isinstance(claimed, str):
            raise BadRequest("cache_salt must be a text", "bad_salt")
        return self._tenants.salt_for(tenant, claimed)

    def _decoded(self, path: str, body: bytes, fields: _Body) -> Any:
        """The messages or the prompt. Raises BadRequest for more of it than the limits allow to be tokenised."""
        raw = fields.messages if path == CHAT else fields.prompt
        if len(body) > self._limits.characters:  # a body has at least as many bytes as characters and values
            self._limits.check_values(raw, fields.tools, fields.chat_template_kwargs)
        try:
            prompt = _value(raw)
            if len(body) > self._limits.characters:
                self._limits.check_characters(prompt, _value(fields.tools), _value(fields.chat_template_kwargs))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"the prompt can't be read: {error}") from error
        self._limits.check_messages(prompt)
        return prompt

    def _tokens(self, path: str, prompt: Any, fields: _Body, salt: str | None) -> tuple[Tokens | None, str]:
        """The prompt's tokens, or None and the reason."""
        try:
            if path == CHAT:
                ids = self._chat_tokens(prompt, fields, salt, _value(fields.tools))
            else:
                ids = self._prompt_tokens(prompt, fields)
        except TokenizerError:
            return None, "template"
        except TokenIdsError as error:
            raise BadRequest(f"prompt: {error}", "bad_tokens") from error
        except (msgspec.DecodeError, TypeError, ValueError, AttributeError, KeyError, OverflowError, RecursionError):
            return None, "content"
        if ids is None:
            return None, "no_tokenizer" if self._tokenizer is None else "content"
        return ids, ""

    def _key(
        self,
        path: str,
        prompt: Any,
        fields: _Body,
        salt: str | None,
        *,
        namespace: Namespace,
        tokens: bool,
        blocks: bool,
        text: bool,
    ) -> RoutingKey | None:
        """The prompt without what `routing_key` names; None where it can't be had, and the prompt itself is the key."""
        changed: Any
        try:
            if path == CHAT:
                chat = mended_chat(prompt, _value(fields.tools), self._routing_key)
                if chat is None:
                    return None
                changed, tools = chat
                ids = self._chat_tokens(changed, fields, salt, tools) if tokens else NO_TOKENS
            else:
                changed = mended_text(prompt[0] if _is_batch(prompt) else prompt, self._routing_key)
                if changed is None:
                    return None
                ids = self._prompt_tokens(changed, fields) if tokens else NO_TOKENS
        except (TokenizerError, msgspec.DecodeError, TypeError, ValueError, AttributeError, KeyError, RecursionError):
            return None
        if ids is None:
            return None
        words = (_chat_text(changed) if path == CHAT else changed) if text else ""
        return RoutingKey(ids, self._hashes(ids, namespace) if blocks else _NO_BLOCKS, words)

    def _chat_tokens(self, messages: Any, fields: _Body, salt: str | None, tools: Any) -> Tokens | None:
        if self._tokenizer is None or not isinstance(messages, list):
            return None
        arguments: dict[str, Any] = dict(_value(fields.chat_template_kwargs) or {})
        for name in ("add_generation_prompt", "continue_final_message"):
            value = getattr(fields, name)
            if value is not None:
                arguments[name] = value
        return self._tokenizer.encode_chat(messages, salt or "", tools=tools, **arguments)

    def _prompt_tokens(self, prompt: Any, fields: _Body) -> Tokens | None:
        """A batch of prompts is routed by its first."""
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list):
            return as_tokens(prompt)
        if isinstance(prompt, str) and self._tokenizer is not None:
            return self._tokenizer.encode(prompt, add_special_tokens=fields.add_special_tokens is not False)
        return None


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """How much of a prompt may be tokenised. Tokenising takes up to 150 times the memory of the text."""

    characters: int = 4_000_000
    """Characters of text, tokens of a prompt of ids, and JSON values."""
    messages: int = 10_000

    def check_values(self, *raws: msgspec.Raw) -> None:
        """Refuse what would take much memory to decode: separators and brackets bound the number of values."""
        texts = [bytes(raw) for raw in raws]
        if sum(text.count(mark) for text in texts for mark in (b",", b"[", b"{")) > self.characters:
            raise BadRequest(f"the prompt has more than {self.characters} JSON values", "too_large", 413)

    def check_characters(self, *values: Any) -> None:
        """Refuse more text than may be tokenised; encoded images, audio and files don't count."""
        if sum(map(_characters, values)) > self.characters:
            raise BadRequest(f"the prompt has more than {self.characters} characters", "too_large", 413)

    def check_messages(self, prompt: Any) -> None:
        """Refuse more messages than may be rendered."""
        if isinstance(prompt, list) and len(prompt) > self.messages and not isinstance(prompt[0], int):
            raise BadRequest(f"the prompt has more than {self.messages} messages or texts", "too_large", 413)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + _characters(inner) for key, inner in value.items() if key not in _MEDIA_KEYS)
    return sum(map(_characters, value)) if isinstance(value, list) else 1


def _value(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw)


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


def _key_text(extra_key: Any) -> str:
    """SGLang takes a text, or a list of texts with a batch."""
    return extra_key if isinstance(extra_key, str) else msgspec.json.encode(extra_key).decode()


def _with_salt(body: bytes, salt: str | None, *, keeps_key: bool) -> bytes:
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    if not keeps_key:  # SGLang joins both without a mark between them, so together they may read as another's salt
        del fields["extra_key"]
    fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
    return msgspec.json.encode(fields)


def _limit(value: Any) -> int:
    """A limit of output tokens; 0 for none."""
    return min(value, MAX_OUTPUT_TOKENS) if isinstance(value, int) and value > 0 and value is not True else 0
