"""Tokenizer: the model's own template and tokens, and the cache of encoded pieces that must never change them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from prefixwatch.kvcache.blocks import as_tokens, block_hashes
from prefixwatch.kvcache.prompts.segments import segment_cache
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer, TokenizerError

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "a system prompt with rules and 1234 numbers",
    "naïve 漢字",
] * 4
CHATML = (
    "{% for message in messages %}\n"
    "    {% if loop.first and message.role != 'system' %}{{ '<|start|>system\\nBe kind.<|end|>\\n' }}{% endif %}\n"
    "{{ '<|start|>' + message.role + '\\n' + message.content + '<|end|>' }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "the lazy dog"}]


def raw_tokenizer(
    pre_tokenizer: Any, normalizer: Any = None, *, specials: list[AddedToken] | None = None
) -> RawTokenizer:
    tokenizer = RawTokenizer(BPE(byte_fallback=False, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(
        specials or [AddedToken(text, special=True, normalized=False) for text in ("<|start|>", "<|end|>", "<|end|>x")]
    )
    return tokenizer


BYTE_LEVEL = raw_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False))
KINDS = {
    "byte level": BYTE_LEVEL,
    "byte level, space first": raw_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace, first": raw_tokenizer(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "metaspace, always": raw_tokenizer(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "llama 2": raw_tokenizer(
        pre_tokenizers.Metaspace(prepend_scheme="never"),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "stripping": raw_tokenizer(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        normalizers.NFC(),
        specials=[
            AddedToken("<|start|>", special=True, normalized=False, rstrip=True),
            AddedToken("<|end|>", special=True, normalized=False),
            AddedToken("<|mask|>", special=True, normalized=False, lstrip=True),
            AddedToken("<tool>", special=False, normalized=True),
            AddedToken("<|end|>>", special=False, normalized=False),
            AddedToken("<|end|><|start|>", special=False, normalized=False),
        ],
    ),
}


def write_model(folder: Path, *, tokenizer: RawTokenizer = BYTE_LEVEL, **config: Any) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Tokenizer]:
    return lambda **config: Tokenizer(write_model(tmp_path, **{"chat_template": CHATML, **config}))


def test_a_conversation_becomes_text_as_transformers_would_write_it(model: Callable[..., Tokenizer]) -> None:
    """Line ends after and indents before a block tag don't show; those after an expression do."""
    assert model().render_chat(USER) == (
        "<|start|>system\nBe kind.<|end|>\n<|start|>user\nthe lazy dog<|end|>\n<|start|>assistant\n"
    )
    assert model().render_chat([{"role": "system", "content": ""}], add_generation_prompt=False) == (
        "<|start|>system\n<|end|>\n"
    )


def test_chat_is_encoded_without_further_special_tokens_and_completions_with(tmp_path: Path) -> None:
    raw = RawTokenizer.from_str(BYTE_LEVEL.to_str())
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))]
    )
    raw.decoder = decoders.ByteLevel()
    raw.enable_truncation(4)
    raw.enable_padding(length=64)
    tokenizer = Tokenizer(write_model(tmp_path, tokenizer=raw, chat_template=CHATML))
    chat = tokenizer.encode_chat(USER)
    assert tokenizer.decode(chat.tolist()) == tokenizer.render_chat(USER)
    assert chat[0] == raw.token_to_id("<|start|>")
    plain = tokenizer.encode("the quick brown fox", add_special_tokens=True)
    assert tokenizer.token_text(int(plain[0])) == "<s>"
    assert tokenizer.decode(plain.tolist()) == "<s>the quick brown fox"


