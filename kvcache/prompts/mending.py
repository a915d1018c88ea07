"""What makes equal prompts differ, by kind, and the prompt without it.

A kind's mender replaces what changes from request to request by a constant, or puts it into one order. It returns a new
prompt and never changes the one it is given. `analyze` compares reuse before and after each kind, and a router with
`routing_key` does it to what clients send: so each takes time in proportion to the text, whatever that is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixwatch.kvcache.prompts.media import TEXT_PARTS

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a request sends: its conversation and its tools."""

    messages: tuple[Message, ...]
    tools: Any = None


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of difference."""

    name: str
    title: str
    remedy: str
    mend: Callable[[ChatPrompt], ChatPrompt]


_MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s*(?:AM|PM|am|pm))?"
_TIME = re.compile(
    rf"\d{{4}}-\d\d-\d\d(?:[T ]{_CLOCK}(?:\s*(?:Z|UTC|GMT|[+-]\d\d:?\d\d))?)?"
    rf"|(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,?\s+)?\d{{1,2}}\.?\s+(?:{_MONTHS})[a-z]*\.?,?\s+\d{{4}}(?:,?\s+{_CLOCK})?"
    rf"|(?:{_MONTHS})[a-z]*\.?\s+\d{{1,2}},\s+\d{{4}}(?:,?\s+{_CLOCK})?"
    rf"|\b\d{{1,2}}/\d{{1,2}}/\d{{4}}\b|\b{_CLOCK}\b|\b1[5-9]\d{{8}}(?:\d{{3}})?(?:\.\d+)?\b"
)
_ID = re.compile(
    r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"
    r"|\b(?:req|request|call|trace|span|session|conv|msg|run|toolu|chatcmpl|resp|user)[-_][A-Za-z0-9_-]{0,64}\d[A-Za-z0-9_-]*\b"
    r"|\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{12,64}\b"
    r"|(?i:\b(?:request|trace|session|correlation)[ _-]?id\s*[:=]\s*)\S+"
)
_BILLING = re.compile(r"^(?:x-[\w-]+\s*:|.*\bbilling\b).*(?:\n|$)", re.IGNORECASE | re.MULTILINE)
_VERSION = re.compile(
    r"\b[vV]?\d+\.\d+(?:\.\d+)+\b|\b[vV]\d+(?:\.\d+)*\b"
    r"|(?i:\b(?:version|revision|build)\s*(?:[:=]\s*)?)[\w.]+"
)
_THOUGHT = re.compile(r"<(think|thinking|reasoning)>")
_SPACES = re.compile(r"(?<![ \t])[ \t]+(?=\n|$)")


def _each_text(change: Callable[[str], str], roles: frozenset[str] | None = None) -> Callable[[ChatPrompt], ChatPrompt]:
    """A mender that changes the texts of these roles' messages, of all if None."""

    def of_message(message: Message) -> Message:
        if roles is not None and message.get("role") not in roles:
            return message
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": change(content)}
        if isinstance(content, list):
            return {**message, "content": [_of_part(part, change) for part in content]}
        return message

    return lambda prompt: ChatPrompt(tuple(of_message(message) for message in prompt.messages), prompt.tools)


def _of_part(part: Any, change: Callable[[str], str]) -> Any:
    key = TEXT_PARTS.get(str(part.get("type"))) if isinstance(part, dict) else None
    return {**part, key: change(part[key])} if key is not None and isinstance(part.get(key), str) else part


def _tools_in_order(prompt: ChatPrompt) -> ChatPrompt:
    if not isinstance(prompt.tools, list):
        return prompt
    tools = [json.loads(json.dumps(tool, sort_keys=True)) for tool in prompt.tools]
    return ChatPrompt(prompt.messages, sorted(tools, key=lambda tool: json.dumps(tool, sort_keys=True)))


def _media_last(prompt: ChatPrompt) -> ChatPrompt:
    """Texts of a message before its images, audio and files."""

    def of_message(message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        return {**message, "content": sorted(content, key=_is_media)}

    return ChatPrompt(tuple(of_message(message) for message in prompt.messages), prompt.tools)


def _is_media(part: Any) -> bool:
    return not (isinstance(part, str) or (isinstance(part, dict) and str(part.get("type")) in TEXT_PARTS))


def _text_without_thoughts(text: str) -> str:
    """In one pass: a search that starts again at each tag takes minutes where none is ever closed."""
    kept, end, unclosed = [], 0, set[str]()
    for tag in _THOUGHT.finditer(text):
        if tag.start() < end or tag[1] in unclosed:
            continue
        closing = f"</{tag[1]}>"
        found = text.find(closing, tag.end())
        if found < 0:
            unclosed.add(tag[1])
            continue
        kept.append(text[end : tag.start()])
        end = found + len(closing)
        while end < len(text) and text[end].isspace():
            end += 1
    return "".join([*kept, text[end:]])


def _without_thoughts(prompt: ChatPrompt) -> ChatPrompt:
    mended = _each_text(_text_without_thoughts, frozenset({"assistant"}))(prompt)
    kept = ({key: value for key, value in m.items() if key != "reasoning_content"} for m in mended.messages)
    return ChatPrompt(tuple(kept), prompt.tools)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "billing",
            "per-request line at the head",
            "send it as a header or as metadata of the request",
            _each_text(lambda text: _BILLING.sub("", text), frozenset({"system", "developer"})),
        ),
        Kind(
            "time",
            "time stamps",
            "put the time at the end of the prompt, or round it to the day",
            _each_text(lambda text: _TIME.sub("<time>", text)),
        ),
        Kind(
            "id",
            "ids of requests, sessions and traces",
            "leave ids out of the prompt, or put them at its end",
            _each_text(lambda text: _ID.sub("<id>", text)),
        ),
        Kind(
            "tools", "order of tools or of their keys", "sort tools by name, and the keys of schemas", _tools_in_order
        ),
        Kind(
            "version",
            "versions in the system prompt",
            "leave version numbers out, and roll a new system prompt out in one step",
            _each_text(lambda text: _VERSION.sub("<version>", text), frozenset({"system", "developer"})),
        ),
        Kind("media", "images, audio or files before text", "put text before images in a message", _media_last),
        Kind(
            "thoughts",
            "thoughts that the template drops from earlier turns",
            "leave thoughts out of all turns, or keep them in all",
            _without_thoughts,
        ),
        Kind(
            "spelling",
            "line ends and trailing spaces",
            "write line ends in one way, without spaces before them",
            _each_text(lambda text: _SPACES.sub("", text.replace("\r\n", "\n"))),
        ),
    )
}


def mended(prompt: ChatPrompt, kinds: Sequence[str]) -> ChatPrompt:
    """The prompt without these kinds of differences, in the order of `KINDS`. Raises KeyError for an unknown kind."""
    chosen = {KINDS[name].name for name in kinds}
    for name, kind in KINDS.items():
        if name in chosen:
            prompt = kind.mend(prompt)
    return prompt
