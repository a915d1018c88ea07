"""How a Prometheus or an exporter is asked: headers with secrets, certificates, and one JSON document."""

from __future__ import annotations

import base64
import json
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

from prefixwatch.exporters.http.redact import shown_url
from prefixwatch.loadgen.scenario.secrets import filled_in, literal_secret
from prefixwatch.stack.errors import UsageError

_GAP = re.compile(r"[\s\x00-\x1f]")


@dataclass(frozen=True, slots=True)
class Access:
    """What every question is sent with."""

    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
    """None: the system's certificates."""


def access(headers: Sequence[str], ca_file: Path | None) -> Access:
    """From `--header 'Name: value'` and `--ca-file`. Raises InputError."""
    named = dict(_header(text) for text in headers)
    secret = literal_secret(named)
    if secret is not None:
        raise UsageError(
            f"--header {secret}: a secret on the command line is seen by every process: put it into an environment "
            f"variable and write '{secret}: Bearer ${{TOKEN}}', in single quotes"
        )
    return Access(filled_in(named), trusted(ca_file))


def trusted(ca_file: Path | None) -> ssl.SSLContext | None:
    """From `--ca-file`; None: the system's certificates. Raises UsageError."""
    if ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except OSError as error:  # SSLError is one
        raise UsageError(f"--ca-file {ca_file}: no certificates can be read from it ({error})") from error


def check_address(option: str, url: str | None, *, logins: bool = False) -> None:
    """Raises UsageError for an invalid address, or, without `logins`, one with a password, which would appear in every
    report."""
    if url is not None and has_login(option, url) and not logins:
        raise UsageError(
            f"{option}: a password in the address would appear in every report: give the address alone, and "
            "--header 'Authorization: Basic ${LOGIN}' with the name of an environment variable"
        )


def has_login(option: str, url: str) -> bool:
    """Whether the address has a user's name in it. Raises UsageError where it isn't an address."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not _GAP.search(url)
    except ValueError:  # such as a port above 65,535
        usable = False
    if not usable:
        raise UsageError(f"{option} {url}: give it as http://HOST:PORT")
    return parts.username is not None


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not value.strip():
        raise UsageError(f"--header {name.strip()}: write it as 'Name: value'")
    return name.strip(), value.strip()


def read_json(url: str, option: str, *, timeout_seconds: float = 10.0) -> dict[str, Any]:
    """The JSON object at an http(s) address, which may have a user and a password. Raises UsageError naming `option`
    and the address, without these and without its query."""
    shown = shown_url(url).partition("?")[0]
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{option}: '{shown.rpartition('@')[2]}' is not an http(s) URL")
    headers = {"Accept": "application/json"}
    try:
        parts = urlsplit(url)
        login, _, place = parts.netloc.rpartition("@")
        if login:
            login += "" if ":" in login else ":"
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        request = Request(urlunsplit(parts._replace(netloc=place)), headers=headers)
        with urlopen(request, timeout=timeout_seconds) as answer:
            document = json.load(answer)
    except HTTPError as error:
        raise UsageError(f"{option}: {shown} answers {error.code}; is that its URL?") from error
    except (HTTPException, OSError, ValueError) as error:  # URLError is an OSError
        reason = str(getattr(error, "reason", None) or error).strip()
        raise UsageError(f"{option}: {shown}: {reason}; is it running, and is that its URL?") from error
    if not isinstance(document, dict):
        raise UsageError(f"{option}: {shown}: the answer is not a JSON object")
    return document