@pytest.mark.parametrize(
    ("template", "arguments", "text"),
    [
        ("{{ tools | tojson }}", {"tools": [{"n": "é"}]}, '[{"n": "é"}]'),
        ("{{ tools | tojson(indent=1) }}", {"tools": [1]}, "[\n 1\n]"),
        ("{{ x | tojson(separators=(',', ':'), sort_keys=true) }}", {"x": {"b": 1, "a": 2}}, '{"a":2,"b":1}'),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", {}, "1"),
        ("{% for m in [1, 2] %}{% if m == 1 %}{% continue %}{% endif %}{{ m }}{% endfor %}", {}, "2"),
        ("{{ strftime_now('%%') }}", {}, "%"),
        ("{% generation %}kept{% endgeneration %}", {}, "kept"),
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}", {}, "<s>|<|end|>|False"),
        ("{{ enable_thinking }}", {"enable_thinking": False}, "False"),
        ("{{ messages[0]['content'] | trim }}{{ tools is none }}{{ documents is none }}", {}, "the lazy dogTrueTrue"),
    ],
)
def test_templates_have_what_transformers_documents(
    model: Callable[..., Tokenizer], template: str, arguments: dict[str, Any], text: str
) -> None:
    tokenizer = model(chat_template=template, bos_token="<s>", eos_token={"content": "<|end|>", "lstrip": False})
    assert tokenizer.render_chat(USER, **arguments) == text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}, "b"], "\na\nb"),
        ([{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "no"}], "a\nno"),
        ([], ""),
    ],
)
def test_content_parts_become_text(model: Callable[..., Tokenizer], content: Any, text: str) -> None:
    assert model(chat_template="{{ messages[0].content }}").render_chat([{"role": "user", "content": content}]) == text


def test_a_template_that_walks_through_parts_gets_parts(model: Callable[..., Tokenizer]) -> None:
    walking = model(chat_template="{% for p in messages[0]['content'] %}[{{ p.text }}]{% endfor %}")
    assert walking.render_chat(USER) == "[the lazy dog]"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert walking.render_chat([{"role": "user", "content": parts}]) == "[a][b]"


def test_tool_call_arguments_reach_the_template_as_an_object(model: Callable[..., Tokenizer]) -> None:
    tokenizer = model(chat_template="{{ messages[0].tool_calls[0].function.arguments.city }}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
    assert tokenizer.render_chat([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "Oslo"
    call["function"] = {"name": "f", "arguments": "{"}
    with pytest.raises(TokenizerError, match="not JSON"):
        tokenizer.render_chat([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (
            {"parameters": {"b": 1, "a": 2}, "description": "d", "name": "f"},
            {"name": "f", "description": "d", "parameters": {"b": 1, "a": 2}},
        ),
        ({"name": "f"}, {"name": "f", "description": None, "parameters": None}),
        (
            {"name": "f", "strict": True, "own": 1},
            {"name": "f", "description": None, "parameters": None, "strict": True},
        ),
        ({"name": "f", "strict": None}, {"name": "f", "description": None, "parameters": None}),
    ],
)
def test_tools_are_rendered_as_vllm_hands_them_on(
    model: Callable[..., Tokenizer], function: dict[str, Any], shown: dict[str, Any]
) -> None:
    """Its order of keys, not the client's; null for what is missing; keys that it doesn't know are dropped."""
    tool = {"own": 1, "function": function, "type": "function"}
    text = model(chat_template="{{ tools | tojson }}").render_chat(USER, tools=[tool])
    assert text == json.dumps([{"type": "function", "function": shown}])


def test_named_templates_and_template_files(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer(write_model(tmp_path, chat_template=named))
    assert (tokenizer.render_chat(USER), tokenizer.render_chat(USER, tools=[{}])) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer(tmp_path).render_chat(USER) == "file"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", USER, "refuses this conversation: roles must alternate"),
        ("{{ messages[0].content + 1 }}", USER, "refuses this conversation"),
        ("{{ ''.__class__.__mro__ }}", USER, "refuses this conversation"),
        ("x", ["hi"], "message 0 must be an object with a role, not str"),
        ("x", [{"role": "user", "content": 5}], "content of message 0"),
        ("x", [{"role": "user", "content": [5]}], "content part of message 0"),
        (None, USER, "no chat_template"),
    ],
)
def test_a_refused_conversation_says_why(
    model: Callable[..., Tokenizer], template: str | None, messages: Any, reason: str
) -> None:
    with pytest.raises(TokenizerError, match=reason):
        model(chat_template=template).render_chat(messages)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "tokenizer_config.json is not valid JSON"),
        ("[]", "must hold a JSON object, not list"),
        ('{"chat_template": "{% if %}"}', "the chat template is not valid"),
        ('{"chat_template": [{"name": "default"}]}', "must be a text or a list"),
        ('{"chat_template": 7}', "must be a text or a list"),
    ],
)
def test_a_malformed_config_is_named(tmp_path: Path, config: str, reason: str) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(TokenizerError, match=reason):
        Tokenizer(tmp_path)


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json in .*prefixwatch engines model"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="not a readable tokenizer"):
        Tokenizer(tmp_path)


