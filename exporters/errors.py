"""The exporter's one error for input that a user can correct."""

from __future__ import annotations

from prefixwatch.documents.errors import InputError


class ExporterError(InputError):
    """Wrong input. The message names the file, field or target, and the remedy."""
