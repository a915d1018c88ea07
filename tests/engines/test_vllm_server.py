"""vLLM's command line and environment, and the sizes it would refuse only after a long start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefixwatch.engines.errors import EngineError
from prefixwatch.engines.vllm.server import KvEventEndpoints, VllmOptions, command, environment

EVENTS = KvEventEndpoints("ipc:///s/0.kv", "ipc:///s/0.replay")


def built(**options: object) -> list[str]:
    settings = VllmOptions(**options)  # type: ignore[arg-type] # each test names fields of the right type
    return command(Path("/v/bin/python"), Path("/m"), "vllm-0", port=8100, events=EVENTS, options=settings)


def value(line: list[str], flag: str) -> str:
    return line[line.index(flag) + 1]


def test_command() -> None:
    line = built(block_size=64, capacity_blocks=200, extra_arguments=("--enable-lora",))
    assert line[:4] == ["/v/bin/python", "-P", "-m", "vllm.entrypoints.openai.api_server"]
    assert value(line, "--model") == "/m"
    assert value(line, "--port") == "8100"
    assert value(line, "--block-size") == "64"
    assert value(line, "--num-gpu-blocks-override") == "200"
    assert json.loads(value(line, "--kv-events-config")) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "topic": "kv@vllm-0",
        "endpoint": "ipc:///s/0.kv",
        "replay_endpoint": "ipc:///s/0.replay",
    }
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details", "--enforce-eager"} <= set(line)
    assert line[-1] == "--enable-lora"


def test_block_size_comes_in_steps() -> None:
    with pytest.raises(EngineError, match="block_size is 16: vLLM's CPU build needs a multiple of 32"):
        VllmOptions(block_size=16)


@pytest.mark.parametrize(("capacity", "fits"), [(256, False), (257, True)])
def test_the_longest_request_must_fit_with_a_block_to_spare(capacity: int, fits: bool) -> None:
    if fits:
        assert VllmOptions(capacity_blocks=capacity).capacity_blocks == 257
        return
    with pytest.raises(EngineError, match="max_model_len 8192 needs more than 256 blocks of 32 tokens"):
        VllmOptions(capacity_blocks=capacity)


def test_environment_drops_what_misleads_it() -> None:
    inherited = {"PATH": "/bin", "OPENBLAS_CORETYPE": "x", "OPENBLAS_L2_SIZE": "1", "PYTHONPATH": "/ours"}
    env = environment(inherited)
    assert env["PATH"] == "/bin"
    assert env.keys().isdisjoint({"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "PYTHONPATH"})
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