@pytest.fixture(scope="module")
def tokenizers_by_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        name: Tokenizer(write_model(tmp_path_factory.mktemp("model"), tokenizer=raw), segment_cache_bytes=20_000)
        for name, raw in KINDS.items()
    }


PIECE = st.sampled_from(
    [
        "<|start|>",
        "<|end|>",
        "<|end|>x",
        "<|end|>>",
        "<|mask|>",
        "<tool>",
        "<s>",
        "<|en",
        "d|>",
        " ",
        "  ",
        "\n",
        "the",
        "é",
        "1",
    ]
) | st.text(max_size=6)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(st.lists(PIECE, max_size=24).map("".join))
def test_cut_and_whole_texts_encode_alike(tokenizers_by_kind: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers_by_kind[kind]
    if tokenizer.segments is not None:
        assert tokenizer.segments.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_the_usual_tokenizers_can_be_cut(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    assert {kind for kind, tokenizer in tokenizers_by_kind.items() if tokenizer.segments is None} == set()


def test_cutting_is_tried_before_it_is_trusted() -> None:
    assert segment_cache(BYTE_LEVEL, lambda text: as_tokens(BYTE_LEVEL.encode(text).ids), 10_000) is not None
    assert segment_cache(BYTE_LEVEL, lambda text: as_tokens([len(text)]), 10_000) is None


def test_without_special_tokens_there_is_nothing_to_cut_at() -> None:
    raw = RawTokenizer(BPE())
    raw.add_special_tokens([AddedToken("<normalized>", special=True, normalized=True)])
    assert segment_cache(raw, lambda text: as_tokens(raw.encode(text).ids), 10_000) is None


def test_a_shared_system_prompt_is_encoded_once(model: Callable[..., Tokenizer]) -> None:
    tokenizer, system = model(), {"role": "system", "content": "rules and numbers " * 200}
    for question in ("the fox", "the dog", "the fox"):
        messages = [system, {"role": "user", "content": question}]
        expected = tokenizer.encode(tokenizer.render_chat(messages))
        assert tokenizer.encode_chat(messages).tolist() == expected.tolist()
    segments = tokenizer.segments
    assert segments is not None
    assert (segments.hits, segments.misses) == (10, 5)


def test_what_one_namespace_sent_is_never_found_encoded_by_another(model: Callable[..., Tokenizer]) -> None:
    """A piece that is found takes a tenth of the time, and who can time it learns that another tenant sent it."""
    tokenizer = model()
    assert tokenizer.segments is not None
    counted = []
    for namespace in ("salt a", "salt b", "", "salt a"):
        before = tokenizer.segments.hits
        tokens = tokenizer.encode_chat(USER, namespace, **{"namespace": "a client's own argument of the template"})
        assert tokens.tolist() == tokenizer.encode(tokenizer.render_chat(USER)).tolist()
        counted.append(tokenizer.segments.hits - before)
    assert counted[0] == counted[1] == counted[2] < counted[3]


def test_the_cache_stays_within_its_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_model(tmp_path), segment_cache_bytes=5000)
    assert tokenizer.segments is not None
    for k in range(100):
        tokenizer.segments.encode(f"<|start|>user {k}<|end|>")
    assert 0 < tokenizer.segments.used_bytes <= 5000
    tokenizer.segments.encode("long " * 2000)
    assert tokenizer.segments.used_bytes <= 5000


def test_the_cached_arrays_cannot_be_spoilt_by_a_caller(model: Callable[..., Tokenizer]) -> None:
    tokenizer = model()
    first = tokenizer.encode_chat(USER)
    expected = first.copy()
    first[:] = 0
    assert np.array_equal(tokenizer.encode_chat(USER), expected)


def test_two_turns_share_the_blocks_of_their_common_opening(model: Callable[..., Tokenizer]) -> None:
    tokenizer = model()
    opening = [{"role": "user", "content": "the quick brown fox " * 20}]
    longer = [*opening, {"role": "assistant", "content": "jumps"}, {"role": "user", "content": "over"}]
    short = tokenizer.encode(tokenizer.render_chat(opening, add_generation_prompt=False))
    blocks, more = block_hashes(short), block_hashes(tokenizer.encode_chat(longer))
    assert len(blocks) >= 4
    assert more[: len(blocks)].tolist() == blocks.tolist()
