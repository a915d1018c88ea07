"""Generates the configuration reference from the models: `python -m prefixwatch.stack.config_reference`.

Writes `docs/configuration.md` for people and `stack/config.schema.json` for editors; a test holds both to the models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prefixwatch.documents.reference import Reference
from prefixwatch.engines.simulated.config import SimulatedEngineConfig
from prefixwatch.stack.config import PrefixwatchConfig

ROOM = Path(__file__).resolve().parent
MARKDOWN_FILE = ROOM.parent / "docs" / "configuration.md"
SCHEMA_FILE = ROOM / "config.schema.json"
REFERENCE = Reference(PrefixwatchConfig)
ENGINE_REFERENCE = Reference(SimulatedEngineConfig)

_INTRODUCTION = """\
# Configuration

One YAML file, `prefixwatch.yaml`, configures the local stack, the router and the exporter:

    prefixwatch up --config prefixwatch.yaml
    prefixwatch router --config prefixwatch.yaml          # the engines are in `fleet.targets`
    prefixwatch exporter --config prefixwatch.yaml
    prefixwatch diagnose --preflight --config prefixwatch.yaml
    prefixwatch config check prefixwatch.yaml             # is it valid, and what is set?
    prefixwatch config schema > prefixwatch.schema.json   # the keys as a JSON schema

Every section and every key has a default. An unknown key or a wrong value is refused with file, line and remedy. For
completion in an editor, put `# yaml-language-server: $schema=prefixwatch.schema.json` on the first line. A file is at
most 4 MiB, 64 levels deep and 250,000 values large.

## Examples

An exporter for two vLLM engines behind another router, with KV events and with objectives that each request is counted
by:

```yaml
exporter:
  listen: 0.0.0.0:9477
  targets:
    - {name: engine-0, url: http://10.0.0.7:8000, kv_events: tcp://10.0.0.7:5557, zone: eu-1a}
    - {name: engine-1, url: http://10.0.0.8:8000, kv_events: tcp://10.0.0.8:5557, zone: eu-1b}
slo:
  objectives: [ttft, availability, my-slo.yaml]
pricing:
  gpu_usd_per_hour: 2.5
```

The reference router in front of the same engines, with two tenants that share no blocks:

```yaml
fleet:
  targets:
    - {name: engine-0, url: http://10.0.0.7:8000, kv_events: tcp://10.0.0.7:5557}
    - {name: engine-1, url: http://10.0.0.8:8000, kv_events: tcp://10.0.0.8:5557}
tokenizer:
  model_dir: /models/Qwen3-8B
  block_size: 16
router:
  host: 0.0.0.0
  policy: {name: score}
  cache_view: {source: events}
tenants:
  - {name: acme, salt: change-me-acme}
  - {name: zeta, salt: change-me-zeta}
security:
  hash_secret: at-least-16-characters
```

## Environment variables

Each key can also be set by a variable, which wins over the file: `PREFIXWATCH_`, then the path in capitals with two
underscores between its parts. The value is read as YAML, so a whole section or list can be given:

    PREFIXWATCH_ROUTER__PORT=8100
    PREFIXWATCH_ROUTER__POLICY__NAME=score
    PREFIXWATCH_SECURITY__HASH_SECRET=at-least-16-characters
    PREFIXWATCH_FLEET__TARGETS='[{name: engine-0, url: http://10.0.0.7:8000}]'

An entry of a list has no variable of its own. A variable that sets no known key, or a wrong value, is named in the
error.

A duration is a number of seconds, or a text such as `30s`, `1m30s` or `500ms`.

## Keys

"""
_ENGINE = """
## A simulated engine

`prefixwatch engine --config engine.yaml` runs one engine alone. Its file has these keys; names and meanings are vLLM's
where vLLM has them.

```yaml
model_dir: ./tiny        # made by `prefixwatch engines model ./tiny`
port: 8001
capacity_blocks: 2000
kv_events_endpoint: tcp://127.0.0.1:5557
```

"""


def markdown() -> str:
    """The reference as Markdown."""
    engine = ENGINE_REFERENCE.markdown().replace("### Top level", "### Engine")
    return f"{_INTRODUCTION}{REFERENCE.markdown()}{_ENGINE}{engine}"


def schema() -> dict[str, Any]:
    """The JSON schema of `prefixwatch.yaml`."""
    return PrefixwatchConfig.model_json_schema(by_alias=True)


def write() -> None:
    """Write both files."""
    MARKDOWN_FILE.write_text(markdown(), encoding="utf-8")
    SCHEMA_FILE.write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
    print(f"wrote {MARKDOWN_FILE} and {SCHEMA_FILE}")
