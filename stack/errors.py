"""Errors of the command line itself."""

from __future__ import annotations

from prefixwatch.documents.errors import InputError


class UsageError(InputError):
    """Options that don't go together, or that name something that doesn't exist."""
