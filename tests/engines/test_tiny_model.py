"""The built-in model: exact prompts from plain words, equal files everywhere, output that always streams."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from prefixwatch.engines import tiny_model
from prefixwatch.engines.errors import EngineError
from prefixwatch.engines.tiny_model import default_model_dir, make_tiny_model, words
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), weights=True)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


def tensor(model_dir: Path, name: str) -> npt.NDArray[np.float32]:
    raw = (model_dir / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8:start])[name]
    low, high = (start + offset for offset in entry["data_offsets"])
    upper = np.frombuffer(raw[low:high], dtype="<u2").astype("<u4") << 16
    return upper.view("<f4").reshape(entry["shape"])


def test_every_word_is_one_token_and_joins_without_change(tokenizer: Tokenizer) -> None:
    """The safe alphabet: any row of these words has as many tokens as words."""
    safe = [word for word in words() if len(set(tokenizer.encode(f" {word} {word}").tolist())) == 1]
    assert safe == words()
    assert len(set(safe)) == len(safe) == 2040
    assert len(tokenizer.encode("".join(f" {word}" for word in safe))) == 2040


def test_other_text_survives_too(tokenizer: Tokenizer) -> None:
    text = "Größe: 10 µs – 東京\n\ttabs, CAPS & <tags>"
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_chat_template_marks_turns_with_single_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}]).tolist()
    assert tokenizer.decode(ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(3) == 2
    assert ids.count(4) == 1


def test_config_fits_the_tokenizer(model_dir: Path, tokenizer: Tokenizer) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.vocabulary_size == 3588
    assert config["eos_token_id"] == tokenizer.encode("<|im_end|>").tolist()[0]


def test_same_files_every_time(model_dir: Path, tmp_path: Path) -> None:
    again = make_tiny_model(tmp_path / "again", weights=True)
    files = sorted(file.name for file in model_dir.iterdir())
    assert files == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert all((again / name).read_bytes() == (model_dir / name).read_bytes() for name in files)


def test_output_is_printable_text_only(model_dir: Path, tokenizer: Tokenizer) -> None:
    """A zero row can't win against the others, so no stream ends early or holds back half a character."""
    large = np.abs(tensor(model_dir, "lm_head.weight")).max(axis=1) > 0
    assert large.shape == (3588,)
    assert not large[:5].any(), "a control token could be generated"
    texts = [tokenizer.token_text(token) for token in range(5, 3588)]
    assert large[5:].tolist() == [text.isascii() and text.isprintable() for text in texts]
    assert large.sum() == 3588 - 5 - (256 - 95)


def test_weights_are_random_about_zero(model_dir: Path) -> None:
    weights = tensor(model_dir, "model.layers.3.mlp.down_proj.weight")
    assert weights.shape == (256, 1024)
    assert abs(float(weights.std()) - 0.02) < 0.0002
    assert abs(float(weights.mean())) < 0.0002


def test_without_weights_for_engines_that_only_count(tmp_path: Path) -> None:
    assert not (make_tiny_model(tmp_path) / "model.safetensors").exists()


def test_default_folder_is_made_once_even_by_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_model, "user_cache_path", lambda name: tmp_path / name)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(default_model_dir())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {tmp_path / "prefixwatch" / "tiny-model-2"}
    assert [entry.name for entry in (tmp_path / "prefixwatch").iterdir()] == ["tiny-model-2"]
    made = (found[0] / "model.safetensors").stat().st_mtime_ns
    assert (default_model_dir() / "model.safetensors").stat().st_mtime_ns == made


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tiny_model, "user_cache_path", lambda name: tmp_path / "file" / name)
    with pytest.raises(EngineError, match=r"the tiny model can't be written to .*tiny-model-2: Not a directory"):
        default_model_dir()
