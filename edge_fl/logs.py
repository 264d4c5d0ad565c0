"""JSON logs: one object per line on stderr, with run, round and device.

A process works on one run at a time, so run and round are set once per process (`set_context`); the device is given per record:
`log.warning(..., extra={"device": id})`.
"""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from edge_fl.errors import encodable

FORMAT = "EDGE_FL_LOG_FORMAT"  # an environment variable, inherited by child processes
_context: dict[str, Any] = {}


class LogFormat(StrEnum):
    """Log format of a process."""

    TEXT = "text"
    JSON = "json"


class JsonLines(logging.Formatter):
    """Format a record as one line of JSON; unknown fields are left out."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": encodable(record.getMessage()),
            **_context,
        }
        if device := getattr(record, "device", ""):
            line["device"] = device
        if record.exc_info:
            line["traceback"] = encodable(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(format: LogFormat, level: int = logging.INFO) -> None:
    """Log as JSON lines from now on, in this process and its children; TEXT changes nothing."""
    if format is LogFormat.TEXT:
        return
    os.environ[FORMAT] = format.value
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def is_json() -> bool:
    """Whether this process logs JSON."""
    return os.environ.get(FORMAT) == LogFormat.JSON.value


def set_context(**fields: Any) -> None:
    """Add fields to every following line; None removes a field."""
    for name, value in fields.items():
        if value is None:
            _context.pop(name, None)
        else:
            _context[name] = value
