"""A request record with the labels that its families share, worked out once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from prefixwatch.kvcache.request_record import RequestRecord

LENGTH_BOUNDS = (512, 2048, 8192, 32_768)
LENGTHS = ("0-512", "512-2048", "2048-8192", "8192-32768", "32768+")
COMPLETED = "completed"
OUTCOMES = (COMPLETED, "refused", "rejected", "failed", "timed_out", "disconnected")
_LABEL_CHARACTERS = 128
DEFAULT_CLASS, NO_TENANT, OTHER = "default", "none", "other"


class Identity(NamedTuple):
    """What a request was for and where it was served: the labels `SERVED`. A part that isn't known is empty."""

    model: str = ""
    pool: str = ""
    namespace: str = ""
    cluster: str = ""


class Place(NamedTuple):
    """Where a worker runs; empty where it isn't known."""

    zone: str = ""
    node: str = ""
    pool: str = ""
    namespace: str = ""
    cluster: str = ""


PlaceOf = Callable[[str], Place]
"""The place of the worker that a router or a span calls by this name."""


def nowhere(worker: str) -> Place:
    """For fleets of which no place is known."""
    return Place()


@dataclass(frozen=True, slots=True)
class Request:
    """`record` and when it was read; the labels are bounded."""

    record: RequestRecord
    at_seconds: float
    """Of the exporter's monotonic clock."""
    identity: Identity
    request_class: str
    tenant: str
    outcome: str
    cache: str
    """hit, partial, miss or unknown."""
    cache_basis: str
    """What the class is measured against: reusable, or whole_prompt; empty for an unknown class."""
    cached_tokens: int | None
    """Never more than the prompt."""
    turn: Literal["first", "later"] | None = None
    """Of its session."""
    read_at: str = ""
    """The router that reported it."""

    @property
    def completed(self) -> bool:
        return self.record.outcome == COMPLETED

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
    """Bounds a label whose values clients choose: the `known` names and the first `limit` others keep their own value,
    all later ones share `rest`."""

    def __init__(self, limit: int, known: Iterable[str] = (), rest: str = OTHER) -> None:
        self._names = dict.fromkeys(known)
        self._room = len(self._names) + limit
        self._rest = rest
        self.overflowed = 0
        """How often a name had to be replaced because the limit was reached."""

    def label(self, name: str) -> str:
        name = name[:_LABEL_CHARACTERS]
        if name in self._names:
            return name
        if len(self._names) >= self._room:
            self.overflowed += 1
            return self._rest
        self._names[name] = None
        return name
