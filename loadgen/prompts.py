"""Prompts whose length in tokens is exact before they are sent.

Texts are made of a *safe alphabet*: words " word" that are one token each and stay one token whatever stands
beside them, so any row of n of them is n tokens. What the chat template adds is measured once a shape of
conversation (its sequence of roles) and the token ids of a whole prompt are put together from both. Random
ids decoded to text, as other generators send, come back as another number of tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.blocks import Tokens
from kvcache.tokenizer import Tokenizer, TokenizerError

MAX_WORDS = 4096
MIN_WORDS = 64
OPENING = "Text:"
"""Starts every message, so that a template which trims its messages can't change the first word's token."""

_WORD = re.compile(r"\s?[a-z]{3,10}")
_BATCH = 64

Words = npt.NDArray[np.int64]
"""A text as positions in the alphabet."""
Conversation = Sequence[tuple[str, Words]]
"""Role and text of each message, in order."""


class PromptError(Exception):
    """The model's tokenizer can't carry token-exact prompts; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Alphabet:
    """Words of exactly one token each: `texts[i]` is token `ids[i]`."""

    texts: Sequence[str]
    ids: Tokens

    def draw(self, count: int, *key: str | int) -> Words:
        """`count` words that depend on all of `key` and on nothing else."""
        digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
        generator = np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))
        return generator.integers(0, len(self.texts), count)


def find_alphabet(tokenizer: Tokenizer) -> Alphabet:
    """The first words of the vocabulary that are safe. Raises PromptError when there are too few."""
    texts: list[str] = []
    ids: list[int] = []
    batch: dict[str, int] = {}
    for token in range(tokenizer.vocabulary_size):
        text = tokenizer.token_text(token)
        if _WORD.fullmatch(text):
            batch.setdefault(" " + text.strip(), token)
        if len(batch) == _BATCH:
            _keep_safe(tokenizer, batch, texts, ids)
            batch = {}
            if len(ids) >= MAX_WORDS:
                break
    _keep_safe(tokenizer, batch, texts, ids)
    if len(ids) < MIN_WORDS:
        raise PromptError(
            f"only {len(ids)} words of this tokenizer are one token beside every neighbour, {MIN_WORDS} are needed: "
            f"use the tokenizer of a model trained on English text"
        )
    alphabet = Alphabet(tuple(texts), np.array(ids, dtype=np.uint32))
    sample = alphabet.draw(512, "sample")
    text = "".join(alphabet.texts[i] for i in sample)
    if not np.array_equal(tokenizer.encode(OPENING + text)[-512:], alphabet.ids[sample]):
        raise PromptError("this tokenizer joins words into longer tokens: token-exact prompts can't be made for it")
    return alphabet


def _keep_safe(tokenizer: Tokenizer, batch: Mapping[str, int], texts: list[str], ids: list[int]) -> None:
    """Add the safe words of a batch: one encode if all are safe, else one a word."""
    doubled = np.repeat(np.array(list(batch.values()), dtype=np.uint32), 2)
    if np.array_equal(tokenizer.encode("".join(word + word for word in batch)), doubled):
        texts += batch.keys()
        ids += batch.values()
        return
    for word, token in batch.items():
        if tokenizer.encode(word + word).tolist() == [token, token]:
            texts.append(word)
            ids.append(token)


class PromptWriter:
    """Writes conversations in a model's safe alphabet and knows their token ids without encoding them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.alphabet = find_alphabet(tokenizer)
        self._tokenizer = tokenizer
        self._template_pieces: dict[tuple[str, ...], list[Tokens]] = {}
        self.system_role = self._takes_system_role()
        """Whether the chat template has system messages; if not, shared prefixes open the first user message."""

    def messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """The conversation as the OpenAI interface takes it."""
        texts = self.alphabet.texts
        return [{"role": role, "content": OPENING + "".join([texts[i] for i in words])} for role, words in conversation]

    def tokens(self, conversation: Conversation) -> Tokens:
        """Token ids of the rendered prompt, up to where the assistant answers."""
        pieces = self._pieces(tuple(role for role, _ in conversation))
        parts = [pieces[0]]
        for piece, (_, words) in zip(pieces[1:], conversation, strict=True):
            parts += [self.alphabet.ids[words], piece]
        return np.concatenate(parts)

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> Tokens:
        """Token ids of messages that somebody else wrote. Raises TokenizerError where the template refuses them."""
        return self._tokenizer.encode_chat(list(messages))

    def verify(self, conversation: Conversation) -> None:
        """Compare with the tokenizer's own encoding. Raises PromptError on a difference."""
        planned = self.tokens(conversation)
        encoded = self._tokenizer.encode_chat(self.messages(conversation))
        if not np.array_equal(planned, encoded):
            raise PromptError(
                f"a prompt planned with {len(planned)} tokens is {len(encoded)} for the tokenizer: its chat template "
                f"changes the text of messages, so token-exact prompts can't be made for it"
            )

    def _takes_system_role(self) -> bool:
        try:
            self._pieces(("system", "user"))
        except TokenizerError:
            self._pieces(("user",))
            return False
        return True

    def _pieces(self, roles: tuple[str, ...]) -> list[Tokens]:
        """What the template puts before, between and after the words of messages with these roles."""
        if roles not in self._template_pieces:
            self._template_pieces[roles] = self._measure(roles)
        return self._template_pieces[roles]

    def _measure(self, roles: tuple[str, ...]) -> list[Tokens]:
        """Render one marker word a message and cut the token ids at the markers."""
        if len(roles) > len(self.alphabet.ids):
            raise PromptError(f"a conversation of {len(roles)} messages is too long: at most {len(self.alphabet.ids)}")
        last = len(self.alphabet.ids) - 1
        # The last words of the alphabet are the rarest: the least likely to stand in the template itself.
        markers = [np.array([last - position]) for position in range(len(roles))]
        encoded = self._tokenizer.encode_chat(self.messages(list(zip(roles, markers, strict=True))))
        found = [np.flatnonzero(encoded == self.alphabet.ids[marker[0]]).tolist() for marker in markers]
        places = [place for places in found for place in places]
        if any(len(places) != 1 for places in found) or places != sorted(places):
            raise PromptError(
                f"the chat template does not keep the text of messages with roles {', '.join(roles)} once and in "
                f"order: token-exact prompts can't be made for it"
            )
        bounds = [-1, *places, len(encoded)]
        return [encoded[start + 1 : end] for start, end in pairwise(bounds)]
