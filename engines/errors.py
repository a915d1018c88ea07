"""What goes wrong with engines, for people: each message says what happened and what to do."""

from __future__ import annotations

from prefixwatch.documents.errors import InputError


class EngineError(InputError):
    """An engine, or a process beside the engines, can't be installed, started or used."""
