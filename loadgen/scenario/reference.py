"""Generates the scenario reference from the models: `python -m prefixwatch.loadgen.scenario.reference`.

Leaves `docs/scenarios.md` for people and `loadgen/scenario.schema.json` for editors; a test holds both to the models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prefixwatch.documents.reference import Reference
from prefixwatch.loadgen.recordings.formats import FORMATS
from prefixwatch.loadgen.scenario.lengths import Seconds, TokenRange
from prefixwatch.loadgen.scenario.model import SHIPPED_FOLDER, Scenario, load_scenario, shipped_scenarios

ROOM = Path(__file__).resolve().parents[1]
MARKDOWN_FILE = ROOM.parent / "docs" / "scenarios.md"
SCHEMA_FILE = ROOM / "scenario.schema.json"

REFERENCE = Reference(Scenario, {TokenRange: "length", Seconds: "time"})

_INTRODUCTION = """\
# Scenarios

A scenario is a YAML file that says what traffic a run sends and which SLO documents grade it:

    prefixwatch scenarios                     # the shipped ones
    prefixwatch bench my-scenario.yaml        # against engines that it starts, or --target URL
    prefixwatch simulate my-scenario.yaml     # the same prompts in virtual time
    prefixwatch analyze my-scenario.yaml      # what of it a prefix cache could reuse, before any run

Times, lengths and identities depend on the seed alone, so every policy of a repeat gets the same requests. Prompts are
token-exact: texts are made of words that the model's tokenizer keeps as one token each, and what the engine counts is
held against the plan. Each run has words of its own unless `warm: true`, so that no run finds another's prompts in a
cache. A wrong key or value is reported with file, line and remedy.

`loadgen/scenario.schema.json` is the same as a JSON schema: put
`# yaml-language-server: $schema=…/scenario.schema.json` on the first line, and an editor completes and checks the keys.

## A prompt

From its first token on: a changing field (`dynamic_front`), tool schemas (`tools`), the group's prefix (`groups`, one
level or nested), examples (`few_shot`), the user's profile (`sessions.profile_tokens`): these make the system
message, or open the first user message of a model whose chat template has no system role. Then come the turns of the
conversation so far; each user message opens with its retrieved texts (`documents`).

With `tools.sent_as: field` the tools go where agents send them, into the request's field `tools`, and stand where the
chat template renders them: most put them in front of everything, some behind the system prompt or into the last user
message. The plan renders with the model's own template as vLLM does, so it knows their tokens, too. vLLM without a tool
parser takes them with `tool_choice: none` (the default here); SGLang renders them with `auto` only, in an order of keys
of its own, so that the plan's token counts are off there and the report says so.

Earlier answers in later turns are *planned* texts, the same in every run. With `sessions.answers: generated` they are
what the engine answered in this run: such text comes back as other tokens than it was generated as, so it isn't
counted as reusable, and what that costs is in run.json as `retokenization_loss_tokens`.

## Lengths and times

A length is a number of tokens, `{min, max}` (even), `{median, sigma}` with optional bounds (lognormal), or
`{values, weights}` (empirical). A time is a number of seconds, `{min, max}` (even) or `{mean}` (exponential, `min`
added).

## The highest rate, and levels of load

`--search-rate` (in `bench` and `simulate`) doubles or halves the rate until it has one that meets every objective and
one that doesn't, then bisects to within `search.precision_ratio`. A rate is run again, up to `search.repeats` times,
while the 95 % Wilson interval of an objective's good share still holds its target. Exit code 0: found, with
confidence; 1: not even the lowest rate meets the objectives; 3: found as measured, but not with confidence, or without
an upper end, or a run couldn't be believed. `--sweep-rate 5,10,20` and `--sweep-concurrency 1,4,16` run each level
once; the latter are closed loops and say so.

## Recordings

`prefixwatch bench --trace FILE` replays a recording (scenario `replay`), `arrivals: {kind: trace, file: FILE}` takes
only its times. Formats, detected from the content (see [Recordings](recordings.md)):

"""


def markdown() -> str:
    """The reference as Markdown."""
    formats = "".join(f"- `{form.name}`: {form.expects}\n" for form in FORMATS.values())
    shipped = "".join(f"| `{name}` | {load_scenario(name).description.strip()} |\n" for name in shipped_scenarios())
    sections = REFERENCE.markdown()
    return (
        f"{_INTRODUCTION}{formats}\nEqual block ids of a Mooncake trace become equal text; a table's lengths become "
        f"prompts that share nothing; texts and tools are sent as recorded.\n\n## Shipped scenarios\n\n"
        f"| name | shows |\n|---|---|\n{shipped}\n## Keys\n\n{sections}"
    )


def schema() -> dict[str, Any]:
    """The JSON schema of a scenario file."""
    return Scenario.model_json_schema()


def write() -> None:
    """Write both files."""
    MARKDOWN_FILE.write_text(markdown(), encoding="utf-8")
    SCHEMA_FILE.write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
    print(f"wrote {MARKDOWN_FILE} and {SCHEMA_FILE}; shipped scenarios are in {SHIPPED_FOLDER}")
