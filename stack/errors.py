"""What counts as the user's input or environment being wrong: one message, exit code 2."""

from __future__ import annotations

from alerts.errors import RuleError
from dashboards.errors import DashboardError
from documents import DocumentError
from engines.errors import EngineError
from exporters.errors import ExporterError
from kvcache.tokenizer import TokenizerError
from loadgen.arrivals import ArrivalError
from loadgen.prompts import PromptError
from loadgen.secret_headers import SecretError
from router.errors import RouterError
from runbooks.errors import EvidenceError
from slo.sloth import SlothError
from stack.trace import TraceError


class UsageError(Exception):
    """Options that don't go together, or that name what doesn't exist."""


INPUT_ERRORS = (
    ArrivalError,
    DashboardError,
    DocumentError,
    EngineError,
    EvidenceError,
    ExporterError,
    PromptError,
    RouterError,
    RuleError,
    SecretError,
    SlothError,
    TokenizerError,
    TraceError,
    UsageError,
)
