"""Step time tables of real hardware, from the kernel timings that `aiconfigurator-core` ships (extra `hardware`).

`tabulate` asks it once for a system, model and backend, and returns a profile document: two tables
(`engines.model.step_table`), the KV blocks that fit, and the interpolation error at the midpoints of the tables. The
document is all that a simulation needs; `engines/profiles/` ships some.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import yaml

from prefixwatch.documents.hints import did_you_mean
from prefixwatch.engines.errors import EngineError
from prefixwatch.engines.model.step_table import Grid

PREFILL_TOKENS = (1, 16, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
PREFILL_CACHED = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 98304)
DECODE_SEQUENCES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
DECODE_CONTEXT = (1, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
BLOCK_TOKENS = 16
MAX_BATCHED_TOKENS = 8192
MEMORY_SHARE = 0.9
"""Of the GPU's memory, as vLLM's `--gpu-memory-utilization` has it by default."""

Milliseconds = Callable[[int, int], float]


class Known(NamedTuple):
    """What the library has measured."""

    backends: Mapping[str, Collection[str]]
    """Backends by system."""
    models: Collection[str]
    """Models whose configuration it has; others would be downloaded."""


def unknown_part(known: Known, system: str, model: str, backend: str) -> str | None:
    """What of this combination hasn't been measured, with the nearest that has; None where all is known."""
    if system not in known.backends:
        return f"system '{system}': {did_you_mean(system, sorted(known.backends))}"
    if backend not in known.backends[system]:
        others = sorted(each for each, backends in known.backends.items() if backend in backends)
        elsewhere = f"; {backend} was measured on {', '.join(others)}" if others else ""
        return f"backend '{backend}' on {system}: use one of {', '.join(sorted(known.backends[system]))}{elsewhere}"
    if model not in known.models:
        return f"model '{model}': {did_you_mean(model, sorted(known.models))}"
    return None


def tabulate(system: str, model: str, backend: str, tensor_parallel: int = 1) -> dict[str, Any]:
    """The profile document of a GPU system (such as `h100_sxm`) that serves a model with a backend (`vllm`, `sglang`,
    `trtllm`). Raises EngineError for a combination that has not been measured, or without the extra."""
    try:
        from aiconfigurator_core import sdk  # noqa: PLC0415, an optional extra
        from aiconfigurator_core.sdk.perf_database import (  # noqa: PLC0415
            get_latest_database_version,
            get_supported_databases,
        )
    except ImportError as error:
        raise EngineError("measured timings need the extra: pip install 'prefixwatch[hardware]'") from error
    known = Known(get_supported_databases(), _models())
    if (problem := unknown_part(known, system, model, backend)) is not None:
        raise EngineError(f"no measured timings of {problem}")
    try:
        handle = sdk.EngineHandle.compile(model, system, backend, tp_size=tensor_parallel)
        version = get_latest_database_version(system, backend)
    except Exception as error:  # the library raises its own kinds, one per missing table
        raise EngineError(
            f"no measured timings of {model} on {tensor_parallel} × {system} with {backend}: {error}; choose another "
            "number of GPUs or another system"
        ) from error

    def prefill(tokens: int, cached: int) -> float:
        return float(handle.predict_prefill_latency(1, tokens + cached, cached))

    def decode(sequences: int, context: int) -> float:
        return float(handle.decode_step_latency(sequences, context, 2))

    tables = {
        "prefill_ms": _table(prefill, PREFILL_TOKENS, PREFILL_CACHED),
        "decode_ms": _table(decode, DECODE_SEQUENCES, DECODE_CONTEXT),
    }
    errors = {
        "prefill": _midpoint_error(prefill, tables["prefill_ms"]),
        "decode": _midpoint_error(decode, tables["decode_ms"]),
    }
    blocks = sdk.estimate_num_gpu_blocks(
        model,
        system,
        backend,
        version,
        scheduler_block_size=BLOCK_TOKENS,
        max_num_tokens=MAX_BATCHED_TOKENS,
        max_batch_size=DECODE_SEQUENCES[-1],
        memory_fraction_kind="of_total",
        memory_fraction_value=MEMORY_SHARE,
        tp_size=tensor_parallel,
    )
    return {
        "measured": f"Kernel timings of {tensor_parallel} × {system}, {model}, {backend} {version}, as "
        "aiconfigurator-core composes them into steps.",
        "assumed": "A step that computes prompts and generates costs both parts, less one reading of the weights. KV "
        f"blocks: {MEMORY_SHARE:.0%} of the GPU's memory.",
        "gpus": tensor_parallel,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "block_size": BLOCK_TOKENS,
        "capacity_blocks": int(blocks),
        "interpolation_error": {name: round(error, 4) for name, error in errors.items()},
        **tables,
    }


def _models() -> list[str]:
    files = resources.files("aiconfigurator_core").joinpath("model_configs").iterdir()
    ending = "_config.json"
    return [each.name.removesuffix(ending).replace("--", "/") for each in files if each.name.endswith(ending)]


def _table(function: Milliseconds, rows: Sequence[int], columns: Sequence[int]) -> dict[str, Any]:
    values = [[round(function(row, column), 4) for column in columns] for row in rows]
    return {"rows": list(rows), "columns": list(columns), "values": values}


def _midpoint_error(function: Milliseconds, table: dict[str, Any]) -> float:
    """The mean relative error of the interpolation at the middle of every cell."""
    grid = Grid(tuple(table["rows"]), tuple(table["columns"]), tuple(map(tuple, table["values"])))
    errors = []
    for (a, b), (c, d) in itertools.product(itertools.pairwise(grid.rows), itertools.pairwise(grid.columns)):
        row, column = round((a + b) / 2), round((c + d) / 2)
        true = function(row, column)
        errors.append(abs(grid.at(row, column) / true - 1))
    return sum(errors) / len(errors)


def as_yaml(document: dict[str, Any]) -> str:
    """The document as a file: one line per row of a table."""
    return yaml.dump(document, sort_keys=False, width=10_000, default_flow_style=None, allow_unicode=True)
