"""Structured log lines: one event a line, its details as fields. Secrets are never among the fields."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

LogFormat = Literal["logfmt", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:+*@,%")


class FieldsFormatter(logging.Formatter):
    """`ts`, `level`, `logger`, `msg`, then what the record was given as `extra`."""

    def __init__(self, form: LogFormat) -> None:
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        fields |= {name: value for name, value in vars(record).items() if name not in _OWN_FIELDS}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if self._form == "json":
            return json.dumps(fields, default=str, ensure_ascii=False)
        return " ".join(f"{name}={_logfmt(value)}" for name, value in fields.items())


def log_to(stream: TextIO = sys.stderr, form: LogFormat = "logfmt", level: LogLevel = "info") -> None:
    """Send this process's log there from now on."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(FieldsFormatter(form))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


def _logfmt(value: object) -> str:
    text = str(value)
    return text if text and set(text) <= _BARE else json.dumps(text, ensure_ascii=False)
