"""A request record with what several families ask of it, worked out once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvcache.request_record import RequestRecord

LENGTH_BOUNDS = (512, 2048, 8192, 32_768)
LENGTHS = ("0-512", "512-2048", "2048-8192", "8192-32768", "32768+")
OUTCOMES = ("completed", "refused", "rejected", "failed", "timed_out", "disconnected")
_LABEL_CHARACTERS = 128
DEFAULT_CLASS, NO_TENANT, OTHER = "default", "none", "other"


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """`record` and when it was read; the labels are bounded."""

    record: RequestRecord
    at_seconds: float
    """Of the exporter's monotonic clock."""
    request_class: str
    tenant: str
    outcome: str
    cache: str
    """hit, partial, miss or unknown."""
    cached_tokens: int | None
    """Never more than the prompt."""
    turn: Literal["first", "later"] | None = None
    """Of its session."""

    @property
    def completed(self) -> bool:
        return self.record.outcome == "completed"

    @property
    def length(self) -> str:
        """The prompt length's label; empty where it isn't known."""
        return "" if self.record.prompt_tokens is None else length_label(self.record.prompt_tokens)


def length_label(prompt_tokens: int) -> str:
    """The length bucket of a prompt; upper bounds are inclusive."""
    for bound, label in zip(LENGTH_BOUNDS, LENGTHS, strict=False):
        if prompt_tokens <= bound:
            return label
    return LENGTHS[-1]


class BoundedNames:
    """Label values for names that clients choose: the known ones, and the first `limit` others; then one for all."""

    def __init__(self, limit: int, known: Iterable[str] = (), rest: str = OTHER) -> None:
        self._names = dict.fromkeys(known)
        self._room = len(self._names) + limit
        self._rest = rest

    def label(self, name: str) -> str:
        name = name[:_LABEL_CHARACTERS]
        if name in self._names:
            return name
        if len(self._names) >= self._room:
            return self._rest
        self._names[name] = None
        return name
