"""`prefixwatch analyze`: what of a scenario's or a recording's traffic a prefix cache could reuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from documents import DocumentError
from engines.tiny_model import default_model_dir
from kvcache.blocks import block_hashes, namespace_root
from kvcache.tokenizer import Tokenizer, TokenizerError
from loadgen.planner import planned_prompts
from loadgen.prompts import PromptWriter
from loadgen.recorded import RecordedRequest
from loadgen.recordings import read_recording
from loadgen.scenario import load_scenario, shipped_scenarios
from loadgen.traffic_analysis import SeenPrompt, TrafficAnalysis, analyze
from loadgen.wording import number, percent
from stack.errors import UsageError


@dataclass(frozen=True, slots=True)
class AnalyzeOptions:
    """The options of `prefixwatch analyze`, as given."""

    traffic: str
    format: str | None = None
    limit: int | None = None
    model_dir: Path | None = None
    block_size: int = 16
    seed: int = 1


def run_analyze(options: AnalyzeOptions, console: Console) -> dict[str, Any]:
    """Analyse and print; answers the figures. Raises one of INPUT_ERRORS."""
    tokenizer = Tokenizer(options.model_dir or default_model_dir())
    if options.traffic in shipped_scenarios() or options.traffic.endswith((".yaml", ".yml")):
        if options.format is not None:
            raise UsageError(f"--format: {options.traffic} is a scenario; formats are of recordings: leave it out")
        prompts, block_size = list(_of_scenario(options, tokenizer)), options.block_size
    else:
        prompts, block_size = _of_recording(options, tokenizer)
    found = analyze(prompts, block_size, tokenizer.decode)
    _print(found, console)
    return {"traffic": options.traffic, **found.as_json()}


def _of_scenario(options: AnalyzeOptions, tokenizer: Tokenizer) -> Iterator[SeenPrompt]:
    scenario = load_scenario(options.traffic)
    planned = planned_prompts(scenario, PromptWriter(tokenizer), seed=options.seed, nonce="analyze", texts=False)
    for request, tokens in planned:
        if options.limit is not None and request.index >= options.limit:
            return
        root = namespace_root(request.salt, request.model or None)
        yield SeenPrompt(
            arrival_s=request.scheduled_s,
            namespace=str(root),
            session=request.session,
            prompt_tokens=len(tokens),
            blocks=block_hashes(tokens, options.block_size, root=root),
            tokens=tokens,
        )


def _of_recording(options: AnalyzeOptions, tokenizer: Tokenizer) -> tuple[list[SeenPrompt], int]:
    if not Path(options.traffic).exists():
        raise UsageError(
            f"{options.traffic}: no such recording, and no such scenario: give a file, or one of "
            f"{', '.join(shipped_scenarios())}"
        )
    recording = read_recording(Path(options.traffic), options.format, options.limit)
    if recording.block_tokens is not None:
        return [_of_ids(k, request) for k, request in enumerate(recording.requests)], recording.block_tokens
    if any(request.messages is None for request in recording.requests):
        raise UsageError(
            f"{options.traffic}: a {recording.format} recording without texts or block ids says nothing of what its "
            f"prompts share: give one with messages, or a trace with hash_ids"
        )
    prompts = [_of_text(k, request, tokenizer, options.block_size) for k, request in enumerate(recording.requests)]
    return prompts, options.block_size


def _of_ids(number_: int, request: RecordedRequest) -> SeenPrompt:
    assert request.block_ids is not None
    assert request.prompt_tokens is not None
    return SeenPrompt(
        arrival_s=request.arrival_s,
        namespace="",
        session=request.session or f"r{number_}",
        prompt_tokens=request.prompt_tokens,
        blocks=np.array(request.block_ids, dtype=np.uint64),
    )


def _of_text(number_: int, request: RecordedRequest, tokenizer: Tokenizer, block_size: int) -> SeenPrompt:
    assert request.messages is not None
    try:
        tokens = tokenizer.encode_chat(list(request.messages), tools=request.tools)
    except TokenizerError as error:
        raise DocumentError(f"{request.where}: the model's chat template refuses it: {error}") from error
    root = namespace_root(request.salt, request.model or None)
    return SeenPrompt(
        arrival_s=request.arrival_s,
        namespace=str(root),
        session=request.session or f"r{number_}",
        prompt_tokens=len(tokens),
        blocks=block_hashes(tokens, block_size, root=root),
        tokens=tokens,
    )


def _print(found: TrafficAnalysis, console: Console) -> None:
    ratio = found.hit_tokens / found.prompt_tokens if found.prompt_tokens else None
    rate = "" if not found.seconds else f", {number(found.requests / found.seconds)} req/s"
    console.print(
        f"{found.requests} requests of {found.sessions} sessions{rate}, {number(found.prompt_tokens)} prompt tokens.\n"
        f"Could hit in a cache without limit: {percent(ratio)} of them; {percent(_share(found))} of that within the "
        f"session.",
        highlight=False,
        soft_wrap=True,
    )
    for line in _what_breaks_it(found):
        console.print(line, highlight=False, soft_wrap=True)
    if found.curve:
        enough = found.profile.capacity_for(0.9) or 0
        console.print(
            f"Nine tenths of that need {enough:,} blocks in one cache ({enough * found.block_size:,} tokens).",
            highlight=False,
        )
        console.print(_curve_table(found))
    console.print(_parting_table(found))
    if found.top_prefixes:
        console.print(_prefix_table(found))


def _share(found: TrafficAnalysis) -> float | None:
    return found.hit_tokens_in_session / found.hit_tokens if found.hit_tokens else None


def _what_breaks_it(found: TrafficAnalysis) -> Iterator[str]:
    if found.lost_tokens is None:
        yield "What breaks reuse can't be told: the recording has no texts."
        return
    share = found.lost_tokens / found.prompt_tokens if found.prompt_tokens else None
    yield f"Came again behind a difference, where no prefix cache can reuse it: about {percent(share)} of the prompts."
    for point in found.parting_points:
        lost = percent(point.lost_tokens / found.prompt_tokens)
        yield f"  token {point.at_token}: {point.requests} requests, {lost} lost, at {point.text!r}"


def _curve_table(found: TrafficAnalysis) -> Table:
    table = Table(title=f"One LRU cache of so many blocks of {found.block_size} tokens")
    for name in ("blocks", "tokens", "blocks reused"):
        table.add_column(name, justify="right")
    for blocks, ratio in found.curve:
        table.add_row(f"{blocks:,}", f"{blocks * found.block_size:,}", percent(ratio))
    return table


def _parting_table(found: TrafficAnalysis) -> Table:
    table = Table(title="First tokens shared with an earlier request")
    table.add_column("tokens", justify="right")
    table.add_column("requests", justify="right")
    for name, count in found.parting.items():
        table.add_row(name, str(count))
    return table


def _prefix_table(found: TrafficAnalysis) -> Table:
    table = Table(title="Openings that save most")
    texts = any(prefix.text for prefix in found.top_prefixes)
    for name in ("tokens", "requests", "saved tokens", *(("begins",) if texts else ())):
        table.add_column(name, justify="left" if name == "begins" else "right")
    for prefix in found.top_prefixes:
        figures = (f"{prefix.tokens:,}", f"{prefix.requests:,}", f"{prefix.saved_tokens:,}")
        table.add_row(*figures, *((repr(prefix.text),) if texts else ()))
    return table
