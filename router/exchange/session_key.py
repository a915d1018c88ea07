"""Which conversation a request belongs to, where no header says so: from the body, a cookie, or how it opens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from xxhash import xxh3_128_hexdigest

from prefixwatch.router.exchange.namespaces import framed

THREAD, USER, OPENING, COOKIE = "thread", "user", "opening", "cookie:"
_THREAD_NAMES = ("thread_id", "conversation_id", "session_id", "chat_id")
_OPENING_MESSAGES = 8
"""Of a chat, at most: what comes before its first question, and that, which all its turns repeat."""
_OPENING_BYTES = 512
"""Of a prompt that isn't a chat."""


class _Fields(msgspec.Struct):
    """What of a body may name a conversation; any of it may be missing or of a wrong type."""

    user: Any = None
    conversation: Any = None
    metadata: Any = None
    messages: msgspec.Raw = msgspec.Raw(b"null")
    input: msgspec.Raw = msgspec.Raw(b"null")
    prompt: msgspec.Raw = msgspec.Raw(b"null")


_decode = msgspec.json.Decoder(_Fields).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def session_key(keys: Sequence[str], body: bytes, cookies: Mapping[str, str], tenant: str) -> str:
    """A hash of the first of these keys that the request has; empty where it has none.

    Keys of different sources, and those of different tenants, never equal one another.
    """
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = _Fields()
    for source in keys:
        cookie = cookies.get(source.removeprefix(COOKIE), "") if source.startswith(COOKIE) else ""
        found = cookie or _from_body(source, fields)
        if found:
            return xxh3_128_hexdigest(framed(source, tenant, found))
    return ""


def _from_body(source: str, fields: _Fields) -> str:
    user = _text(fields.user)
    if source == USER:
        return user
    if source == THREAD:
        conversation = _text(fields.conversation) or _named(fields.conversation, ("id",))
        thread = conversation or _named(fields.metadata, _THREAD_NAMES)
        return framed(user, thread).hex() if thread else ""
    return _opening(fields) if source == OPENING else ""


def _opening(fields: _Fields) -> str:
    for raw in (fields.messages, fields.input, fields.prompt):
        data = bytes(raw)
        if data == b"null":
            continue
        try:
            parts = [] if raw is fields.prompt else _first_question(_decode_list(data)[:_OPENING_MESSAGES])
        except (msgspec.DecodeError, RecursionError):
            parts = []
        opening = b"\n".join(parts) or data[:_OPENING_BYTES]
        return opening.hex() if opening not in (b"[]", b'""') else ""
    return ""


def _first_question(messages: Sequence[msgspec.Raw]) -> list[bytes]:
    """The messages up to the first of a user."""
    found = []
    for message in messages:
        found.append(bytes(message))
        fields = msgspec.json.decode(message)
        if not isinstance(fields, dict) or fields.get("role") == "user":
            break
    return found


def _named(value: Any, names: Sequence[str]) -> str:
    return next((text for name in names if (text := _text(value.get(name)))), "") if isinstance(value, dict) else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
