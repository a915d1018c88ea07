"""What to send next to a probed target, and when: prompts, their lengths in turn, the budget, the pauses.

Pure: time and randomness are passed in.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

MINUTE_SECONDS = 60.0
_NONCE_DIGITS = 8
_LONGEST_PAUSE_ROUNDS = 8
_WORDS = resources.files("prefixwatch.exporters.probes").joinpath("words.txt").read_text(encoding="ascii").split()


def unique_prompt(rng: random.Random, words: int) -> str:
    """A prompt of about as many tokens as words that nobody sent before: it begins with a random number.

    A prefix cache keeps whole blocks of 16 tokens or more; the number and the first words make more than 100 random
    bits of them, so that no block of it was ever computed.
    """
    nonce = f"{rng.randrange(10**_NONCE_DIGITS):0{_NONCE_DIGITS}d}"
    return " ".join((nonce, *rng.choices(_WORDS, k=max(1, words - 1))))


@dataclass(slots=True)
class Spending:
    """Tokens that were spent at a time; `tokens` may be set right once they are known."""

    at_seconds: float
    tokens: int


class TokenBudget:
    """Limits the tokens of any 60 seconds."""

    def __init__(self, tokens_per_minute: int) -> None:
        self._limit = tokens_per_minute
        self._spent: deque[Spending] = deque()

    def spent(self, now_seconds: float) -> int:
        """Tokens of the last 60 seconds."""
        while self._spent and self._spent[0].at_seconds <= now_seconds - MINUTE_SECONDS:
            self._spent.popleft()
        return sum(spending.tokens for spending in self._spent)

    def affords(self, tokens: int, now_seconds: float) -> bool:
        return self.spent(now_seconds) + tokens <= self._limit

    def add(self, spending: Spending) -> None:
        self._spent.append(spending)


class TargetPlan:
    """The schedule of one target.

    Lengths are wanted in tokens and prompts made of words: how many words make a token is learned from what the
    engine counts. A length that the engine rejects though it took a shorter one is not tried again.
    """

    def __init__(
        self, lengths: Sequence[int], interval_seconds: float, jitter_ratio: float, rng: random.Random, now: float
    ) -> None:
        self._lengths = sorted(set(lengths))
        self._interval_seconds = interval_seconds
        self._jitter_ratio = jitter_ratio
        self._rng = rng
        self._turn = 0
        self._accepted: set[int] = set()
        self._words_per_token = 1.0
        self._failures = 0
        self.due_seconds = now + interval_seconds * rng.random()
        """When the next round is to begin; the first ones are spread over an interval."""

    @property
    def lengths(self) -> Sequence[int]:
        """The lengths that are tried, shortest first."""
        return self._lengths

    def length(self) -> int:
        """The wanted prompt length of the next round, in tokens."""
        return self._lengths[self._turn % len(self._lengths)]

    def words(self, tokens: int) -> int:
        """As many words as make about that many tokens."""
        return max(1, round(tokens * self._words_per_token))

    def learn(self, words: int, prompt_tokens: int) -> None:
        """What the engine made of a prompt."""
        if prompt_tokens > 0:
            self._words_per_token = min(4.0, max(0.05, words / prompt_tokens))

    def skip(self, now: float) -> None:
        """The round that was due can't be; try a little later, with the same length."""
        self.due_seconds = now + self._spread(self._interval_seconds / 4)

    def done(self, now: float, *, rejected: bool = False, failed: bool = False) -> None:
        """A round ended; after failures the pause grows up to eightfold."""
        length = self.length()
        if rejected and any(other < length for other in self._accepted):
            self._lengths = [other for other in self._lengths if other < length]
        elif not rejected and not failed:
            self._accepted.add(length)
        self._turn += 1
        self._failures = self._failures + 1 if failed or rejected else 0
        pause = min(_LONGEST_PAUSE_ROUNDS, 2 ** max(0, self._failures - 1))
        self.due_seconds = now + self._spread(self._interval_seconds * pause)

    def _spread(self, seconds: float) -> float:
        return seconds * (1 + self._jitter_ratio * self._rng.uniform(-1, 1))
