"""An LLM engine without the LLM: paged KV cache, continuous batching, prefix reuse, and how long each step takes.

Pure and deterministic: time is passed in and tokens have no text, so the same object runs in real time behind an
HTTP face (`engines.simulated.server`) and in virtual time at fleet scale (`simulator.fleet`). The driver alternates

    step = model.begin_step(now)             # None when there is nothing to do
    tokens = model.end_step(now + step.duration_s)

The scheduler is by default vLLM's (V1): running requests first, each with the tokens it lacks, then waiting ones in
order of arrival while the token budget, the sequence limit and the blocks last; long prompts in chunks; when blocks run
out the last running request is preempted and later recomputed. `engines.model.kinds` has the others.

A prompt's last token is always computed, so a full hit reuses whole blocks up to prompt_tokens − 1. Tokens recomputed
after a preemption are never counted as prefix hits (vllm-project/vllm#25780). Generated tokens occupy blocks but are
not offered for reuse.

A prompt that arrives with its KV looks nothing up: its blocks are allocated, or shared where they are cached, and
count neither as queried nor as hit. Preempted, it has lost that KV and is computed like any other.

A prompt of which some blocks were received looks up the others: received blocks count as hit where the blocks before
them are cached, and only then; one that asks for it is given back where they no longer are (`take_stranded`).
Preempted, it has lost the received blocks too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefixwatch.engines.model.accounts import BlockEvent, Counters
from prefixwatch.engines.model.block_pool import BlockPool
from prefixwatch.engines.model.held_blocks import HeldBlocks
from prefixwatch.engines.model.kinds import KINDS, LONGEST_SORTED_QUEUE, SCHEDULING, EngineKind
from prefixwatch.engines.model.sequence import RequestError, SequenceState, SimRequest, TokenOut
from prefixwatch.engines.model.step_time import StepDuration, token_contexts
from prefixwatch.kvcache.blocks import Hashes


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of an engine. `capacity_blocks` and `max_model_len` None: no limit."""

    step_time: StepDuration
    block_size: int = 16
    capacity_blocks: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    kind: EngineKind = "vllm"
    """Whose scheduler it has (`engines.model.kinds`)."""
    report_events: bool = False
    """Keep the block events for `drain_events`; without a reader they would pile up."""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.kind not in SCHEDULING:
            raise ValueError(f"kind: {self.kind!r} is not a known engine; choose one of {', '.join(KINDS)}")


@dataclass(slots=True)  # not frozen: that takes eight times as long to make
class Step:
    """A batch in work."""

    duration_s: float
    prefill_tokens: int
    decode_sequences: int


