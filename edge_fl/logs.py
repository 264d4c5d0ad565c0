"""Logs for machines: one JSON object per line on stderr, with the run, the round and the device that a line is about.

A process works on one run at a time, so run and round are the process's (`about`); the device comes with the line, as
`log.warning(..., extra={"device": id})`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

FORMAT = "EDGE_FL_LOG_FORMAT"  # an environment variable, so that child processes log alike
_about: dict[str, Any] = {}


class LogFormat(StrEnum):
    """How a process tells what it does."""

    TEXT = "text"
    JSON = "json"


class JsonLines(logging.Formatter):
    """One record as one line of JSON; what is not known is left out."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
            **_about,
        }
        if device := getattr(record, "device", ""):
            line["device"] = device
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up(format: LogFormat, level: int = logging.INFO) -> None:
    """JSON lines from now on, in this process and its children; with TEXT nothing changes."""
    if format is LogFormat.TEXT:
        return
    os.environ[FORMAT] = format.value
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def is_json() -> bool:
    """Whether this process tells what it does in JSON."""
    return os.environ.get(FORMAT) == LogFormat.JSON.value


def about(**fields: Any) -> None:
    """What every line is about from now on; None takes a field away."""
    for name, value in fields.items():
        if value is None:
            _about.pop(name, None)
        else:
            _about[name] = value
