"""Headers that hold secrets: named in files by environment variable, filled in when a run is sent, written nowhere.

A scenario, a run's configuration and everything that says how to run it again are copied into the results; a key
that stood in them would be, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.plan.request import Plan

SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "api-key", "x-api-key", "x-auth-token"})
"""Headers that hold nothing but secrets, in lower case."""
_VARIABLE = re.compile(r"\$\{(\w+)\}")


def literal_secret(headers: Mapping[str, str]) -> str | None:
    """The first header of a file that would hold a secret as it stands, rather than the name of a variable."""
    return next((name for name, value in headers.items() if _is_literal(name, value)), None)


def bearer(api_key_env: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The header with the API key that this variable holds; none without a variable's name. Raises InputError."""
    return {"authorization": f"Bearer {_value(api_key_env, environment)}"} if api_key_env else {}


def keys_in(headers: Iterable[Mapping[str, str]]) -> list[str]:
    """The secrets themselves, without a scheme such as `Bearer`, longer ones first."""
    found = {
        value.split()[-1]
        for each in headers
        for name, value in each.items()
        if name.lower() in SECRET_HEADERS and value.strip()
    }
    return sorted(found, key=len, reverse=True)


def without_keys(text: str, keys: Sequence[str]) -> str:
    """A server's message, which may quote the key that it was sent."""
    for key in keys:
        text = text.replace(key, "(API key)")
    return text


def with_secrets(plan: Plan, environment: Mapping[str, str] = os.environ) -> Plan:
    """The plan with `${NAME}` in its requests' headers replaced by that variable's value. Raises InputError."""
    if not any("${" in value for request in plan.requests for value in request.headers.values()):
        return plan
    return replace(
        plan, requests=[replace(each, headers=filled_in(each.headers, environment)) for each in plan.requests]
    )


def _is_literal(name: str, value: str) -> bool:
    return name.lower() in SECRET_HEADERS and not _VARIABLE.search(value)


def filled_in(headers: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """With `${NAME}` replaced by that variable's value. Raises InputError."""

    def value_of(found: re.Match[str]) -> str:
        return _value(found[1], environment)

    # In lower case, so that a tenant's own key takes the place of the run's.
    return {name.lower(): _VARIABLE.sub(value_of, value) for name, value in headers.items()}


def _value(variable: str, environment: Mapping[str, str]) -> str:
    value = environment.get(variable, "").strip()
    if not value:
        raise InputError(f"environment variable {variable} is not set: put the API key into it")
    return value
