"""The fingerprint of an opening is found in whatever prompt begins with it."""

from __future__ import annotations

import pytest

from prefixwatch.engines.tiny_model import make_tiny_model
from prefixwatch.kvcache.blocks import block_hashes, namespace_root
from prefixwatch.kvcache.fingerprint import system_prompt_fingerprint, text_fingerprint
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer, TokenizerError

SYSTEM_PROMPT = "You answer questions of customers. Be brief, be kind, and never promise a refund. " * 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.mark.parametrize("question", ["Where is my parcel?", "9", "  ", "日本語"])
@pytest.mark.parametrize("salt", [None, "tenant-a"])
def test_every_chat_with_the_system_prompt_has_the_block(tokenizer: Tokenizer, question: str, salt: str | None) -> None:
    found = system_prompt_fingerprint(tokenizer, SYSTEM_PROMPT, 8, salt)
    chat = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    blocks = block_hashes(tokenizer.encode_chat(chat), 8, root=namespace_root(salt))
    assert found.fingerprint == f"{int(blocks[found.blocks - 1]):016x}"
    assert found.blocks == found.tokens // 8


def test_every_completion_that_begins_so_has_the_block(tokenizer: Tokenizer) -> None:
    found = text_fingerprint(tokenizer, SYSTEM_PROMPT)
    blocks = block_hashes(tokenizer.encode(SYSTEM_PROMPT + "Now then", add_special_tokens=True))
    assert found.fingerprint == f"{int(blocks[found.blocks - 1]):016x}"


def test_an_opening_shorter_than_a_block_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="fewer than a block of 4096"):
        text_fingerprint(tokenizer, SYSTEM_PROMPT, 4096)
