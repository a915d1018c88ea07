"""The two kinds of trouble: the router can't start, or it can't answer a request."""

from __future__ import annotations

import msgspec


class RouterError(Exception):
    """The router can't run as configured; the message names the setting or target and the remedy."""


class BadRequest(Exception):
    """The body is not a JSON object: the one thing that the router judges itself, engines judge the rest."""


def error_body(message: str, kind: str, status: int) -> bytes:
    """An error object as OpenAI clients expect it."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def error_event(message: str, kind: str, status: int) -> bytes:
    """The same object as a server-sent event, for a stream that has already begun."""
    return b"data: " + error_body(message, kind, status) + b"\n\n"
