"""Recorded traffic: requests of a file, whatever wrote it, in one form. See `loadgen.recordings.formats`."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from prefixwatch.documents import DocumentError
from prefixwatch.kvcache.prompts.media import has_media

Format = Literal[
    "mooncake", "sessions", "aiperf", "conversations", "otel", "sglang", "vllm", "openai", "azure", "burstgpt"
]


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request as its file has it; what the file doesn't say is None.

    It has `block_ids` (equal ids: equal content up to and including that block), or `messages`, or only lengths.
    """

    where: str
    """`file:line`, for messages."""
    arrival_s: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    block_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: Any = None
    tool_choice: Any = None
    model: str = ""
    session: str = ""
    tenant: str = ""
    salt: str | None = None
    delay_s: float | None = None
    """Later turn of a session: due this long after the answer to the turn before it."""
    failed: bool = False
    """It failed when it was recorded; it was sent all the same."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Requests in order of arrival, the first one at 0 s."""

    file: Path
    format: Format
    requests: list[RecordedRequest]
    block_tokens: int | None = None
    """Tokens a block id stands for."""

    reader_notes: tuple[str, ...] = ()
    """What the reader of the format has to say, such as block ids that contradict each other."""

    def between(self, from_s: float | None, until_s: float | None) -> Recording:
        """The requests that came in this window, seconds from the first; the first of them at 0. Raises DocumentError
        for a window without any."""
        if from_s is None and until_s is None:
            return self
        first, last = from_s or 0.0, float("inf") if until_s is None else until_s
        timed = [r for r in self.requests if r.arrival_s is not None]
        chosen = [r for r in timed if first <= (r.arrival_s or 0.0) < last]
        if not chosen:
            times = [r.arrival_s or 0.0 for r in timed]
            span = f"its requests came from 0 to {max(times):g} s" if times else "its requests have no times"
            raise DocumentError(f"{self.file}: no request between {first:g} and {last:g} s: {span}")
        began = chosen[0].arrival_s or 0.0
        notes = self.reader_notes
        if len(timed) < len(self.requests):
            notes = (*notes, f"Left out of the window, since they have no time: {len(self.requests) - len(timed):,}.")
        moved = [replace(r, arrival_s=(r.arrival_s or 0.0) - began) for r in chosen]
        return replace(self, requests=moved, reader_notes=notes)

    def at_rate(self, per_second: float) -> Recording:
        """The same requests at other times: sessions, and requests without one, begin at this mean rate, at random
        (exponential gaps, always the same ones); later turns keep their distance to the first."""
        draw = random.Random(0)
        begun: dict[str, tuple[float, float]] = {}
        last: dict[str, float] = {}
        clock, found = 0.0, list[RecordedRequest]()
        for number, request in enumerate(self.requests):
            key = request.session or f"request {number}"
            if key not in begun:
                clock += draw.expovariate(per_second)
                begun[key] = (clock, request.arrival_s or 0.0)
                last[key] = clock
            elif request.arrival_s is None:
                last[key] += request.delay_s or 0.0
            else:
                new, old = begun[key]
                last[key] = new + request.arrival_s - old
            found.append(replace(request, arrival_s=last[key]))
        first = min(request.arrival_s or 0.0 for request in found)
        moved = [replace(request, arrival_s=(request.arrival_s or 0.0) - first) for request in found]
        return replace(self, requests=sorted(moved, key=lambda request: request.arrival_s or 0.0))

    @property
    def notes(self) -> list[str]:
        """What to know before trusting figures about these requests."""
        found = list(self.reader_notes)
        if media := sum(has_media(request.messages or ()) for request in self.requests):
            found.append(
                f"{media:,} of {len(self.requests):,} requests have images, audio or files: their content counts as a "
                "difference at its place, and the tokens that an engine makes of it are not in the lengths."
            )
        if lengths := sum(request.messages is None and request.block_ids is None for request in self.requests):
            found.append(
                f"{lengths:,} of {len(self.requests):,} requests have a length without a text or block ids: what their "
                "prompts share is unknown, and nothing counts as shared."
            )
        if failed := sum(request.failed for request in self.requests):
            found.append(
                f"{failed:,} of {len(self.requests):,} requests failed when they were recorded: they count like the "
                "others, with an answer of one token where its length is unknown."
            )
        return found


class Lines:
    """A file's lines with their numbers; the first one that isn't blank may be looked at beforehand."""

    def __init__(
        self,
        path: Path,
        lines: Iterable[str],
        *,
        time_unit: str | None = None,
        block_tokens: int | None = None,
    ) -> None:
        """`time_unit` and `block_tokens` are those that were asked for; None: detected from the content."""
        self.path = path
        self.number = 0
        self.time_unit = time_unit
        self.asked_block_tokens = block_tokens
        self.block_tokens: int | None = None
        """Tokens that a block id of this file stands for; set by the format's reader."""
        self.notes: list[str] = []
        """What the reader has to say about the file."""
        self._at: str | None = None
        self._lines = iter(lines)
        self._peeked: tuple[int, str] | None = None

    @property
    def where(self) -> str:
        """Of the line given out last, or of the one that was gone back to."""
        return self._at or f"{self.path}:{self.number}"

    def at(self, where: str) -> None:
        """Go back to an earlier line, for messages."""
        self._at = where

    def peek(self) -> str:
        """The first line, empty for an empty file."""
        if self._peeked is None:
            self._peeked = next(self._counted(), (0, ""))
        return self._peeked[1]

    def note(self, text: str) -> None:
        """Say this about the file, once."""
        if text not in self.notes:
            self.notes.append(text)

    def __iter__(self) -> Iterator[str]:
        if self._peeked is not None and self._peeked[1]:
            self.number, line = self._peeked
            self._peeked = None
            yield line
        for _, line in self._counted():
            yield line

    def _counted(self) -> Iterator[tuple[int, str]]:
        for line in self._lines:
            self.number += 1
            if line.strip():
                yield self.number, line

    def error(self, message: str) -> DocumentError:
        """An error in the line given out last."""
        return DocumentError(f"{self.where}: {message}")
