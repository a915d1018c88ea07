"""`prefixwatch engines calibrate`: a profile fitted to a bench's requests, or to ones sent to a running engine."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import aiohttp
import msgspec
import typer
from rich.console import Console

from prefixwatch.documents.errors import InputError
from prefixwatch.engines.model.calibration import Calibration, Served, calibrate
from prefixwatch.engines.model.hardware import as_yaml
from prefixwatch.engines.model.step_time import StepTimeError
from prefixwatch.loadgen.request_log.records import Outcome, read_requests
from prefixwatch.stack.cli.command import JsonFlag, load_option, output_option, target_option
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.out_folder import write_text
from prefixwatch.stack.local.targets import Endpoint, served_model

LENGTHS = (16, 64, 256, 1024, 4096)
"""Words of the prompts that are sent one after another."""
ROUNDS = 3
BATCHES = (1, 2, 4, 8)
OUTPUT_TOKENS = 48
_TIMEOUT = aiohttp.ClientTimeout(total=120.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """The options of `prefixwatch engines calibrate`."""

    run: Annotated[Path | None, typer.Argument(help="Folder of a bench, or its requests.parquet.")] = None
    out: Annotated[Path, output_option(help="File for the profile (*.yaml).")]
    target: Annotated[str | None, target_option(help="Send requests to this running engine instead.")] = None
    model: Annotated[str | None, target_option(help="Model to request; default: the target's first.")] = None
    api_key_env: Annotated[str, target_option(help="Environment variable with the target's API key.")] = ""
    max_prompt_tokens: Annotated[
        int, load_option(min=500, help="Budget: prompt tokens sent to a target in all, about.")
    ] = 30_000
    max_num_batched_tokens: Annotated[int, target_option(min=1, help="Tokens that the engine computes per step.")] = (
        2048
    )
    block_size: Annotated[int, target_option(min=1, help="Tokens of the engine's KV blocks.")] = 16
    capacity_blocks: Annotated[int | None, target_option(min=1, help="KV blocks of the engine, if known.")] = None
    as_json: JsonFlag = False


def run_calibrate(options: CalibrateOptions, console: Console) -> tuple[dict[str, Any], int]:
    """Fit, write the profile and print it; the exit code is 3 where a part of the work isn't described well."""
    if (options.run is None) == (options.target is None):
        raise UsageError("give a bench's folder, or --target URL")
    if options.out.suffix not in {".yaml", ".yml"}:
        raise UsageError(f"--out {options.out}: name a file that ends in .yaml, so that --profile takes it")
    source = options.target or str(options.run)
    requests = asyncio.run(_sent(options)) if options.target else _recorded(Path(source))
    try:
        found = calibrate(requests, options.max_num_batched_tokens)
    except StepTimeError as error:
        raise InputError(f"{source}: {error}") from error
    document = found.profile(source, options.max_num_batched_tokens, options.block_size, options.capacity_blocks)
    write_text(options.out, as_yaml(document), "--out")
    _print(found, options.out, console)
    result = {
        "profile": str(options.out),
        "fitted_ms": document["fitted_ms"],
        "errors": found.errors,
        "poor": found.poor,
        "samples": {"prefill": found.prefill_samples, "decode": found.decode_samples},
    }
    return result, 3 if found.poor else 0


def _recorded(path: Path) -> list[Served]:
    file = path / "requests.parquet" if path.is_dir() else path
    try:
        records = read_requests(file)
    except ValueError as error:
        raise InputError(str(error)) from error
    return [
        Served(
            f"{record.policy}/{record.repeat}/{record.worker}",
            record.sent_s,
            record.first_token_s,
            record.end_s,
            record.prompt_tokens,
            record.cached_tokens,
            record.output_tokens,
        )
        for record in records
        if record.outcome == Outcome.COMPLETED
        and record.sent_s is not None
        and record.first_token_s is not None
        and record.end_s is not None
        and record.prompt_tokens is not None
        and record.cached_tokens is not None
        and record.output_tokens is not None
    ]


async def _sent(options: CalibrateOptions) -> list[Served]:
    """Prompts of each length one after another, then batches; never more prompt tokens than the budget."""
    assert options.target is not None
    endpoint = Endpoint(options.target, options.api_key_env)
    model = await served_model(endpoint, options.model)
    rng, served, left = random.Random(), list[Served](), options.max_prompt_tokens
    async with endpoint.session() as session:

        async def send(words: int) -> Served | None:
            nonlocal left
            if words > left:
                return None
            text = " ".join(str(rng.randrange(10, 100)) for _ in range(words))
            request = await _one(session, endpoint.address("/v1/completions"), {"model": model, "prompt": text})
            left -= request.prompt_tokens if request else 0
            if request is not None:
                served.append(request)
            return request

        for _ in range(ROUNDS):
            for batch in BATCHES:
                await asyncio.gather(*(send(LENGTHS[0]) for _ in range(batch)))
        for words in LENGTHS:
            sent = [await send(words) for _ in range(ROUNDS)]
            if None in sent:
                break
    return served


async def _one(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Served | None:
    """Send one request and time its tokens; None where the target refuses it, as a prompt that is too long."""
    body = {**body, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    times, usage = list[float](), dict[str, Any]()
    sent_s = perf_counter()
    try:
        async with session.post(url, json=body, timeout=_TIMEOUT) as response:
            if response.status == 400:
                return None
            if response.status != 200:
                raise InputError(f"{url}: HTTP {response.status}: a calibration needs an engine that answers")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = msgspec.json.decode(line[6:])
                    usage = event.get("usage") or usage
                    if event.get("choices") and event["choices"][0].get("text"):
                        times.append(perf_counter())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise InputError(f"{url}: {error or 'no answer in time'}: is the engine running?") from error
    if len(times) < 2 or not usage:
        raise InputError(f"{url}: an answer without tokens or usage: a calibration needs both")
    # An engine that doesn't report cached tokens has none of these prompts, which are random.
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Served("target", sent_s, times[0], times[-1], usage["prompt_tokens"], cached, usage["completion_tokens"])


def _print(found: Calibration, out: Path, console: Console) -> None:
    console.print(f"{found.prefill_samples} first tokens, {found.decode_samples} generations", highlight=False)
    for name, (low, high) in found.intervals.items():
        value = getattr(found.step_time, name)
        console.print(f"{name:30} {value * 1e3:.6g} ms, 95 % {low * 1e3:.6g} … {high * 1e3:.6g}", highlight=False)
    for part, error in found.errors.items():
        mark = "  doesn't fit" if part in found.poor else ""
        console.print(f"{part}: median error {error:.1%}{mark}", highlight=False)
    console.print(f"Profile: {out}", soft_wrap=True, highlight=False)
