"""A small model made on the spot: its own tokenizer, chat template and random weights, no download.

It replaces a real model wherever only the serving matters. The tokenizer is a byte-level BPE trained
until every word of `kvcache/prompts/words.txt` is one token, so that prompts of an exact length can be put
together from plain words, and any other text still encodes. The weights are a Llama of about six million
bfloat16 parameters, equal wherever they are made, so that engines which load them agree. Output is always
words: the rows of the output layer that belong to control tokens and to bytes above ASCII are zero and the
others large, so no stream ends early and no first token waits for the rest of a character.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from platformdirs import user_cache_path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from prefixwatch.engines.errors import EngineError
from prefixwatch.kvcache.prompts.words import words

__all__ = ["MODEL_NAME", "default_model_dir", "make_tiny_model", "words"]

VERSION = "2"
"""Changes with anything that changes a file of the model: part of the cached folder's name."""

MODEL_NAME = "tiny"
PAD, BOS, EOS, TURN_START, TURN_END = _CONTROL = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_MAX_VOCABULARY = 4096
_MAX_POSITIONS = 16_384
_HIDDEN, _INTERMEDIATE, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 256, 1024, 4, 4, 2, 64
_WEIGHT_SCALE, _OUTPUT_SCALE = 0.02, 0.2
_SEED = 0

Weights = npt.NDArray[np.float32]


def default_model_dir() -> Path:
    """The model with its weights in the user's cache, made on the first call (well under a second)."""
    folder = user_cache_path("prefixwatch") / f"tiny-model-{VERSION}"
    if not folder.is_dir():
        _make_atomically(folder)
    return folder


def make_tiny_model(folder: Path, *, weights: bool = False) -> Path:
    """Writes the model's files into `folder` and returns it; without `weights` only what a tokenizer needs."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    control_ids = {f"{name}_id": tokenizer.token_to_id(token) for name, token in _special_tokens().items()}
    _write_json(folder / "config.json", _model_config(tokenizer.get_vocab_size()) | control_ids)
    _write_json(folder / "generation_config.json", control_ids)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    if weights:
        _write_safetensors(folder / "model.safetensors", dict(_tensors(_printable_rows(tokenizer))))
    return folder


def _make_atomically(folder: Path) -> None:
    """Makes the model beside its place and renames it there; where two do so at once, the first one stays."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=folder.name, dir=folder.parent) as temporary:
            made = make_tiny_model(Path(temporary) / "model", weights=True)
            os.rename(made, folder)
    except OSError as error:
        if not folder.is_dir():
            raise EngineError(f"the tiny model can't be written to {folder}: {error.strerror}") from error


def _train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MAX_VOCABULARY,
        special_tokens=list(_CONTROL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["".join(f" {word}" for word in words())], trainer)
    return tokenizer


def _special_tokens() -> dict[str, str]:
    return {"bos_token": BOS, "eos_token": TURN_END, "pad_token": PAD}


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **_special_tokens(),
        "model_max_length": _MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _model_config(vocabulary_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "vocab_size": vocabulary_size,
        "max_position_embeddings": _MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _printable_rows(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Which token ids decode to printable ASCII on their own."""
    texts = (tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size()))
    return np.array([text.isascii() and text.isprintable() and text != "" for text in texts])


def _tensors(printable: npt.NDArray[np.bool_]) -> Iterator[tuple[str, Weights]]:
    """Every tensor of the Llama, by its Hugging Face name; matrices are (outputs, inputs)."""
    random = np.random.default_rng(_SEED)

    def matrix(outputs: int, inputs: int, scale: float = _WEIGHT_SCALE) -> Weights:
        return random.standard_normal((outputs, inputs), dtype=np.float32) * np.float32(scale)

    ones = np.ones(_HIDDEN, dtype=np.float32)
    query_width, kv_width = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    yield "model.embed_tokens.weight", matrix(len(printable), _HIDDEN)
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", ones
        yield f"{prefix}.self_attn.q_proj.weight", matrix(query_width, _HIDDEN)
        yield f"{prefix}.self_attn.k_proj.weight", matrix(kv_width, _HIDDEN)
        yield f"{prefix}.self_attn.v_proj.weight", matrix(kv_width, _HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(_HIDDEN, query_width)
        yield f"{prefix}.post_attention_layernorm.weight", ones
        yield f"{prefix}.mlp.gate_proj.weight", matrix(_INTERMEDIATE, _HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", matrix(_INTERMEDIATE, _HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", matrix(_HIDDEN, _INTERMEDIATE)
    yield "model.norm.weight", ones
    yield "lm_head.weight", matrix(len(printable), _HIDDEN, _OUTPUT_SCALE) * printable[:, None]


def _bfloat16_bytes(values: Weights) -> bytes:
    """The upper half of each float32, little-endian: rounded towards zero, which random weights don't mind."""
    return (values.view("<u4") >> np.uint32(16)).astype("<u2").tobytes()


def _write_safetensors(file: Path, tensors: dict[str, Weights]) -> None:
    """The safetensors format: length of the header (u64), a JSON header with byte ranges, the raw tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, values in tensors.items():
        end = start + 2 * values.size
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [start, end]}
        start = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        out.writelines(_bfloat16_bytes(values) for values in tensors.values())


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
