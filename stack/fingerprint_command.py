"""`prefixwatch exporter fingerprint`: how the exporter recognises a prompt's opening, to give it a name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvcache.fingerprint import system_prompt_fingerprint, text_fingerprint
from kvcache.tokenizer import Tokenizer
from stack.errors import UsageError


def fingerprint(
    model_dir: Path,
    system_prompt: Path | None,
    text: Path | None,
    block_size: int,
    salt_env: str | None,
    *,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """The fingerprint of one of the two files. Raises UsageError and TokenizerError."""
    file = system_prompt or text
    if file is None or (system_prompt and text):
        raise UsageError("give one of --system-prompt FILE and --text FILE")
    salt = environment.get(salt_env) if salt_env else None
    if salt_env and not salt:
        raise UsageError(f"--salt-env {salt_env}: there is no such environment variable, or it is empty")
    try:
        opening = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} can't be read: {error}") from error
    of = system_prompt_fingerprint if system_prompt else text_fingerprint
    return asdict(of(Tokenizer(model_dir), opening, block_size, salt))
