"""The two kinds of trouble: the router can't start, or it can't answer a request."""

from __future__ import annotations

import msgspec

from prefixwatch.documents.errors import InputError


class RouterError(InputError):
    """The router can't run as configured; the message names the setting or target and the remedy."""


class BadRequest(Exception):
    """The router refuses the request itself, because it can't be read or must not be passed on.

    `reason` is its label in metrics, `status` the answer's. Engines judge everything else.
    """

    def __init__(self, message: str, reason: str = "not_json", status: int = 400) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status


def error_body(message: str, kind: str, status: int) -> bytes:
    """An error object as OpenAI clients expect it."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def error_event(message: str, kind: str, status: int) -> bytes:
    """The same object as a server-sent event, for a stream that has already begun."""
    return b"data: " + error_body(message, kind, status) + b"\n\n"
