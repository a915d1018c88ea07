"""Which combinations of GPU, model and backend have measured timings, and what is said of the others."""

from __future__ import annotations

import pytest

from prefixwatch.engines.model.hardware import Known, unknown_part

KNOWN = Known(
    {"h100_sxm": ["vllm", "sglang", "trtllm"], "a100_sxm": ["vllm", "trtllm"], "b60": ["vllm"]},
    ["meta-llama/Meta-Llama-3.1-8B", "Qwen/Qwen3-32B"],
)


@pytest.mark.parametrize(
    ("system", "model", "backend", "said"),
    [
        ("h100_sxm", "Qwen/Qwen3-32B", "sglang", None),
        ("h100", "Qwen/Qwen3-32B", "vllm", "system 'h100': did you mean 'h100_sxm'?"),
        (
            "b60",
            "Qwen/Qwen3-32B",
            "trtllm",
            "backend 'trtllm' on b60: use one of vllm; trtllm was measured on a100_sxm, h100_sxm",
        ),
        ("b60", "Qwen/Qwen3-32B", "tgi", "backend 'tgi' on b60: use one of vllm"),
        (
            "h100_sxm",
            "meta-llama/Llama-3.1-8B",
            "vllm",
            "model 'meta-llama/Llama-3.1-8B': did you mean 'meta-llama/Meta-Llama-3.1-8B'?",
        ),
    ],
)
def test_an_unmeasured_combination_is_refused_with_the_nearest(
    system: str, model: str, backend: str, said: str | None
) -> None:
    assert unknown_part(KNOWN, system, model, backend) == said
