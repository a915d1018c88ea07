"""How a vLLM server on the CPU is started: its options, its command line and its environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prefixwatch.engines.errors import EngineError
from prefixwatch.engines.tiny_model import MODEL_NAME

_BLOCK_SIZE_STEP_TOKENS = 32

# Fixed by what a shared, small, offline machine needs; the last one adds /reset_prefix_cache.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_SERVER_DEV_MODE": "1",
}
_NOT_INHERITED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "PYTHONPATH", "PYTHONHOME")


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What a vLLM engine is started with.

    `capacity_blocks` blocks of `block_size` tokens hold the cache. Raises EngineError for sizes that vLLM
    would refuse after a long start: blocks come in steps of 32 tokens on the CPU, and the longest allowed
    request must fit with at least one block to spare.
    """

    served_model_name: str = MODEL_NAME
    block_size: int = 32
    capacity_blocks: int = 300
    max_model_len: int = 8192
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    seed: int = 0
    extra_arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size % _BLOCK_SIZE_STEP_TOKENS:
            raise EngineError(
                f"block_size is {self.block_size}: vLLM's CPU build needs a multiple of {_BLOCK_SIZE_STEP_TOKENS}"
            )
        longest_blocks = self.max_model_len / self.block_size
        if self.capacity_blocks <= longest_blocks:
            raise EngineError(
                f"capacity_blocks is {self.capacity_blocks}: max_model_len {self.max_model_len} needs more than "
                f"{longest_blocks:g} blocks of {self.block_size} tokens; raise the one or lower the other"
            )


@dataclass(frozen=True, slots=True)
class KvEventEndpoints:
    """ZMQ endpoints of an engine's KV events: the feed of new ones, and the replay of missed ones."""

    publish: str
    replay: str


def command(
    python: Path, model_dir: Path, name: str, *, port: int, events: KvEventEndpoints, options: VllmOptions
) -> list[str]:
    """The server's command line; it listens on loopback."""
    kv_events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "topic": f"kv@{name}",
        "endpoint": events.publish,
        "replay_endpoint": events.replay,
    }
    arguments: dict[str, str | int] = {
        "--model": str(model_dir),
        "--served-model-name": options.served_model_name,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "bfloat16",
        "--max-model-len": options.max_model_len,
        "--max-num-seqs": options.max_num_seqs,
        "--max-num-batched-tokens": options.max_num_batched_tokens,
        "--block-size": options.block_size,
        "--num-gpu-blocks-override": options.capacity_blocks,
        "--kv-cache-metrics-sample": "1.0",
        "--kv-events-config": json.dumps(kv_events),
        "--seed": options.seed,
    }
    switches = ("--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details", "--kv-cache-metrics")
    # the `vllm` command itself fails under this distribution's name
    # -P: a folder of the current directory must not be taken for one of its packages
    start = [str(python), "-P", "-m", "vllm.entrypoints.openai.api_server"]
    flags = [part for flag, value in arguments.items() for part in (flag, str(value))]
    return [*start, *flags, *switches, *options.extra_arguments]


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: ours without what misleads it, and its own settings."""
    return {key: value for key, value in inherited.items() if key not in _NOT_INHERITED} | _ENVIRONMENT
