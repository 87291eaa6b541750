"""The logs of every process: one line per record on stderr, for people or as JSON.

Owns the two formats, the fields that a record may carry, and the rule which records are shown.
Knows no role. Called by each process at its start; the supervisor passes the lines on.
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

LogFormat = Literal["text", "json"]

FORMAT_VARIABLE = "TOPSPIN_LOG_FORMAT"
LEVEL_VARIABLE = "TOPSPIN_LOG_LEVEL"

# The logger of single requests' lives inside the engine. A person reads the access log, which has a
# line per request; a program that collects logs also gets these.
REQUESTS = "requests"

_JSON_START = '{"time":'


def start_logging(role: str) -> logging.Logger:
    """Send log records to stderr, one line each; returns the role's logger.

    TOPSPIN_LOG_FORMAT is text or json, TOPSPIN_LOG_LEVEL a level of Python's logging.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(role) if shows_json() else TextLines())
    level = os.environ.get(LEVEL_VARIABLE, "INFO")
    logging.basicConfig(handlers=[handler], level=level)
    if level == "INFO" and not shows_json():
        logging.getLogger(REQUESTS).setLevel(logging.WARNING)
    return logging.getLogger(role)


def shows_json() -> bool:
    """Return whether this process logs JSON."""
    return os.environ.get(FORMAT_VARIABLE) == "json"


def about(**fields: object) -> dict[str, Any]:
    """Return logging's `extra` with these fields; those that are None are left out."""
    return {"fields": {name: value for name, value in fields.items() if value is not None}}


def is_json(line: str) -> bool:
    """Return whether `line` is one of JsonLines."""
    return line.startswith(_JSON_START)


def json_line(role: str, message: str) -> str:
    """Return a line as JsonLines makes it, of text that is no record."""
    return JsonLines(role).format(logging.makeLogRecord({"levelname": "INFO", "msg": message}))


class TextLines(logging.Formatter):
    """Time, level and message, then each field as `name=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line, without a traceback."""
        fields = _fields(record)
        return super().formatMessage(record) + "".join(f" {k}={v}" for k, v in fields.items())


class JsonLines(logging.Formatter):
    """One JSON object per record: time (UTC), level, role, message, then the fields."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        found: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "role": self._role,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(found).decode()


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "fields", {})
    return fields
