"""Prompt text → token ids, as the engine that serves the model would count them.

Reads a model folder (`tokenizer.json`, `tokenizer_config.json`, optionally `chat_template.jinja`): the chat
template is rendered with the settings Hugging Face documents for templates (trimmed blocks, sandboxed), the
text is then encoded without added special tokens, as vLLM and SGLang do for chat. Plain completions do get
the special tokens that the tokenizer's own post-processor adds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as _Tokenizer

from kvcache.blocks import Tokens, as_tokens

Messages = Sequence[Mapping[str, Any]]

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizerError(Exception):
    """The model folder can't be used, or a conversation can't be rendered with its template."""


class Tokenizer:
    """A model's own tokenizer and chat template."""

    def __init__(self, model_dir: Path | str) -> None:
        folder = Path(model_dir)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                f"no tokenizer.json in {folder}: point the tokenizer at the model's own folder "
                f"(the one the engine serves), or make the built-in tiny model with `prefixwatch engines model DIR`"
            )
        try:
            self._tokenizer = _Tokenizer.from_file(str(file))
        except Exception as error:
            raise TokenizerError(f"{file} is not a readable tokenizer: {error}") from error
        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        self._special = {
            key: _token_text(config.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        template = config.get("chat_template")
        template_file = folder / "chat_template.jinja"
        if template_file.is_file():
            template = template_file.read_text()
        self._template = _environment().from_string(template) if isinstance(template, str) else None

    @property
    def vocabulary_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Tokens:
        """Token ids of a text."""
        return as_tokens(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_chat(self, messages: Messages, *, tools: Any = None, **template_arguments: Any) -> Tokens:
        """Token ids of a conversation up to the point where the assistant answers."""
        return self.encode(self.render_chat(messages, tools=tools, **template_arguments))

    def render_chat(self, messages: Messages, *, tools: Any = None, **template_arguments: Any) -> str:
        """The text a conversation becomes. Raises TokenizerError where the template refuses it."""
        if self._template is None:
            raise TokenizerError("this model's tokenizer_config.json has no chat_template: send plain completions")
        flat = [{**message, "content": _text_of(message.get("content"))} for message in messages]
        arguments = {"add_generation_prompt": True, **self._special, **template_arguments}
        try:
            return self._template.render(messages=flat, tools=tools, **arguments)
        except TemplateError as error:
            raise TokenizerError(f"the chat template refuses this conversation: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_text(self, token: int) -> str:
        """What one token decodes to on its own."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))


def _token_text(value: Any) -> str:
    """A special token as tokenizer_config.json writes it: a text, or an object with `content`."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _text_of(content: Any) -> Any:
    """OpenAI content: a text, or parts of which only the text ones have tokens before the engine sees them."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    return content if content is not None else ""


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment
