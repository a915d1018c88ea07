"""Request traces: what arrived when, how long it was, and which blocks of it had been seen before.

The format is Mooncake's (FAST'25): JSON lines with `timestamp` (milliseconds), `input_length` and `output_length`
(tokens) and `hash_ids`, one id for every 512 tokens of the prompt, the last one for a partial block too. Equal ids
mean equal content up to and including that block, so they serve as chain hashes as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from kvcache.blocks import Hashes, Tokens
from router.policy import NO_TOKENS

TRACE_BLOCK_TOKENS = 512


class TraceError(ValueError):
    """The trace can't be read, or a line of it isn't a request."""


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request without text.

    `blocks` are chain hashes, one a block of the prompt; the last may belong to a partial block. `tokens` makes the
    prompt's token ids when a policy wants them: a whole trace's would fill the memory.
    """

    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: Hashes
    tokens: Callable[[], Tokens] = lambda: NO_TOKENS
    tenant: str = ""
    session: str = ""
    group: str = ""
    turn: int = 0
    request_class: str = ""
    think_seconds: float = 0.0
    """Closed loop: wait after the session's answer before."""
    shared_tokens: int | None = None
    """As planned; None: what earlier requests of the run carried, whoever sent them."""


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]]


def read_trace(path: Path | str, limit: int | None = None) -> list[SimulatedRequest]:
    """The (first `limit`) requests of a trace in order of arrival. Raises TraceError naming the file and the line."""
    decode = msgspec.json.Decoder(_Line).decode
    requests: list[SimulatedRequest] = []
    try:
        with Path(path).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if limit is not None and len(requests) >= limit:
                    break
                if line.strip():
                    requests.append(_request(decode, line, f"{path}, line {number}", len(requests)))
    except OSError as error:
        raise TraceError(f"can't read the trace {path}: {error.strerror}") from error
    if not requests:
        raise TraceError(f"{path} holds no request: expected JSON lines with timestamp, input_length, hash_ids, …")
    return sorted(requests, key=lambda request: request.arrival_s)


def trace_tokens(blocks: Hashes, prompt_tokens: int) -> Tokens:
    """Token ids that are equal exactly where block ids are: token j of block b is b · 512 + j (32 bits kept)."""
    ids = blocks[:, None] * np.uint64(TRACE_BLOCK_TOKENS) + np.arange(TRACE_BLOCK_TOKENS, dtype=np.uint64)
    return ids.ravel()[:prompt_tokens].astype(np.uint32)


def _request(decode: Callable[[bytes], _Line], line: bytes, where: str, index: int) -> SimulatedRequest:
    try:
        row = decode(line)
        blocks = np.array(row.hash_ids, dtype=np.uint64)
    except (msgspec.DecodeError, OverflowError) as error:
        raise TraceError(
            f"{where}: {error}; a line is a JSON object with timestamp (ms), input_length, output_length (tokens) "
            f"and hash_ids (one for every {TRACE_BLOCK_TOKENS} tokens)"
        ) from error
    expected = -(-row.input_length // TRACE_BLOCK_TOKENS)
    if len(blocks) != expected:
        raise TraceError(
            f"{where}: {len(blocks)} hash_ids for input_length {row.input_length}: expected {expected}, "
            f"one for every {TRACE_BLOCK_TOKENS} tokens"
        )
    return SimulatedRequest(
        id=f"trace-{index}",
        arrival_s=row.timestamp / 1000,
        prompt_tokens=row.input_length,
        output_tokens=row.output_length,
        blocks=blocks,
        tokens=lambda: trace_tokens(blocks, row.input_length),
    )
