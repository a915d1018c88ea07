"""The tokenizer and chat template of an engine, asked over HTTP before a run, for anyone without the model's folder.

vLLM's `/tokenize` takes texts and chats, SGLang's of newer versions too. What makes prompts token-exact takes few
questions: which plain words are one token each (some hundred words a question), and what the template puts around
texts (one question a shape of conversation). Prompts are put together from the answers; none is sent to be counted.
"""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from prefixwatch.kvcache.blocks import Tokens, as_tokens
from prefixwatch.kvcache.prompts.tokenizer import TokenizerError
from prefixwatch.kvcache.prompts.words import words
from prefixwatch.loadgen.plan.prompts import OPENING, Alphabet, PromptError, checked_alphabet

TIMEOUT_SECONDS = 30.0
MAX_QUESTIONS = 5000
"""Before a run is given up that would ask more: recorded texts, or tools in thousands of orders."""
_WORDS_AT_ONCE = 256
_REMEDY = "give the folder with the model's tokenizer.json and tokenizer_config.json as --model-dir"


class ServedTokenizer:
    """An engine's own, at its address; `headers` may hold its API key. Answers are kept."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        max_questions: int = MAX_QUESTIONS,
    ) -> None:
        base = url if "://" in url else f"http://{url}"
        self.address = f"{base.rstrip('/').removesuffix('/v1')}/tokenize"
        self.questions = 0
        """Asked so far."""
        self._model = model
        self._headers = {"content-type": "application/json", **(headers or {})}
        self._tls = tls
        self._max_questions = max_questions
        self._kept: dict[bytes, Tokens] = {}

    def encode(self, text: str) -> Tokens:
        """Token ids of a text, without special tokens around it. Raises PromptError, TokenizerError."""
        return self._ask({"prompt": text, "add_special_tokens": False})

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None) -> Tokens:
        """Token ids of a conversation up to where the assistant answers. Raises PromptError, TokenizerError."""
        return self._ask({"messages": list(messages), **({"tools": tools} if tools else {})})

    def alphabet(self) -> Alphabet:
        """Plain words that are one token each beside every neighbour. Raises PromptError when there are too few."""
        opening = len(self.encode(OPENING))
        known = words()
        found: dict[str, int] = {}
        for start in range(0, len(known), _WORDS_AT_ONCE):
            found |= self._single_tokens(known[start : start + _WORDS_AT_ONCE], opening)
        return checked_alphabet(list(found), list(found.values()), self.encode)

    def _single_tokens(self, candidates: Sequence[str], opening: int) -> dict[str, int]:
        """Those of the words that are one token each, as " word", with their ids."""
        doubled = self.encode(OPENING + "".join(f" {word} {word}" for word in candidates))[opening:].tolist()
        found = _doubled_tokens(candidates, doubled)
        if found is not None or len(candidates) == 1:
            return found or {}
        half = len(candidates) // 2
        return self._single_tokens(candidates[:half], opening) | self._single_tokens(candidates[half:], opening)

    def _ask(self, question: Mapping[str, Any]) -> Tokens:
        body = json.dumps({"model": self._model, **question}).encode()
        if body not in self._kept:
            if self.questions >= self._max_questions:
                raise PromptError(
                    f"these prompts take more than {self._max_questions:,} questions to {self.address}: {_REMEDY}"
                )
            self.questions += 1
            self._kept[body] = _tokens(self._post(body), self.address)
        return self._kept[body]

    def _post(self, body: bytes) -> Any:
        request = urllib.request.Request(self.address, data=body, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS, context=self._tls) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise _refusal(self.address, error.code, error.read().decode(errors="replace")) from error
        except (OSError, ValueError) as error:
            raise PromptError(
                f"{self.address} can't be asked ({error}): start the engine first, or {_REMEDY}"
            ) from error


def _refusal(address: str, status: int, answer: str) -> Exception:
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return PromptError(f"{address} answers {status}: name the variable that holds its API key as --api-key-env")
    if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
        return TokenizerError(
            f"{address} refuses a question: {answer[:200]}. Where it takes texts but no chats (older SGLang), {_REMEDY}"
        )
    return PromptError(
        f"{address} answers {status}: prompts of exact lengths need the model's tokenizer: {_REMEDY}, or name an "
        f"engine that has a /tokenize as --tokenize-url. Without either, --approximate-prompts judges latencies alone"
    )


def _tokens(answer: Any, address: str) -> Tokens:
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise PromptError(f"{address} answers without a list of tokens: {_REMEDY}")
    return as_tokens(tokens)


def _doubled_tokens(candidates: Sequence[str], tokens: list[int]) -> dict[str, int] | None:
    """The one-token words of a text in which each word stands twice; None where it can't be read so.

    Each word's tokens come twice in a row; the fewest that do are taken for it.
    """
    found: dict[str, int] = {}
    place = 0
    for word in candidates:
        longest = (len(tokens) - place) // 2
        for size in range(1, min(longest, len(word) + 1) + 1):
            if tokens[place : place + size] == tokens[place + size : place + 2 * size]:
                break
        else:
            return None
        if size == 1:
            found[f" {word}"] = tokens[place]
        place += 2 * size
    return found if place == len(tokens) else None
