"""The engine model advanced from event to event instead of step by step.

While an engine only decodes, one step is like the next: the same B sequences gain one token each and the context grows
by B tokens. Where the duration of a decode step is linear in its context (`StepDuration.decode_growth_s`), step j of
such a run (from 0) lasts d₀ + j · δ, so that k steps last

    T(k) = k · d₀ + δ · k (k − 1) / 2

and the engine can jump over all of them at once. A jump ends with the first step in which a sequence finishes,
before the first step whose blocks don't fit: `EngineModel` itself does all admissions, prefills and preemptions.
Where block events are reported, a jump also ends before the first step that evicts: an index hears of an eviction when
it happens.

The driver alternates `begin` and `end`; what happens in between (a request arrives, a router asks for the load) calls
`advance` first, which performs the steps that are over by then. Equal to stepping one by one, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from prefixwatch.engines.model.engine import EngineConfig, EngineModel
from prefixwatch.engines.model.sequence import SequenceState, SimRequest, TokenOut
from prefixwatch.engines.model.step_time import StepDuration


class EventEngine(EngineModel):
    """`jumps` False: one step after another, the reference that jumping is compared with."""

    def __init__(self, config: EngineConfig, *, jumps: bool = True) -> None:
        super().__init__(config)
        self._jumps = jumps
        self._started_s = 0.0  # when the first step of the jump began
        self._first_step_s = 0.0  # d₀
        self._step_growth_s = 0.0  # δ
        self._steps = 0  # steps in the jump, the first one included; 0 while idle

    @property
    def busy(self) -> bool:
        """Whether a step is in work."""
        return self._steps > 0

    @property
    def ends_s(self) -> float:
        """When the last step of the jump ends."""
        return self._end_of(self._steps)

    @property
    def step_ends_s(self) -> float:
        """When the step in work ends, as of the last `advance`."""
        return self._end_of(1) if self._steps else self._started_s

    def begin(self, now_s: float) -> bool:
        """Begin a step, and all that must follow it alike; False where there is nothing to do."""
        preempted = self.counters.preempted_requests
        step = self.begin_step(now_s)
        self._started_s, self._steps = now_s, 0
        if step is None:
            return False
        self._first_step_s, self._steps = step.duration_s, 1
        batch = self._batch
        assert batch is not None
        # Evictions are reported at the end of this step; a preempted request may be admitted again in the next one.
        alone = bool(self._held.events) or self.counters.preempted_requests != preempted
        if self._jumps and step.decode_sequences == len(batch) and not alone:
            contexts = sum(sequence.computed_tokens + 1 for sequence, _ in batch)
            self._step_growth_s, alike = self.config.step_time.decode_growth_s(len(batch), contexts)
            left = min(sequence.max_tokens - sequence.generated_tokens for sequence, _ in batch)
            self._steps = self._steps_that_fit(min(left, 1 + int(min(alike, left))))
        return True

    def end(self, now_s: float) -> list[TokenOut]:
        """The jump is over: the tokens of its last step."""
        self._perform(self._steps - 1)
        self._steps = 0
        return self.end_step(now_s)

    def advance(self, now_s: float) -> None:
        """Perform the steps of the jump that are over at `now_s`, all but the last; the one in work then goes on."""
        if self._steps > 1:
            self._perform(min(self._steps - 1, self._steps_until(now_s)))

    def kv_usage_at(self, now_s: float) -> float:
        """`kv_usage_ratio` at `now_s`, with the blocks of the jump's steps until then; changes nothing."""
        steps = min(self._steps - 1, self._steps_until(now_s)) if self._steps > 1 else 0
        grown = self._blocks_missing(steps) if steps else 0
        return self.pool.usage_ratio + (grown / self.pool.capacity_blocks if self.pool.capacity_blocks else 0.0)

    def at_speed(self, step_time: StepDuration, now_s: float) -> None:
        """Steps take this long from the next one on."""
        self.advance(now_s)
        self._steps = min(self._steps, 1)
        self.config = replace(self.config, step_time=step_time)

    def stand_still(self, now_s: float, seconds: float) -> None:
        """Nothing goes on for this long; the step in work ends that much later."""
        self.advance(now_s)
        self._steps = min(self._steps, 1)
        self._started_s += seconds

    def receive_at(self, blocks: Sequence[int], now_s: float) -> tuple[list[int], list[int]]:
        """As `receive`; the jump ends with the step in work, since there is less room for its blocks."""
        self.advance(now_s)
        self._steps = min(self._steps, 1)
        return self.receive(blocks)

    def submit(self, request: SimRequest, now_s: float | None = None) -> SequenceState:
        """As `EngineModel.submit`; the jump ends with the step in work, after which the request may be admitted."""
        sequence = super().submit(request, now_s)
        self.advance(sequence.arrival_s)
        self._steps = min(self._steps, 1)
        return sequence

    def _end_of(self, steps: int) -> float:
        return self._started_s + steps * self._first_step_s + self._step_growth_s * (steps * (steps - 1) // 2)

    def _steps_until(self, now_s: float) -> int:
        """Steps of the jump that have ended by `now_s`: the largest k with T(k) ≤ now."""
        elapsed, first, growth = now_s - self._started_s, self._first_step_s, self._step_growth_s
        if elapsed <= 0:
            return 0
        half = first - growth / 2
        estimate = elapsed / first if growth == 0 else (math.sqrt(half * half + 2 * growth * elapsed) - half) / growth
        steps = max(0, min(self._steps, int(estimate)))
        while steps < self._steps and self._end_of(steps + 1) <= now_s:
            steps += 1
        while steps and self._end_of(steps) > now_s:
            steps -= 1
        return steps

    def _steps_that_fit(self, limit: int) -> int:
        """Steps, at most `limit`, whose blocks are free or can be freed by evicting.

        Evictions are steps of their own where events are reported, and where they change which request is next.
        """
        stays = self.config.report_events or (self._rules.longest_match_first and self.waiting > 1)
        room = self.pool.free_blocks if stays else self.pool.available_blocks
        if room is None or limit == 1 or self._blocks_missing(limit - 1) <= room:
            return limit
        fits, too_many = 1, limit
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._blocks_missing(middle - 1) <= room:
                fits = middle
            else:
                too_many = middle
        return fits

    def _blocks_missing(self, steps: int) -> int:
        """Blocks that the batch lacks for `steps` steps after the one in work."""
        assert self._batch is not None
        return self._held.lacking((sequence for sequence, _ in self._batch), 1 + steps)

    def _perform(self, steps: int) -> None:
        """Perform `steps` whole steps; the next one is then in work, with its blocks."""
        if steps <= 0:
            return
        batch = self._batch
        assert batch is not None
        now_s = self._end_of(steps)
        for sequence, _ in batch:
            if not self._held.grow(sequence, sequence.computed_tokens + steps + 1):
                raise RuntimeError("a jump went further than its blocks")
            sequence.computed_tokens += steps
            sequence.generated_tokens += steps
            sequence.last_token_s = now_s
        self.counters.generation_tokens += steps * len(batch)
        self._first_step_s += steps * self._step_growth_s
        self._started_s = now_s
        self._steps -= steps
