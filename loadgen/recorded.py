"""Recorded traffic: requests of a file, whatever wrote it, in one form. Formats stand in `loadgen.recorded_formats`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from documents import DocumentError

Format = Literal["mooncake", "openai", "azure", "burstgpt", "otel"]


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


@dataclass(frozen=True, slots=True)
class Recording:
    """Requests in order of arrival, the first one at 0 s."""

    file: Path
    format: Format
    requests: list[RecordedRequest]
    block_tokens: int | None = None
    """Tokens a block id stands for."""


class Lines:
    """A file's lines with their numbers; the first one that isn't blank may be looked at beforehand."""

    def __init__(self, path: Path, lines: Iterable[str]) -> None:
        self.path = path
        self.number = 0
        self._lines = iter(lines)
        self._peeked: tuple[int, str] | None = None

    @property
    def where(self) -> str:
        """Of the line given out last."""
        return f"{self.path}:{self.number}"

    def peek(self) -> str:
        """The first line, empty for an empty file."""
        self._peeked = next(self._counted(), (0, ""))
        return self._peeked[1]

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
