"""The exporter's one error for input that a user can correct."""

from __future__ import annotations


class ExporterError(Exception):
    """Wrong input. The message names the file, field or target, and the remedy."""
