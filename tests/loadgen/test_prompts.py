from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.loadgen.plan.prompts import OPENING, PromptError, PromptWriter, find_alphabet

TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n\n{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    "<|im_start|>assistant\n\n"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
TOOLS_BEHIND_THE_SYSTEM_PROMPT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% if tools and loop.first %}\n"
    "{% for tool in tools %}{{ tool.function.name }}: {{ tool.function.description }}\n{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
TOOLS_IGNORED = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
LOSSY = "{% for m in messages %}{{ m['content'][:9] }}{% endfor %}"


def with_template(model_dir: Path, folder: Path, template: str) -> Tokenizer:
    (folder / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return Tokenizer(folder)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=60))
@settings(max_examples=50, deadline=None)
def test_any_row_of_safe_words_is_one_token_each(tokenizer: Tokenizer, writer: PromptWriter, row: list[int]) -> None:
    alphabet = writer.alphabet
    words = [i % len(alphabet.ids) for i in row]
    text = "".join(alphabet.texts[i] for i in words)
    opening = len(tokenizer.encode(OPENING))
    assert tokenizer.encode(OPENING + text)[opening:].tolist() == alphabet.ids[words].tolist()


@pytest.mark.parametrize("roles", [("user",), ("system", "user"), ("system", "user", "assistant", "user")])
def test_planned_ids_equal_the_encoded_conversation(
    tokenizer: Tokenizer, writer: PromptWriter, roles: tuple[str, ...]
) -> None:
    conversation = [(role, writer.alphabet.draw(50 + i, role, i)) for i, role in enumerate(roles)]
    encoded = tokenizer.encode_chat(writer.messages(conversation))
    assert np.array_equal(writer.tokens(conversation), encoded)


@pytest.mark.parametrize("template", [None, TOOLS_BEHIND_THE_SYSTEM_PROMPT])
@pytest.mark.parametrize("names", [("search", "read_file"), ("read_file", "search")])
def test_planned_ids_with_tools_equal_the_encoded_request(
    tokenizer: Tokenizer, model_dir: Path, tmp_path: Path, names: tuple[str, ...], template: str | None
) -> None:
    """Wherever the template puts them, in whatever order they come."""
    own = tokenizer if template is None else with_template(model_dir, tmp_path, template)
    writer = PromptWriter(own)
    conversation = [(role, writer.alphabet.draw(20, role)) for role in ("system", "user", "assistant", "user")]
    tools = [(name, writer.alphabet.draw(30, name)) for name in names]
    encoded = own.encode_chat(writer.messages(conversation), tools=writer.tools(tools))
    assert np.array_equal(writer.tokens(conversation, tools), encoded)
    first = writer.alphabet.ids[(conversation if template else tools)[0][1][0]]
    assert writer.template_tokens(conversation, tools) == encoded.tolist().index(first)


def test_tools_that_the_template_leaves_out_are_refused(model_dir: Path, tmp_path: Path) -> None:
    writer = PromptWriter(with_template(model_dir, tmp_path, TOOLS_IGNORED))
    words = writer.alphabet.draw(5, "w")
    with pytest.raises(PromptError, match="does not render each tool"):
        writer.tokens([("user", words)], [("search", words)])


def test_words_depend_on_every_part_of_the_key(writer: PromptWriter) -> None:
    draw = writer.alphabet.draw
    assert np.array_equal(draw(32, "n1", 0, "g", 1), draw(32, "n1", 0, "g", 1))
    for other in (("n2", 0, "g", 1), ("n1", 1, "g", 1), ("n1", 0, "g", 2)):
        assert not np.array_equal(draw(32, *other)[:8], draw(32, "n1", 0, "g", 1)[:8])


def test_a_longer_text_of_the_same_key_starts_with_the_shorter(writer: PromptWriter) -> None:
    assert np.array_equal(writer.alphabet.draw(100, "k")[:40], writer.alphabet.draw(40, "k"))


def test_a_template_that_trims_its_messages_stays_exact(model_dir: Path, tmp_path: Path) -> None:
    writer = PromptWriter(with_template(model_dir, tmp_path, TRIMMING))
    writer.verify([("system", writer.alphabet.draw(20, "a")), ("user", writer.alphabet.draw(20, "b"))])


def test_a_template_without_system_role_is_noticed(model_dir: Path, tmp_path: Path) -> None:
    assert not PromptWriter(with_template(model_dir, tmp_path, NO_SYSTEM)).system_role


def test_a_template_that_loses_text_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="does not keep the text of messages"):
        PromptWriter(with_template(model_dir, tmp_path, LOSSY))


def test_a_tokenizer_without_words_is_refused(tmp_path: Path) -> None:
    vocabulary = {chr(code): code - 32 for code in range(32, 127)}
    tokenizer = {"version": "1.0", "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(PromptError, match="only 0 words of this tokenizer are one token"):
        find_alphabet(Tokenizer(tmp_path))
