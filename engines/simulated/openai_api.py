"""The part of the OpenAI API that vLLM serves and this project speaks: request bodies, errors, answers.

Values in, bytes out; no sockets. Streamed chunks are put together from pre-encoded parts, because an
engine writes thousands of them a second.
"""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple, TypeVar

import msgspec

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's (and vLLM's) default for plain completions; a chat has none."""


class ApiError(Exception):
    """An answer other than 200, in OpenAI's form."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return json.dumps({"error": error}).encode()


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Generation(msgspec.Struct):
    """What both kinds of request can say. Unknown fields (sampling parameters) are ignored."""

    model: str | None = None
    max_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    ignore_eos: bool = False
    n: int | None = None


class ChatRequest(_Generation, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(_Generation, kw_only=True):
    prompt: str | list[int]

    def output_limit(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class TokenizeRequest(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}


GenerationRequest = ChatRequest | CompletionRequest
_Body = TypeVar("_Body")
_Request = TypeVar("_Request", ChatRequest, CompletionRequest)

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)


def parse_chat(body: bytes) -> ChatRequest:
    """Raises ApiError 400 for anything that vLLM would refuse, too."""
    request = _parsed(_chat_decoder, body)
    _check_conversation(request.messages, request.chat_template_kwargs)
    return _checked(request)


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises ApiError 400."""
    request = _parsed(_completion_decoder, body)
    if not request.prompt:
        raise ApiError(400, "prompt must not be empty", param="prompt")
    if isinstance(request.prompt, list) and not all(0 <= token < 2**32 for token in request.prompt):
        raise ApiError(400, "token ids must be between 0 and 2**32 - 1", param="prompt")
    return _checked(request)


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Raises ApiError 400."""
    request = _parsed(_tokenize_decoder, body)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages")
    if request.messages is not None:
        _check_conversation(request.messages, request.chat_template_kwargs)
    return request


def _check_conversation(messages: list[dict[str, Any]], template_arguments: dict[str, Any]) -> None:
    """Raises ApiError 400 for what no chat template could render."""
    if not messages:
        raise ApiError(400, "messages must hold at least one message", param="messages")
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    if not all(isinstance(part, dict) for part in parts):
        raise ApiError(400, "content parts must be objects with a type", param="messages")
    taken = sorted({"messages", "tools"} & template_arguments.keys())
    if taken:
        raise ApiError(400, f"chat_template_kwargs can't set {', '.join(taken)}", param="chat_template_kwargs")


def _parsed(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"the request is not valid: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error


def _checked(request: _Request) -> _Request:
    limit = request.output_limit()
    if limit is not None and limit < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {limit}", param="max_tokens")
    if request.cache_salt == "":
        raise ApiError(400, "cache_salt must be a non-empty string if given", param="cache_salt")
    if request.n not in (None, 1):
        raise ApiError(400, "n must be 1: this engine gives one answer a request", param="n")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options are only allowed with stream", param="stream_options")
    return request


class UsageFields(NamedTuple):
    """What a system's usage object has besides the three counts."""

    cached_tokens: bool = True
    """Else `prompt_tokens_details` is null."""
    reasoning_tokens: bool = False


VLLM_USAGE = UsageFields()


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None = None,
    fields: UsageFields = VLLM_USAGE,
) -> dict[str, Any]:
    """OpenAI's usage object; with `cached_tokens`, prompt tokens reused from the cache, where given."""
    found: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if cached_tokens is not None:
        found["prompt_tokens_details"] = {"cached_tokens": cached_tokens} if fields.cached_tokens else None
    if fields.reasoning_tokens:
        found["reasoning_tokens"] = 0
    return found


class AnswerEncoder:
    """One request's answer, whole or as server-sent events, as vLLM words it."""

    def __init__(
        self,
        request: GenerationRequest,
        answer_id: str,
        model: str,
        prompt_tokens: int,
        fields: UsageFields = VLLM_USAGE,
    ) -> None:
        self._fields = fields
        self._chat = isinstance(request, ChatRequest)
        self._prompt_tokens = prompt_tokens
        options = request.stream_options or StreamOptions()
        self._with_usage = options.include_usage
        self._continuous = options.include_usage and options.continuous_usage_stats
        kind = "chat.completion" if self._chat else "text_completion"
        created = int(time.time())
        self._whole = {"id": answer_id, "object": kind, "created": created, "model": model}
        chunk = {**self._whole, "object": "chat.completion.chunk" if self._chat else kind}
        self._head = b"data: " + json.dumps(chunk, separators=(",", ":"))[:-1].encode() + b',"choices":['
        if self._chat:
            self._before = self._head + b'{"index":0,"delta":{"content":"'
            self._after = b'"},"logprobs":null,"finish_reason":'
            self._close = b',"token_ids":null}]'
        else:
            self._before = self._head + b'{"index":0,"text":"'
            self._after = b'","logprobs":null,"finish_reason":'
            self._close = b',"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]'
        self._middle = self._after + b"null" + self._close
        self._plain_middle = self._middle + b"}\n\n"

    def opening(self) -> bytes:
        """The event before the first token: a chat names the role, with empty content; completions have none."""
        if not self._chat:
            return b""
        choice = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return self._head + choice + self._usage_so_far(0) + b"}\n\n"

    def token(self, json_text: bytes, position: int, finish_reason: str | None) -> bytes:
        """The event of one token, whose text is given as it stands inside a JSON string."""
        if finish_reason is None and not self._continuous:
            return self._before + json_text + self._plain_middle
        reason = b"null" if finish_reason is None else b'"' + finish_reason.encode() + b'"'
        tail = self._after + reason + self._close + self._usage_so_far(position + 1)
        return self._before + json_text + tail + b"}\n\n"

    def closing(self, completion_tokens: int, cached_tokens: int) -> bytes:
        """The usage event, where asked for, and the end mark."""
        end = b"data: [DONE]\n\n"
        if not self._with_usage:
            return end
        final = json.dumps(
            usage(self._prompt_tokens, completion_tokens, cached_tokens, self._fields), separators=(",", ":")
        )
        return self._head + b'],"usage":' + final.encode() + b"}\n\n" + end

    def whole(self, text: str, finish_reason: str, completion_tokens: int, cached_tokens: int) -> bytes:
        """The answer to a request that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        else:
            choice["text"] = text
        counts = usage(self._prompt_tokens, completion_tokens, cached_tokens, self._fields)
        return json.dumps({**self._whole, "choices": [choice], "usage": counts}).encode()

    def _usage_so_far(self, completion_tokens: int) -> bytes:
        if not self._continuous:
            return b""
        counts = json.dumps(usage(self._prompt_tokens, completion_tokens, fields=self._fields), separators=(",", ":"))
        return b',"usage":' + counts.encode()
