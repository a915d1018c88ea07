"""What a simulated engine says: words of the model's own vocabulary, the same for the same prompt and seed."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from prefixwatch.kvcache.blocks import Tokens
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer

_WANTED_WORDS = 251  # prime, so that every stride visits every word
_MAX_TRIED_IDS = 20_000


@dataclass(frozen=True, slots=True)
class WordSequence:
    """An endless answer: word k is `(start + k · stride) mod count`."""

    start: int
    stride: int


class OutputWords:
    """Words that are one token each, in any order, so that an answer of n tokens also encodes to n tokens.

    A vocabulary without such words makes the engine say " token" over and over.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._seed = seed
        self.texts = _single_token_words(tokenizer, seed) or [" token"]
        self.json_texts = [json.dumps(text)[1:-1].encode() for text in self.texts]
        """The same, as they stand between the quotes of a JSON string."""

    def sequence(self, prompt: Tokens) -> WordSequence:
        digest = xxh3_64_intdigest(prompt.tobytes(), self._seed)
        return WordSequence(digest & 0xFFFF_FFFF, 1 + (digest >> 32) % _WANTED_WORDS)

    def index(self, sequence: WordSequence, position: int) -> int:
        """Index into `texts` of the word at this position of an answer."""
        return (sequence.start + position * sequence.stride) % len(self.texts)

    def text(self, sequence: WordSequence, count: int) -> str:
        """The first `count` words of an answer."""
        return "".join(self.texts[self.index(sequence, k)] for k in range(count))


def _single_token_words(tokenizer: Tokenizer, seed: int) -> list[str]:
    size = tokenizer.vocabulary_size
    tried = random.Random(seed).sample(range(size), min(size, _MAX_TRIED_IDS))
    words: list[str] = []
    for token in tried:
        letters = tokenizer.token_text(token).strip()
        if len(letters) < 2 or not (letters.isascii() and letters.isalpha()):
            continue
        word = " " + letters
        if tokenizer.encode(word + word).tolist() == [token, token]:
            words.append(word)
            if len(words) == _WANTED_WORDS:
                break
    return words
