"""Images and the like at their place in a prompt: what differs differs from there on, and predictions hold."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.kvcache.blocks import Tokens, block_hashes
from prefixwatch.kvcache.cache_class import reusable_part
from prefixwatch.kvcache.events.feed import WorkerFeed
from prefixwatch.kvcache.index.block_index import BlockIndex
from prefixwatch.kvcache.prediction import prediction_cause
from prefixwatch.kvcache.prompts.media import MEDIA_TOKEN, has_media, readable_tokens
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from tests.kvcache.test_tokenizer import write_model

BLOCK = 16
PARTS = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}{% for p in m['content'] %}{{ p.text }}{% endfor %}"
    "{{ '<|end|>\n' }}{% endfor %}{{ '<|start|>assistant\n' }}"
)
TEXTS = "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model(tmp_path_factory.mktemp("model"), chat_template=PARTS))


def image(name: object, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"https://img.example/{name}.png", **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def shared(a: Tokens, b: Tokens) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def test_prompts_with_different_pictures_differ_from_the_picture_on(tokenizer: Tokenizer) -> None:
    """vllm#33304, llm-d-kv-cache#411 (N35, N36)."""
    question = "describe what you see and list every defect of the part " * 20
    one, other = (tokenizer.encode_chat(asked(text("look: "), image(k), text(question))) for k in (1, 2))
    place = readable_tokens(one)
    assert (
        place
        == readable_tokens(other)
        == len(tokenizer.encode_chat(asked(text("look: ")))) - len(tokenizer.encode("<|end|>\n<|start|>assistant\n"))
    )
    assert shared(one, other) in (place, place + 1)
    again = tokenizer.encode_chat(asked(text("look: "), image(1), text(question)))
    assert again.tolist() == one.tolist()
    assert block_hashes(one)[1] != block_hashes(other)[1]


@pytest.mark.parametrize(
    "part",
    [
        image(2),
        image(1, detail="low"),
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "https://img.example/1.png"}},
        {"type": "file", "file": {"file_id": "f1"}},
        {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
        {"type": "a_later_kind", "data": 1},
    ],
)
def test_any_other_content_is_another_prompt(tokenizer: Tokenizer, part: dict[str, Any]) -> None:
    assert has_media(asked(part))
    ids = tokenizer.encode_chat(asked(part, text("what is it?")))
    assert ids.tolist() != tokenizer.encode_chat(asked(image(1), text("what is it?"))).tolist()
    assert ids.tolist() == tokenizer.encode_chat(asked(dict(reversed(part.items())), text("what is it?"))).tolist()
    assert (ids >= MEDIA_TOKEN).sum() == 2


def test_order_and_number_of_pictures_count(tokenizer: Tokenizer) -> None:
    prompts = [
        tuple(tokenizer.encode_chat(asked(*parts)).tolist())
        for parts in ([image(1), image(2)], [image(2), image(1)], [image(1)], [image(1), image(1)], [text("x")])
    ]
    assert len(set(prompts)) == 5


def test_a_template_of_texts_has_a_messages_pictures_first(tmp_path: Path) -> None:
    """As vLLM renders it, so nothing behind the message's beginning may count as shared."""
    tokenizer = Tokenizer(write_model(tmp_path, chat_template=TEXTS))
    one, other = (tokenizer.encode_chat(asked(text("the same words"), image(k))) for k in (1, 2))
    assert readable_tokens(one) == len(tokenizer.encode("<|start|>user\n"))
    assert shared(one, other) <= readable_tokens(one) + 1


def test_texts_are_untouched_and_decoded(tokenizer: Tokenizer) -> None:
    plain = [{"role": "user", "content": "the lazy dog"}]
    assert not has_media(plain)
    assert tokenizer.encode_chat(plain).tolist() == tokenizer.encode(tokenizer.render_chat(plain)).tolist()
    ids = tokenizer.encode_chat(asked(text("a"), image(1), image(2), text("b")))
    assert "a[media][media]b" in tokenizer.decode(ids.tolist())


@given(st.text(max_size=60))
def test_no_text_passes_for_a_picture(tokenizer: Tokenizer, words: str) -> None:
    """A client that writes what a mark looks like gets its text tokenised."""
    mark = "media0123456789abcdefx0123456789abcdefx"
    ids = tokenizer.encode_chat(asked(text(words + mark + words)))
    assert readable_tokens(ids) == len(ids)