class EngineModel:
    """One engine; see the module."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.capacity_blocks)
        self._rules = SCHEDULING[config.kind]
        self.counters = Counters()
        self.prefill_seconds, self.prefills = 0.0, 0
        """Of all prompts so far, from their first step to their first token, and how many those were."""
        self._waiting: deque[SequenceState] = deque()
        self._running: list[SequenceState] = []
        self._sequences: dict[str, SequenceState] = {}
        self._batch: list[tuple[SequenceState, int]] | None = None  # sequences in the step, tokens computed for each
        self._held = HeldBlocks(self.pool, config.block_size, keeps_events=config.report_events)
        self._stranded: list[SequenceState] = []

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_usage_ratio(self) -> float:
        return self.pool.usage_ratio

    def prompt_tokens_left(self) -> list[tuple[SequenceState, int]]:
        """Every request here, with the prompt tokens that are neither computed nor being computed in this step."""
        in_work = {sequence.id: computed for sequence, computed in self._batch or ()}
        return [
            (sequence, max(0, sequence.prompt_tokens - sequence.computed_tokens - in_work.get(sequence.id, 0)))
            for sequence in self._sequences.values()
        ]

    def hit_depth(self, blocks: Sequence[int] | Hashes) -> int:
        """Leading blocks of a prompt that would be found now."""
        return self.pool.match(_as_list(blocks))

    def submit(self, request: SimRequest, now_s: float | None = None) -> SequenceState:
        """Queue a request, as arrived at `now_s` (default: its own `arrival_s`).

        Raises RequestError where it can never fit, or its id is in use.
        """
        blocks, size = _as_list(request.blocks), self.config.block_size
        if request.id in self._sequences:
            raise RequestError(f"request id {request.id!r} is already being served")
        if request.prompt_tokens < 1 or request.max_tokens < 1:
            raise RequestError("a request needs at least 1 prompt token and 1 output token")
        if len(blocks) > -(-request.prompt_tokens // size):
            raise RequestError(
                f"{len(blocks)} block hashes for a prompt of {request.prompt_tokens} tokens in blocks of {size}"
            )
        max_tokens = self._output_limit(request)
        arrival_s = request.arrival_s if now_s is None else now_s
        sequence = SequenceState(request, blocks, max_tokens, arrival_s)
        self._sequences[request.id] = sequence
        self._enqueue(sequence)
        return sequence

    def _enqueue(self, sequence: SequenceState) -> None:
        """Behind those that wait for as long; preempted ones stay in front."""
        waiting, place = self._waiting, len(self._waiting)
        while place and waiting[place - 1].queued_s > sequence.queued_s and not waiting[place - 1].preemptions:
            place -= 1
        waiting.insert(place, sequence)

    def abort(self, request_id: str, now_s: float) -> bool:
        """Drop a request wherever it is; False if it is not (or no longer) here."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        sequence.finish_reason = "abort"
        sequence.last_token_s = now_s
        if sequence in self._running:
            self._running.remove(sequence)
            self._held.release(sequence)
        else:
            self._waiting.remove(sequence)
        return True

    def begin_step(self, now_s: float) -> Step | None:
        """Form the next batch; None when no request is here. Raises RuntimeError while a step is in work."""
        if self._batch is not None:
            raise RuntimeError("begin_step was called again before end_step")
        if not self._running and not self._waiting:
            return None
        self._batch = []
        prompts_alone = False
        if self._rules.prompts_first:
            prompts_alone = self._schedule_prompts_or_generation(now_s)
        else:
            budget, preempted = self._schedule(self._running, self.config.max_num_batched_tokens)
            if not preempted:
                self._admit_waiting(budget, now_s)
        if self._stranded and not self._batch and not self._running:
            self._batch = None
            return None
        return self._timed(self._batch, prompts_alone)

    def end_step(self, now_s: float) -> list[TokenOut]:
        """The batch is done: its blocks can be reused from now on, and these tokens came out of it."""
        if self._batch is None:
            raise RuntimeError("end_step was called without begin_step")
        tokens: list[TokenOut] = []
        finished = False
        for sequence, computed in self._batch:
            if sequence.finish_reason is not None:
                continue  # aborted while the step ran
            sequence.computed_tokens += computed
            if sequence.held_blocks < len(sequence.blocks):
                self._held.commit(sequence)
            if sequence.computed_tokens == sequence.prompt_tokens + sequence.generated_tokens:
                tokens.append(self._emit(sequence, now_s))
                finished = finished or sequence.finish_reason is not None
        self._batch = None
        if finished:
            self._running = [sequence for sequence in self._running if sequence.finish_reason is None]
        return tokens

    def run_alone(self, request: SimRequest) -> SequenceState:
        """Serve one request to its end on an idle engine, starting at its arrival: serial replay of a trace."""
        sequence = self.submit(request)
        now_s = request.arrival_s
        while (step := self.begin_step(now_s)) is not None:
            now_s += step.duration_s
            self.end_step(now_s)
        return sequence

    def receive(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Blocks that were sent from elsewhere, head first, are cached from now on; none where they don't fit.

        Return those that weren't cached before, and those evicted for them.
        """
        return self._held.receive(blocks)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False (and no change) while requests hold blocks."""
        return self._held.clear()

    def take_stranded(self) -> list[SequenceState]:
        """Requests that are no longer here: what their received blocks were to follow has left the cache."""
        found, self._stranded = self._stranded, []
        return found

    def drain_events(self) -> list[BlockEvent]:
        """Block events since the last call, in order; always empty unless the config asks for them."""
        return self._held.drain()

    def _output_limit(self, request: SimRequest) -> int:
        """Tokens the request may generate here. Raises RequestError where it could never finish."""
        limit, max_tokens = self.config.max_model_len, request.max_tokens
        if limit is not None:
            if request.prompt_tokens >= limit:
                raise RequestError(
                    f"a prompt of {request.prompt_tokens} tokens leaves no room for output: "
                    f"the model's maximum length is {limit} tokens"
                )
            max_tokens = min(max_tokens, limit - request.prompt_tokens)
        capacity = self.config.capacity_blocks
        needed = -(-(request.prompt_tokens + max_tokens) // self.config.block_size)
        if capacity is not None and needed > capacity:
            raise RequestError(f"the request needs {needed} KV blocks and the engine has {capacity}")
        return max_tokens

    def _schedule_prompts_or_generation(self, now_s: float) -> bool:
        """Prompts where any can be computed; else a token for each running request, after retracting what must go.

        Return whether the step computes prompts.
        """
        prompts = [sequence for sequence in self._running if not sequence.generates_next]
        budget, preempted = self._schedule(prompts, self.config.max_num_batched_tokens)
        if not preempted:
            self._admit_waiting(budget, now_s)
        if self._batch:
            return True
        while not self._held.fit_their_next_tokens(self._running):
            self._retract()
        self._schedule(self._running, self.config.max_num_batched_tokens)
        return False

    def _schedule(self, sequences: list[SequenceState], budget: int) -> tuple[int, bool]:
        """Give these running requests their tokens. Return the budget left, and whether any request was preempted."""
        batch, size = self._batch, self.config.block_size
        assert batch is not None
        preempted, position = False, 0
        while position < len(sequences) and budget:
            sequence = sequences[position]
            lacking = sequence.prompt_tokens + sequence.generated_tokens - sequence.computed_tokens
            computed = lacking if lacking < budget else budget
            room = (sequence.held_blocks + sequence.blank_blocks) * size
            while sequence.computed_tokens + computed > room and not self._held.grow(
                sequence, sequence.computed_tokens + computed
            ):
                preempted = True
                victim = self._preempt_last()
                if victim is sequence:
                    return budget, True
                if sequences is not self._running and sequences[-1] is victim:
                    sequences.pop()
            batch.append((sequence, computed))
            budget -= computed
            position += 1
        return budget, preempted

    def _admit_waiting(self, budget: int, now_s: float) -> None:
        batch, running = self._batch, self._running
        assert batch is not None
        if self._rules.longest_match_first and 1 < len(self._waiting) <= LONGEST_SORTED_QUEUE:
            self._waiting = deque(sorted(self._waiting, key=lambda each: -self.pool.match(each.blocks)))
        waiting = self._waiting
        while waiting and budget and len(running) < self.config.max_num_seqs:
            sequence = waiting[0]
            if self._rules.reserves_output and not self._held.fit_to_their_ends((*running, sequence)):
                break
            hits = self.pool.match(sequence.blocks)
            if sequence.may_strand and hits < sequence.received_from and not sequence.preemptions:
                self._stranded.append(waiting.popleft())
                del self._sequences[sequence.id]
                continue
            total = sequence.prompt_tokens + sequence.generated_tokens
            received = sequence.arrived_with_kv and not sequence.preemptions
            found = hits
            if sequence.received_from <= hits < sequence.received_to and not sequence.preemptions:
                found = sequence.received_to
            reused = total - 1 if received else self._reusable_tokens(sequence, found, total)
            computed = min(total - reused, budget)
            if not self._held.grow(sequence, reused + computed, hits):
                break
            sequence.computed_tokens = reused
            waiting.popleft()
            running.append(sequence)
            batch.append((sequence, computed))
            budget -= computed
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now_s
                if not received:
                    self._book_lookup(sequence, hits, found, reused)

    def _reusable_tokens(self, sequence: SequenceState, hits: int, total: int) -> int:
        """Whole blocks only, none that holds generated tokens, and never the last token."""
        size = self.config.block_size
        return min(hits, (total - 1) // size, sequence.prompt_tokens // size) * size

    def _book_lookup(self, sequence: SequenceState, hits: int, found: int, reused: int) -> None:
        sequence.hit_blocks, sequence.cached_tokens = hits, reused
        counters = self.counters
        counters.query_tokens += sequence.prompt_tokens
        counters.hit_tokens += reused
        counters.external_hit_tokens += max(0, reused - hits * self.config.block_size)
        counters.query_blocks += len(sequence.blocks)
        counters.hit_blocks += found

    def _retract(self) -> None:
        """The running request that generated least, of several the longest prompt, waits last in line."""
        sequence = min(self._running, key=lambda each: (each.generated_tokens, -each.prompt_tokens))
        self._running.remove(sequence)
        self._give_up(sequence)
        self._waiting.append(sequence)

    def _preempt_last(self) -> SequenceState:
        """The last running request gives up its blocks and waits, first in line, to be computed again."""
        sequence = self._running.pop()
        self._give_up(sequence)
        self._waiting.appendleft(sequence)
        return sequence

    def _give_up(self, sequence: SequenceState) -> None:
        self.counters.preempted_requests += 1
        self.counters.recomputed_tokens += sequence.computed_tokens
        sequence.preemptions += 1
        self._held.release(sequence)

    def _emit(self, sequence: SequenceState, now_s: float) -> TokenOut:
        counters = self.counters
        if sequence.generated_tokens == 0:
            sequence.first_token_s = now_s
            self.prefill_seconds += now_s - (now_s if sequence.scheduled_s is None else sequence.scheduled_s)
            self.prefills += 1
            counters.prompt_tokens += sequence.prompt_tokens
            counters.cached_prompt_tokens += sequence.cached_tokens or 0
        position = sequence.generated_tokens
        gap_s = None if sequence.last_token_s is None else now_s - sequence.last_token_s
        sequence.generated_tokens = position + 1
        sequence.last_token_s = now_s
        counters.generation_tokens += 1
        if sequence.generated_tokens >= sequence.max_tokens:
            sequence.finish_reason = sequence.last_reason
            del self._sequences[sequence.id]
            self._held.release(sequence)
        return TokenOut(sequence.id, position, sequence.finish_reason, gap_s, sequence)

    def _timed(self, batch: list[tuple[SequenceState, int]], prompts_alone: bool) -> Step:
        """`prompts_alone`: whatever is computed counts as prompt, also the last token of a retracted request."""
        prefill_tokens = prefill_sequences = decode_sequences = context_tokens = 0
        contexts = 0.0
        for sequence, computed in batch:
            before = sequence.computed_tokens
            if not prompts_alone and before >= sequence.prompt_tokens and computed == 1:
                decode_sequences += 1
                context_tokens += before + 1
            else:
                prefill_sequences += 1
                prefill_tokens += computed
                contexts += token_contexts(before, computed)
        duration_s = self.config.step_time.duration_s(
            prefill_tokens, contexts, prefill_sequences, decode_sequences, context_tokens
        )
        return Step(duration_s, prefill_tokens, decode_sequences)


def _as_list(blocks: Sequence[int] | Hashes) -> list[int]:
    """Python ints: dictionaries look these up far faster than NumPy scalars."""
    return blocks.tolist() if isinstance(blocks, np.ndarray) else list(blocks)
