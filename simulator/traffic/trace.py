"""Recorded traffic as the simulator's requests: what arrived when, how long it was, which of its blocks came before.

Block ids of a trace (one for every `block_size` tokens, the last for a partial block too) serve as chain hashes as they
are. Recorded texts are tokenised and hashed. Lengths alone become prompts that share nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from prefixwatch.documents.errors import InputError
from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE, Hashes, Tokens, block_hashes, namespace_root
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer, TokenizerError
from prefixwatch.loadgen.plan.replay import DEFAULT_OUTPUT_TOKENS
from prefixwatch.loadgen.plan.request import PromptPart
from prefixwatch.loadgen.recordings.reader import read_recording
from prefixwatch.loadgen.recordings.request import RecordedRequest, Recording
from prefixwatch.router.policy import NO_TOKENS

TRACE_BLOCK_TOKENS = 512
"""Tokens per block id in Mooncake's own traces."""


class TraceError(InputError, ValueError):
    """The recording can't be simulated."""


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
    user: str = ""
    parts: tuple[PromptPart, ...] = ()
    """What the prompt is made of; empty where nobody knows."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A recording's requests in order of arrival."""

    requests: list[SimulatedRequest]
    block_size: int
    """Tokens per block of `requests`."""
    notes: list[str] = field(default_factory=list)
    """What to know before trusting figures about them."""
    timed: bool = True
    """Every request has a time."""


def read_trace(path: Path | str, limit: int | None = None) -> Trace:
    """The (first `limit`) requests of a recording of any format. Raises DocumentError naming the file and the line."""
    return simulated(read_recording(Path(path), limit=limit))


def simulated(recording: Recording, model_dir: Path | None = None) -> Trace:
    """The requests of a recording; `model_dir` has the tokenizer for texts, None stands for the built-in tiny model's.

    Raises TraceError for a text that the model's chat template refuses, and for a `model_dir` that has nothing to read.
    """
    size = recording.block_tokens or DEFAULT_BLOCK_SIZE
    tokenizer: Tokenizer | None = None
    if any(request.messages is not None for request in recording.requests):
        tokenizer = Tokenizer(model_dir or default_model_dir())
    elif model_dir is not None:
        raise TraceError(
            "--model-dir: the recording has no texts for a tokenizer, only lengths, token ids or block ids: leave the "
            "option out"
        )
    requests = [_simulated(number, each, size, tokenizer) for number, each in enumerate(recording.requests)]
    return Trace(requests, size, recording.notes, all(request.arrival_s is not None for request in recording.requests))


def _simulated(number: int, recorded: RecordedRequest, size: int, tokenizer: Tokenizer | None) -> SimulatedRequest:
    blocks, make, length = _prompt(number, recorded, size, tokenizer)
    return SimulatedRequest(
        id=f"trace-{number}",
        arrival_s=recorded.arrival_s or 0.0,
        prompt_tokens=length,
        output_tokens=recorded.output_tokens or DEFAULT_OUTPUT_TOKENS,
        blocks=blocks,
        tokens=make,
        tenant=recorded.tenant,
        session=recorded.session,
    )


def _prompt(
    number: int, recorded: RecordedRequest, size: int, tokenizer: Tokenizer | None
) -> tuple[Hashes, Callable[[], Tokens], int]:
    """Blocks, maker of token ids and length of a prompt."""
    if recorded.messages is not None:
        assert tokenizer is not None
        try:
            tokens = tokenizer.encode_chat(list(recorded.messages), tools=recorded.tools)
        except TokenizerError as error:
            raise TraceError(f"{recorded.where}: the model's chat template refuses it: {error}") from error
        root = namespace_root(recorded.salt, recorded.model or None)
        return block_hashes(tokens, size, root=root), lambda: tokens, len(tokens)
    length = recorded.prompt_tokens
    assert length is not None
    if recorded.block_ids is not None:
        blocks = np.array(recorded.block_ids, dtype=np.uint64)
    else:
        first = np.uint64((number + 1) << 32)
        blocks = first + np.arange(-(-length // size), dtype=np.uint64)
    return blocks, lambda: trace_tokens(blocks, length, size), length


def trace_tokens(blocks: Hashes, prompt_tokens: int, block_size: int = TRACE_BLOCK_TOKENS) -> Tokens:
    """Token ids that are equal exactly where block ids are: token j of block b is b · block size + j (32 bits kept)."""
    ids = blocks[:, None] * np.uint64(block_size) + np.arange(block_size, dtype=np.uint64)
    return ids.ravel()[:prompt_tokens].astype(np.uint32)


def infinite_cache_tokens(requests: Sequence[SimulatedRequest], block_size: int) -> list[int]:
    """Leading prompt tokens of each request that earlier ones carried too: what a cache without limit could reuse."""
    lengths = np.array([len(request.blocks) for request in requests], dtype=np.int64)
    if not lengths.sum():
        return [0] * len(requests)
    blocks = np.concatenate([request.blocks for request in requests])
    _, first, which = np.unique(blocks, return_index=True, return_inverse=True)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    fresh = np.append(np.flatnonzero(first[which] >= np.repeat(starts, lengths)), len(blocks))
    depths = np.minimum(fresh[np.searchsorted(fresh, starts)], ends) - starts
    prompts = np.array([request.prompt_tokens for request in requests])
    shared: list[int] = np.minimum(depths * block_size, prompts).tolist()
    return shared