class VllmLike:
    """An engine that knows how many tokens a picture is, and hashes its identifier into the blocks that hold them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cached: set[bytes] = set()
        self._pad, self._open = 3, 4
        self.events: list[dict[str, Any]] = []

    def serve(self, messages: list[dict[str, Any]]) -> tuple[int, int]:
        """Cached tokens and prompt tokens."""
        tokens, items = self._expanded(self._tokenizer.encode_chat(messages))
        chain, hashes, keys = b"", [], []
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            extra = [(name, at - start) for name, at, end in items if at < start + BLOCK and end > start]
            keys.append([list(pair) for pair in extra] or None)
            chain = hashlib.sha256(chain + repr((tokens[start : start + BLOCK], extra)).encode()).digest()
            hashes.append(chain)
        depth = next((k for k, block in enumerate(hashes) if block not in self._cached), len(hashes))
        if depth < len(hashes):
            self.events.append(
                {
                    "type": "BlockStored", "block_hashes": hashes[depth:], "block_size": BLOCK,
                    "parent_block_hash": hashes[depth - 1] if depth else None, "medium": "GPU",
                    "token_ids": tokens[depth * BLOCK : len(hashes) * BLOCK], "extra_keys": keys[depth:],
                }
            )  # fmt: skip
        self._cached.update(hashes)
        return min(depth, (len(tokens) - 1) // BLOCK) * BLOCK, len(tokens)

    def _expanded(self, ids: Tokens) -> tuple[list[int], list[tuple[str, int, int]]]:
        tokens: list[int] = []
        items = []
        values = iter(ids.tolist())
        for token in values:
            if token < MEDIA_TOKEN:
                tokens.append(token)
                continue
            identifier = f"{token}-{next(values)}"
            size = 70 + int(hashlib.sha256(identifier.encode()).hexdigest(), 16) % 300
            tokens.append(self._open)
            items.append((identifier, len(tokens), len(tokens) + size))
            tokens += [self._pad] * size
        return tokens, items


def mixed_requests(rng: random.Random, number: int) -> list[list[dict[str, Any]]]:
    """System prompts that many share, pictures that come again, and conversations that go on."""
    words = "the quick brown fox jumps over the lazy dog and looks at every part of it".split()  # noqa: SIM905
    systems = [" ".join(rng.choices(words, k=60 + 40 * k)) for k in range(3)]
    questions = [" ".join(rng.choices(words, k=rng.randint(3, 80))) for _ in range(8)]
    conversations: list[list[dict[str, Any]]] = []
    for _ in range(number):
        if conversations and rng.random() < 0.5:
            base = [*rng.choice(conversations), {"role": "assistant", "content": [text(rng.choice(questions))]}]
        else:
            base = [{"role": "system", "content": [text(rng.choice(systems))]}]
        parts = [text(rng.choice(questions)), *(image(rng.randrange(10)) for _ in range(rng.choice([0, 0, 1, 2])))]
        rng.shuffle(parts)
        conversations.append([*base, {"role": "user", "content": parts}])
    return conversations


def by_history(index: BlockIndex) -> Callable[[VllmLike, list[int]], None]:
    """The index holds what was routed."""
    return lambda engine, blocks: index.store("w", blocks)


def by_events(index: BlockIndex) -> Callable[[VllmLike, list[int]], None]:
    """The index holds what the engine says."""
    feed, sequence = WorkerFeed("w", index, BLOCK), count()

    def update(engine: VllmLike, blocks: list[int]) -> None:
        feed.apply(next(sequence), msgspec.msgpack.encode([1.0, engine.events, 0]), 0.0)
        engine.events.clear()

    return update


@pytest.mark.parametrize("view", [by_history, by_events])
def test_no_prediction_is_wrong_on_mixed_requests(
    tokenizer: Tokenizer, view: Callable[[BlockIndex], Callable[[VllmLike, list[int]], None]]
) -> None:
    engine, index, causes = VllmLike(tokenizer), BlockIndex(), Counter[str]()
    update = view(index)
    for messages in mixed_requests(random.Random(7), 1000):
        tokens = tokenizer.encode_chat(messages)
        blocks = block_hashes(tokens, BLOCK)
        predicted = reusable_part(index.depths(blocks).get("w", 0) * BLOCK, len(tokens), BLOCK)
        delivered, _ = engine.serve(messages)
        readable = readable_tokens(tokens)
        cause = prediction_cause(
            predicted, delivered, block_size=BLOCK, readable_tokens=readable if readable < len(tokens) else None
        )
        causes[f"{cause.value}, {'mixed' if has_media(messages) else 'text'}"] += 1
        update(engine, blocks.tolist())
    assert set(causes) <= {
        "exact, text", "exact, mixed", "within_block, text", "within_block, mixed", "partly_readable, mixed",
    }, causes  # fmt: skip
    assert min(causes["exact, text"], causes["partly_readable, mixed"]) > 100
