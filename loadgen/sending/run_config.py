"""The configuration of one run: the JSON file of `python -m prefixwatch.loadgen.run --config FILE`."""

from __future__ import annotations

import secrets
from pathlib import Path

from pydantic import Field, ValidationError

from prefixwatch.documents.addresses import host_and_port
from prefixwatch.documents.errors import InputError
from prefixwatch.documents.section import Section

_MASTER_PORT = 5557
"""Locust's own."""


class RunConfig(Section):
    """One run: one scenario, sent once to one target."""

    target: str = Field(description="base URL of the router or engine, http://host:port")
    scenario: str = Field(default="shared-prefix", description="a shipped scenario's name or a file")
    model_dir: Path | None = Field(
        default=None,
        description="folder with the model's tokenizer.json and tokenizer_config.json; default: an engine's "
        "/tokenize is asked",
    )
    tokenize_url: str = Field(
        default="", description="the engine whose /tokenize is asked without model_dir; default: the target"
    )
    approximate_prompts: bool = Field(
        default=False, description="make prompts of about the right length without the model's tokenizer"
    )
    model: str = Field(description="model name that requests ask for")
    seed: int = Field(default=0, ge=0, description="decides times, lengths, groups and tenants")
    nonce: str = Field(
        default_factory=lambda: secrets.token_hex(8),
        min_length=1,
        description="keeps this run's prompts apart from every other run's; random if left out",
    )
    policy: str = Field(default="", description="label: the routing policy that is measured")
    repeat: int = Field(default=0, ge=0, description="label: which repeat this is")
    out: Path | None = Field(default=None, description="folder for requests.parquet and run.json")
    tenant_header: str = Field(default="x-tenant-id", description="header that carries the tenant's name")
    session_header: str = Field(default="x-session-id", description="header that carries the session's id")
    session_suffix: str | None = Field(
        default=None,
        description="ends every session id that is sent, so that no fleet takes those of two runs for the same; "
        "default: the nonce; empty: ids as planned",
    )
    headers: dict[str, str] = Field(default={}, description="more headers for every request")
    api_key_env: str = Field(
        default="",
        description="environment variable with the target's API key, sent as bearer token and written nowhere",
    )
    lag_limit_ms: float = Field(
        default=20.0,
        gt=0,
        description="p99 of the client's event loop lag above which a run is invalid: 5 % of the tightest objective",
    )
    processes: int = Field(default=1, ge=1, description="number of processes that send the plan; this one leads them")
    locust_master: str = Field(
        default="",
        description="HOST[:PORT] of this machine, where that number of Locust workers of other machines connects; "
        "default: processes of this machine are started",
    )
    drain_seconds: float | None = Field(
        default=None, ge=0, description="wait for answers after the last send; default: the scenario's total time-out"
    )

    @property
    def sent_session_suffix(self) -> str:
        return self.nonce if self.session_suffix is None else self.session_suffix

    @property
    def in_one_process(self) -> bool:
        return self.processes == 1 and not self.locust_master


def load_run_config(path: Path) -> RunConfig:
    """Read a run's configuration. Raises InputError."""
    try:
        return RunConfig.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror}): give the run's JSON configuration") from error
    except ValidationError as error:
        lines = [f"{path}: {'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors()]
        raise InputError("\n".join(lines) + f"\nfields are {', '.join(RunConfig.model_fields)}") from error


def master_address(given: str) -> tuple[str, int]:
    """Where Locust's master listens: on a free port of this machine alone, if nothing is given. Raises InputError."""
    if not given:
        return "127.0.0.1", 0
    try:
        host, port = host_and_port(given, _MASTER_PORT)
    except ValueError:
        port = 0
    if not port:
        raise InputError(f"locust_master {given}: write it as HOST or HOST:PORT")
    return host, port
