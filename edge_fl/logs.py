"""Logs: JSON, one object per line on stderr with run, round and device; a limit of lines per sender; lines of many; failures that repeat.

A process works on one run at a time, so run and round are set once per process (`set_context`); the device is given per record:
`log.warning(..., extra={"device": id})`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from edge_fl import threads
from edge_fl.errors import EdgeFLError, encodable

FORMAT = "EDGE_FL_LOG_FORMAT"  # an environment variable, inherited by child processes
_context: dict[str, Any] = {}
AT_ONCE = 10  # lines
EVERY_S = 20.0  # one more line
GROUP_S = 1.0  # a line of many devices waits for those of the others
MAX_SENDERS = 10_000  # a client may invent names without end: all beyond this number share one limit
OTHERS = ""


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


@dataclass(slots=True)
class _Usage:
    """How many lines a sender may still cause, when that was, and how many were left out since its last one."""

    lines: float
    at_s: float
    left_out: int = 0


class LogLimit:
    """Write lines about senders, such as devices. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, _Usage] = {}
        self._tidied_s = clock()
        self._lock = threading.Lock()

    def write(
        self,
        log: logging.Logger,
        level: int,
        sender: str,
        text: str,
        *arguments: object,
        exc_info: bool = False,
    ) -> None:
        """Log a line about a sender, with its name as `device` of the record, or count it as left out."""
        if not log.isEnabledFor(level):
            return
        left_out = self._left_out(sender)
        if left_out is None:
            return
        if left_out:
            text, arguments = (
                f"{text} (%s more lines of %s were left out)",
                (*arguments, f"{left_out:,}", sender or "others"),
            )
        log.log(level, text, *arguments, exc_info=exc_info, extra={"device": sender}, stacklevel=2)

    def _left_out(self, sender: str) -> int | None:
        """The number of lines to name as left out in a line that is written; None if this one is left out, too."""
        with self._lock:
            now_s = self._clock()
            if sender not in self._usage and len(self._usage) >= MAX_SENDERS:
                self._tidy(now_s)
                sender = sender if len(self._usage) < MAX_SENDERS else OTHERS
            usage = self._usage.setdefault(sender, _Usage(AT_ONCE, now_s))
            usage.lines = min(usage.lines + (now_s - usage.at_s) / EVERY_S, AT_ONCE)
            usage.at_s = now_s
            if usage.lines < 1:
                usage.left_out += 1
                return None
            usage.lines -= 1
            left_out, usage.left_out = usage.left_out, 0
            return left_out

    def _tidy(self, now_s: float) -> None:
        """Forget senders that have been silent for long enough to have all their lines again; at most once in EVERY_S."""
        if now_s - self._tidied_s >= EVERY_S:
            self._tidied_s, silent_s = now_s, AT_ONCE * EVERY_S
            self._usage = {
                name: usage for name, usage in self._usage.items() if now_s - usage.at_s < silent_s
            }


class GroupedLines(logging.Handler):
    """Writes lines of many devices on stderr: equal ones of GROUP_S are one line, with the first device and the number of all."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[str, list[str]] = {}
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line until GROUP_S after the first of those that wait."""
        who, _, what = encodable(self.format(record)).partition(": ")
        self._waiting.setdefault(what, []).append(who)  # under the handler's lock
        if self._timer is None:
            self._timer = threads.later(GROUP_S, self.flush, "edge-fl-grouped-lines")

    def flush(self) -> None:
        """Write what waits."""
        with self.lock or nullcontext():
            lines, self._waiting = self._waiting, {}
            if self._timer:
                self._timer.cancel()
            self._timer = None
        for what, names in lines.items():
            others = len({*names}) - 1
            who = f"{names[0]} and {others:,} more" if others else names[0]
            with suppress(OSError, ValueError):  # ValueError: stderr was closed at the end of the process
                sys.stderr.write(f"{who}: {what}\n" if what else f"{who}\n")


class Outage:
    """The failures of one part of a service, which tries again. Not thread-safe."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log, self._what = log, what
        self._failing = False

    @contextmanager
    def logged(self, consequence: str = "trying again") -> Iterator[None]:
        """Log an EdgeFLError of the block, unless the last one failed too, and the first block afterwards that does not."""
        try:
            yield
        except EdgeFLError as error:
            if not self._failing:
                self._log.warning("%s: %s; %s", self._what, error.message, consequence)
            self._failing = True
        else:
            if self._failing:
                self._log.warning("%s: works again", self._what)
            self._failing = False
