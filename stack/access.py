"""How a Prometheus or an exporter behind a gateway is asked: headers with secrets, and certificates."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from loadgen.secret_headers import filled_in, literal_secret
from stack.errors import UsageError


@dataclass(frozen=True, slots=True)
class Access:
    """What every question is sent with."""

    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
    """None: the system's certificates."""


def access(headers: Sequence[str], ca_file: Path | None) -> Access:
    """From `--header 'Name: value'` and `--ca-file`. Raises UsageError and SecretError."""
    named = dict(_header(text) for text in headers)
    secret = literal_secret(named)
    if secret is not None:
        raise UsageError(
            f"--header {secret}: a secret on the command line is seen by every process: put it into an environment "
            f"variable and write '{secret}: Bearer ${{TOKEN}}', in single quotes"
        )
    if ca_file is None:
        return Access(filled_in(named))
    try:
        return Access(filled_in(named), ssl.create_default_context(cafile=str(ca_file)))
    except OSError as error:  # SSLError is one
        raise UsageError(f"--ca-file {ca_file}: no certificates can be read from it ({error})") from error


def check_address(option: str, url: str | None) -> None:
    """Raises UsageError for what is no address, or has a password in it, which would stand in every report."""
    if url is None:
        return
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{option} {url}: give it as http://HOST:PORT")
    if urlsplit(url).username is not None:
        raise UsageError(
            f"{option}: a password in the address would stand in every report: give the address alone, and "
            "--header 'Authorization: Basic ${LOGIN}' with the name of an environment variable"
        )


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not value.strip():
        raise UsageError(f"--header {name.strip()}: write it as 'Name: value'")
    return name.strip(), value.strip()
