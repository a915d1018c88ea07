"""`prefixwatch analyze`: what of a scenario's or a recording's traffic a prefix cache could reuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from prefixwatch.engines.model.profiles import DEFAULT_PROFILE, profile
from prefixwatch.engines.model.step_time import StepTimeError
from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer, TokenizerError
from prefixwatch.loadgen.grading.wording import number, percent
from prefixwatch.loadgen.hygiene.causes import Diagnosis, diagnose
from prefixwatch.loadgen.hygiene.evictions import curve
from prefixwatch.loadgen.hygiene.tables import ShownTable, page, tables
from prefixwatch.loadgen.recordings.analysis import TrafficAnalysis, analyze
from prefixwatch.loadgen.scenario.model import shipped_scenarios
from prefixwatch.stack.bench.recording_options import RecordingOptions, is_scenario, refuse_for_scenario
from prefixwatch.stack.cli.command import (
    JsonFlag,
    command,
    finish,
    load_option,
    new_app,
    output_option,
    plain_console,
    target_option,
)
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.out_folder import write_text
from prefixwatch.stack.traffic.analyzed_traffic import Traffic, encoded, of_recording, of_scenario

CURVE_SHARES = (1 / 16, 1 / 4, 1 / 2, 1.0)
"""Capacities of the curve, as shares of what reuses all that can be reused."""
_TYPICAL_PROMPT = 4096

app = new_app()


@dataclass(frozen=True, slots=True)
class AnalyzeOptions(RecordingOptions):
    """The options of `prefixwatch analyze`."""

    traffic: Annotated[str, typer.Argument(help="A scenario, or a recording of any known format.")]
    seed: Annotated[int, load_option(help="Seed of a scenario's traffic.")] = 1
    model_dir: Annotated[
        Path | None, target_option(help="Folder with the model's tokenizer; default: the built-in tiny model's.")
    ] = None
    against: Annotated[
        Path | None,
        target_option(
            help="Folder of the model's previous tokenizer and template: exit code 1 if the new one reuses less."
        ),
    ] = None
    tolerance: Annotated[
        float, target_option(min=0, help="With --against: ignore a loss of fewer percentage points.")
    ] = 0.5
    profile: Annotated[str, target_option(help="Hardware for GPU seconds: a shipped profile or a file (*.yaml).")] = (
        DEFAULT_PROFILE
    )
    block_size: Annotated[int, target_option(min=1, help="Tokens per KV block; a trace has its own.")] = 16
    html: Annotated[Path | None, output_option(help="Also write the analysis to this HTML file.")] = None
    as_json: JsonFlag = False


def run_analyze(options: AnalyzeOptions, console: Console) -> tuple[dict[str, Any], int]:
    """Analyse and print; returns the figures and the exit code: 1 if `--against` shows a loss. Raises InputError."""
    seconds_per_token = _seconds_per_token(options.profile)
    tokenizer = Tokenizer(options.model_dir or default_model_dir())
    traffic = _traffic(options, tokenizer)
    found = analyze(traffic.seen, traffic.block_size, tokenizer.decode)
    if not traffic.shares_known:
        found = replace(found, reuse_known=False)
    diagnosis = _diagnosis(traffic, tokenizer)
    points = _curve(traffic, found)
    shown = list(tables(found, diagnosis, points, seconds_per_token)) if found.reuse_known else []
    compared = _against(options, found) if options.against is not None else None
    sentences = [*_sentences(found), *([_loss_sentence(compared, options)] if compared else []), *traffic.notes]
    for sentence in sentences:
        console.print(sentence, highlight=False, soft_wrap=True)
    for table in shown:
        _print(table, console)
    if options.html is not None:
        write_text(options.html, page(options.traffic, sentences, shown, points, _again(options)), "--html")
        console.print(f"Page: {options.html}", highlight=False, soft_wrap=True)
    result = {
        "traffic": options.traffic,
        **found.as_json(),
        "curve": points,
        "diagnosis": None if diagnosis is None else _diagnosis_json(diagnosis, seconds_per_token),
        "against": compared,
        "notes": traffic.notes,
    }
    return result, 1 if compared is not None and compared["lost_points"] > options.tolerance else 0


def _traffic(options: AnalyzeOptions, tokenizer: Tokenizer) -> Traffic:
    if is_scenario(options.traffic, shipped_scenarios()):
        refuse_for_scenario(options.traffic, replace(options, limit=None))
        return of_scenario(options.traffic, tokenizer, options.block_size, seed=options.seed, limit=options.limit)
    return of_recording(options.read(Path(options.traffic)), tokenizer, options.block_size)


def _seconds_per_token(name: str) -> float:
    try:
        return profile(name).step_time.prefill_s(_TYPICAL_PROMPT) / _TYPICAL_PROMPT
    except StepTimeError as error:
        raise UsageError(f"--profile: {error}") from error


def _diagnosis(traffic: Traffic, tokenizer: Tokenizer) -> Diagnosis | None:
    if not traffic.sent:
        return None
    try:
        return diagnose(traffic.sent, lambda prompt: encoded(prompt, tokenizer), traffic.block_size)
    except TokenizerError as error:
        raise UsageError(f"the model's chat template refuses a mended prompt: {error}") from error


def _curve(traffic: Traffic, found: TrafficAnalysis) -> list[dict[str, float | int | None]]:
    enough = found.profile.capacity_for(1.0)
    if enough is None:
        return []
    capacities = sorted({max(1, int(np.ceil(enough * share))) for share in CURVE_SHARES})
    return curve([prompt.blocks for prompt in traffic.seen], capacities, found.profile.hit_ratio)


def _against(options: AnalyzeOptions, new: TrafficAnalysis) -> dict[str, Any]:
    """Reuse with the previous tokenizer and template beside that of the new one."""
    assert options.against is not None
    tokenizer = Tokenizer(options.against)
    traffic = _traffic(options, tokenizer)
    if not traffic.sent:
        raise UsageError(f"--against: {options.traffic} has no texts, so that no tokenizer changes anything")
    old = analyze(traffic.seen, traffic.block_size, tokenizer.decode)
    before, after = _ratio(old) or 0.0, _ratio(new) or 0.0
    return {
        "model_dir": str(options.against),
        "hit_ratio": before,
        "prompt_tokens": old.prompt_tokens,
        "lost_points": 100 * (before - after),
    }


def _loss_sentence(compared: dict[str, Any], options: AnalyzeOptions) -> str:
    lost = compared["lost_points"]
    what = "loses reuse" if lost > options.tolerance else "loses no reuse"
    return (
        f"Against {compared['model_dir']}: the new tokenizer and template {what}. {percent(compared['hit_ratio'])} of "
        f"{number(compared['prompt_tokens'])} prompt tokens could hit there; now it is {abs(lost):.1f} points "
        f"{'less' if lost > 0 else 'more'}."
    )


def _ratio(found: TrafficAnalysis) -> float | None:
    return found.hit_tokens / found.prompt_tokens if found.prompt_tokens else None


def _diagnosis_json(diagnosis: Diagnosis, seconds_per_token: float) -> dict[str, Any]:
    return {
        **asdict(diagnosis),
        "causes": [
            {**asdict(cause), "gpu_seconds": cause.lost_tokens * seconds_per_token} for cause in diagnosis.causes
        ],
    }


def _again(options: AnalyzeOptions) -> dict[str, Any]:
    return {"traffic": options.traffic, "model_dir": str(options.model_dir or "built-in"), **options.chosen()}


def _sentences(found: TrafficAnalysis) -> Iterator[str]:
    rate = "" if not found.seconds else f", {number(found.requests / found.seconds)} req/s"
    yield f"{found.requests} requests of {found.sessions} sessions{rate}, {number(found.prompt_tokens)} prompt tokens."
    if not found.reuse_known:
        return
    yield (
        f"Could hit in a cache without limit: {percent(_ratio(found))} of them; {percent(_share(found))} of that "
        f"within the session."
    )
    yield from _what_breaks_it(found)
    if found.curve:
        enough = found.profile.capacity_for(0.9) or 0
        yield f"Nine tenths of that need {enough:,} blocks in one cache ({enough * found.block_size:,} tokens)."


def _share(found: TrafficAnalysis) -> float | None:
    return found.hit_tokens_in_session / found.hit_tokens if found.hit_tokens else None


def _what_breaks_it(found: TrafficAnalysis) -> Iterator[str]:
    if found.lost_tokens is None:
        yield "What breaks reuse is unknown: the recording has no texts."
        return
    share = found.lost_tokens / found.prompt_tokens if found.prompt_tokens else None
    yield f"Came again behind a difference, where no prefix cache can reuse it: about {percent(share)} of the prompts."
    for point in found.parting_points:
        lost = percent(point.lost_tokens / found.prompt_tokens)
        yield f"  token {point.at_token}: {point.requests} requests, {lost} lost, at {point.text!r}"


def _print(shown: ShownTable, console: Console) -> None:
    table = Table(title=shown.title, caption=shown.note or None)
    for position, name in enumerate(shown.header):
        wide = name in ("cause", "remedy", "begins", "tenant")
        table.add_column(name, justify="left" if wide else "right", overflow="fold", no_wrap=position > 0 and not wide)
    for row in shown.rows:
        table.add_row(*row)
    console.print(table)


@command(app, "analyze")
def analyze_command(options: AnalyzeOptions) -> None:
    """Show what a prefix cache could reuse of some traffic, what breaks reuse and what mending it gives, and how much
    cache it takes.

    Example: `prefixwatch analyze requests.jsonl --model-dir ./Qwen3-8B`

    Example: `prefixwatch analyze dynamic-first --html reuse.html`

    Example: `prefixwatch analyze requests.jsonl --model-dir ./new --against ./old`
    """
    finish(*run_analyze(options, plain_console(stderr=options.as_json)), as_json=options.as_json)
