"""Prompts whose length in tokens is exact before they are sent.

Texts are made of a *safe alphabet*: words " word" that are one token each and stay one token whatever stands
beside them, so any row of n of them is n tokens. What the chat template adds is measured once a shape of
conversation (its sequence of roles, and the names of the tools it offers) and the token ids of a whole prompt are put
together from both. Random ids decoded to text, as other generators send, come back as another number of tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prefixwatch.documents.errors import InputError
from prefixwatch.kvcache.blocks import Tokens
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer, TokenizerError

MAX_WORDS = 4096
MIN_WORDS = 64
OPENING = "Text:"
"""Starts every message, so that a template which trims its messages can't change the first word's token."""

_WORD = re.compile(r"\s?[a-z]{3,10}")
_BATCH = 64
_KEPT_SHAPES = 4096

Words = npt.NDArray[np.int64]
"""A text as positions in the alphabet."""
Conversation = Sequence[tuple[str, Words]]
"""Role and text of each message, in order."""
Tools = Sequence[tuple[str, Words]]
"""Name and description of each function that a request offers, in order."""


class PromptError(InputError):
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
    return checked_alphabet(texts, ids, tokenizer.encode)


def checked_alphabet(texts: Sequence[str], ids: Sequence[int], encode: Callable[[str], Tokens]) -> Alphabet:
    """The alphabet of these words, a row of them encoded once more. Raises PromptError."""
    if len(ids) < MIN_WORDS:
        raise PromptError(
            f"only {len(ids)} words of this tokenizer are one token beside every neighbour, {MIN_WORDS} are needed: "
            f"use the tokenizer of a model trained on English text"
        )
    alphabet = Alphabet(tuple(texts), np.array(ids, dtype=np.uint32))
    sample = alphabet.draw(512, "sample")
    text = "".join(alphabet.texts[i] for i in sample)
    if not np.array_equal(encode(OPENING + text)[-512:], alphabet.ids[sample]):
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


class ChatTokenizer(Protocol):
    """What a writer needs that has no vocabulary to look through, such as an engine over HTTP."""

    def alphabet(self) -> Alphabet:
        """Words that are one token each. Raises PromptError."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None) -> Tokens:
        """Token ids of a conversation. Raises TokenizerError where it is refused."""
        ...


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the template makes of conversations of one shape. Texts are numbered: the messages', then the tools'."""

    pieces: Sequence[Tokens]
    """What stands before, between and after the texts; one more than there are texts."""
    order: Sequence[int]
    """The number of the text behind each piece but the last."""


class PromptWriter:
    """Writes conversations in a model's safe alphabet and knows their token ids without encoding them."""

    def __init__(self, tokenizer: Tokenizer | ChatTokenizer) -> None:
        self.alphabet = find_alphabet(tokenizer) if isinstance(tokenizer, Tokenizer) else tokenizer.alphabet()
        self._tokenizer = tokenizer
        self._shape = lru_cache(_KEPT_SHAPES)(self._measure)
        self.system_role = self._takes_system_role()
        """Whether the chat template has system messages; if not, shared prefixes open the first user message."""

    def messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """The conversation as the OpenAI interface takes it."""
        return [{"role": role, "content": self._text(words)} for role, words in conversation]

    def tools(self, tools: Tools) -> list[dict[str, Any]]:
        """The functions as the OpenAI interface takes them; each takes no arguments."""
        return [_function(name, self._text(words)) for name, words in tools]

    def tokens(self, conversation: Conversation, tools: Tools = ()) -> Tokens:
        """Token ids of the rendered prompt, up to where the assistant answers."""
        shape = self._shape(*_shape_of(conversation, tools))
        texts = [words for _, words in (*conversation, *tools)]
        parts = [shape.pieces[0]]
        for piece, number in zip(shape.pieces[1:], shape.order, strict=True):
            parts += [self.alphabet.ids[texts[number]], piece]
        return np.concatenate(parts)

    def layout(self, conversation: Conversation, tools: Tools = ()) -> list[tuple[int | None, int]]:
        """The rendered prompt, in order: (number of a text, its tokens). Texts are numbered from 0, the
        messages' first, then the tools'; None stands for the template's own words."""
        shape = self._shape(*_shape_of(conversation, tools))
        texts = [words for _, words in (*conversation, *tools)]
        found: list[tuple[int | None, int]] = [(None, len(shape.pieces[0]))]
        for piece, number in zip(shape.pieces[1:], shape.order, strict=True):
            found += [(number, len(texts[number])), (None, len(piece))]
        return found

    def template_tokens(self, conversation: Conversation, tools: Tools = ()) -> int:
        """Tokens of the rendered prompt before the first of its words."""
        return len(self._shape(*_shape_of(conversation, tools)).pieces[0])

    def encode(self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None) -> Tokens:
        """Token ids of messages that somebody else wrote. Raises TokenizerError where the template refuses them."""
        return self._tokenizer.encode_chat(list(messages), tools=tools)

    def verify(self, conversation: Conversation, tools: Tools = ()) -> None:
        """Compare with the tokenizer's own encoding. Raises PromptError on a difference."""
        planned = self.tokens(conversation, tools)
        encoded = self.encode(self.messages(conversation), tools=self.tools(tools))
        if not np.array_equal(planned, encoded):
            raise PromptError(
                f"a prompt planned with {len(planned)} tokens is {len(encoded)} for the tokenizer: its chat template "
                f"changes the text of messages, so token-exact prompts can't be made for it"
            )

    def _text(self, words: Words) -> str:
        texts = self.alphabet.texts
        return OPENING + "".join([texts[i] for i in words])

    def _takes_system_role(self) -> bool:
        try:
            self._shape(("system", "user"), ())
        except TokenizerError:
            self._shape(("user",), ())
            return False
        return True

    def _measure(self, roles: tuple[str, ...], names: tuple[str, ...]) -> _Shape:
        """Render one marker word a text and cut the token ids at the markers."""
        count = len(roles) + len(names)
        if count > len(self.alphabet.ids):
            raise PromptError(f"a conversation of {count} texts is too long: at most {len(self.alphabet.ids)}")
        last = len(self.alphabet.ids) - 1
        # The last words of the alphabet are the rarest: the least likely to be part of the template itself.
        markers = [np.array([last - position]) for position in range(count)]
        conversation = list(zip(roles, markers, strict=False))
        tools = list(zip(names, markers[len(roles) :], strict=True))
        encoded = self.encode(self.messages(conversation), tools=self.tools(tools))
        found = [np.flatnonzero(encoded == self.alphabet.ids[marker[0]]).tolist() for marker in markers]
        said = [place for places in found[: len(roles)] for place in places]
        if any(len(places) != 1 for places in found[: len(roles)]) or said != sorted(said):
            raise PromptError(
                f"the chat template does not keep the text of messages with roles {', '.join(roles)} once and in "
                f"order: token-exact prompts can't be made for it"
            )
        if any(len(places) != 1 for places in found[len(roles) :]):
            raise PromptError(
                "the chat template does not render each tool of the request's field tools once: send them as text "
                "(tools.sent_as: text), or use a model whose template takes tools"
            )
        places = [place for (place,) in found]
        order = sorted(range(count), key=places.__getitem__)
        bounds = [-1, *sorted(places), len(encoded)]
        return _Shape([encoded[start + 1 : end] for start, end in pairwise(bounds)], order)


def _shape_of(conversation: Conversation, tools: Tools) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(role for role, _ in conversation), tuple(name for name, _ in tools)


def _function(name: str, description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
