"""Prompt text → token ids, as the engine that serves the model would count them.

Reads a model folder (`tokenizer.json`, `tokenizer_config.json`, optionally `chat_template.jinja`). A rendered
conversation is encoded without added special tokens, as vLLM and SGLang do for chat: its template has put them
in. Plain completions do get the special tokens that the tokenizer's own post-processor adds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as _Tokenizer

from prefixwatch.documents.errors import InputError
from prefixwatch.kvcache.blocks import Tokens, as_tokens
from prefixwatch.kvcache.prompts.chat_template import ChatTemplate, ChatTemplateError, Messages
from prefixwatch.kvcache.prompts.media import MEDIA_TOKEN, TOKENS_PER_PART, cut, without_marks
from prefixwatch.kvcache.prompts.segments import SegmentCache, segment_cache

__all__ = ["Messages", "Tokenizer", "TokenizerError"]

SEGMENT_CACHE_BYTES = 32 * 2**20
_GIL_FREE_CHARACTERS = 4096

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(InputError):
    """The model folder can't be used, or a conversation can't be rendered with its template."""


class Tokenizer:
    """A model's own tokenizer and chat template.

    Pieces of chat texts are kept encoded, up to `segment_cache_bytes` (0: none), where the tokenizer allows
    that exactly; `segments` is None where it doesn't.
    """

    def __init__(self, model_dir: Path | str, *, segment_cache_bytes: int = SEGMENT_CACHE_BYTES) -> None:
        folder = Path(model_dir)
        self._tokenizer = _load(folder)
        config = _config(folder / "tokenizer_config.json")
        special = {key: _token_text(config[key]) for key in _SPECIAL_TOKENS if config.get(key)}
        self._templates = {
            name: _compiled(source, special, folder) for name, source in _template_sources(folder, config).items()
        }
        self.segments: SegmentCache | None = segment_cache(self._tokenizer, self.encode, segment_cache_bytes)

    @property
    def vocabulary_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Tokens:
        """Token ids of a text."""
        if len(text) > _GIL_FREE_CHARACTERS:  # only the batch call lets other threads run meanwhile
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        else:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return as_tokens(encoding.ids)

    def encode_chat(
        self, messages: Messages, namespace: str = "", /, *, tools: Any = None, **template_arguments: Any
    ) -> Tokens:
        """Token ids of a conversation up to the point where the assistant answers.

        Only pieces that the same namespace sent are found encoded; see `kvcache.prompts.segments`.

        Images and other content without text have ids of their own at their place; see `kvcache.prompts.media`.
        """
        segments = self.segments
        encode = self.encode if segments is None else lambda text: segments.encode(text, namespace)
        pieces = cut(self._render(messages, tools, template_arguments))
        if len(pieces) == 1:
            return encode(str(pieces[0]))
        return np.concatenate([encode(piece) if isinstance(piece, str) else piece for piece in pieces])

    def render_chat(self, messages: Messages, *, tools: Any = None, **template_arguments: Any) -> str:
        """The text a conversation becomes, without its images. Raises TokenizerError where the template refuses it."""
        return without_marks(self._render(messages, tools, template_arguments))

    def _render(self, messages: Messages, tools: Any, template_arguments: Mapping[str, Any]) -> str:
        template = (self._templates.get("tool_use") if tools else None) or self._templates.get("default")
        if template is None:
            raise TokenizerError("this model's tokenizer_config.json has no chat_template: send plain completions")
        try:
            return template.render(messages, tools=tools, **template_arguments)
        except ChatTemplateError as error:
            raise TokenizerError(str(error)) from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; `[media]` for content that isn't text."""
        parts = [
            "[media]" * (len(list(run)) // TOKENS_PER_PART) if media else self._tokenizer.decode(list(run), False)
            for media, run in groupby(ids, lambda token: token >= MEDIA_TOKEN)
        ]
        return "".join(parts)

    def token_text(self, token: int) -> str:
        """What one token decodes to on its own."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))


def _load(folder: Path) -> _Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(
            f"no tokenizer.json in {folder}: point the tokenizer at the model's own folder "
            f"(the one the engine serves), or make the built-in tiny model with `prefixwatch engines model DIR`"
        )
    try:
        tokenizer = _Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"{file} is not a readable tokenizer: {error}") from error
    tokenizer.no_truncation()  # engines refuse or cut long prompts themselves; a file's setting would hide tokens
    tokenizer.no_padding()
    return tokenizer


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file} is not valid JSON ({error}): take the file from the model again") from error
    if not isinstance(config, dict):
        raise TokenizerError(f"{file} must hold a JSON object, not {type(config).__name__}")
    return config


def _template_sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name. A file beside the config wins; a config may hold one text, or a list of named ones."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    template = config.get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in template}
    except (TypeError, KeyError) as error:
        raise TokenizerError(
            f"chat_template in {folder / 'tokenizer_config.json'} must be a text or a list of "
            f"{{name, template}} objects"
        ) from error


def _compiled(source: str, special: dict[str, str], folder: Path) -> ChatTemplate:
    try:
        return ChatTemplate(source, special)
    except ChatTemplateError as error:
        raise TokenizerError(f"{folder}: {error}") from error


def _token_text(value: Any) -> str:
    """A special token as tokenizer_config.json writes it: a text, or an object with `content`."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)
