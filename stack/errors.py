"""What counts as the user's input or environment being wrong: one message, exit code 2."""

from __future__ import annotations

from documents import DocumentError
from engines.errors import EngineError
from exporters.errors import ExporterError
from kvcache.tokenizer import TokenizerError
from router.errors import RouterError
from stack.trace import TraceError


class UsageError(Exception):
    """Options that don't go together, or that name what doesn't exist."""


INPUT_ERRORS = (
    DocumentError,
    EngineError,
    ExporterError,
    RouterError,
    TokenizerError,
    TraceError,
    UsageError,
)
