"""The agent's log on its own disk: a ring of two small files, from which lines are sent on request.

    FOLDER/log.jsonl, log.jsonl.1     `edge_fl.wire.messages.LogLine` as JSON, at most 128 KiB each

A line is written as it may leave the device (`public_text`): no text of an error about the owner's settings or data, no path below the data
folder, and of an unexpected error only its type and place. Lines logged with `extra=LOCAL` are about the owner's data and lose their text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from logging.handlers import RotatingFileHandler
from pathlib import Path
from traceback import extract_tb
from typing import cast

import msgspec
from msgspec import Struct

from edge_fl.errors import EdgeFLError, InputError, encodable
from edge_fl.files import paths
from edge_fl.untrusted import NOT_JSON
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.messages import DeviceState, Log, LogLevel, LogLine, Logs, Query
from edge_fl_devices.config import DeviceConfig

FILE = "log.jsonl"
FILE_BYTES, FILES = 128 * 1024, 2
MAX_TEXT = 500  # characters
REPEATED_S = 600.0
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
LOGGERS = ("edge_fl", "edge_fl_devices")
LOCAL = {"local": True}
"""`extra` of a log call whose text names files or folders of the owner: only the fact leaves the device."""

log = logging.getLogger(__name__)


class LogFile(RotatingFileHandler):
    """Appends lines to the ring. `private`: paths that must not be in a line. A line that repeats the last one is skipped for a while."""

    def __init__(self, folder: Path, device: str, private: tuple[str, ...] = ()) -> None:
        super().__init__(
            folder / FILE, maxBytes=FILE_BYTES, backupCount=FILES - 1, encoding="utf-8", delay=True
        )
        self._folder, self._prefix, self._private = folder, f"{device}: ", private
        self._last, self._last_s = ("", ""), 0.0

    def emit(self, record: logging.LogRecord) -> None:
        level = next((name for name in reversed(LEVELS) if record.levelno >= LEVELS[name]), "debug")
        text = encodable(public_text(record, self._private)).removeprefix(self._prefix)[:MAX_TEXT]
        if (level, text) == self._last and 0 <= record.created - self._last_s < REPEATED_S:
            return
        self._last, self._last_s = (level, text), record.created
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = msgspec.json.encode(LogLine(at, cast(LogLevel, level), text)).decode()
        super().emit(logging.makeLogRecord({"msg": line}))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Drop the line: a full or read-only disk must not stop the agent."""

    def lines(self) -> Iterator[LogLine]:
        """All lines, the oldest first; damaged ones are left out."""
        for path in (self._folder / f"{FILE}.1", self._folder / FILE):
            with suppress(OSError):
                for line in path.read_bytes().splitlines():
                    with suppress(*NOT_JSON):
                        yield msgspec.json.decode(line, type=LogLine)

    def matching(self, query: Query) -> Logs:
        """The newest lines that a query asks for, up to its size."""
        now, found, bytes = datetime.now(UTC), list[LogLine](), len(msgspec.json.encode(Logs([], 2**40)))
        after = (now - timedelta(seconds=query.since_s)).isoformat() if query.since_s else ""
        before = (now - timedelta(seconds=query.until_s)).isoformat() if query.until_s else "~"
        lines = [
            line
            for line in self.lines()
            if LEVELS[line.level] >= LEVELS[query.level] and after <= line.at <= before
        ]
        for line in reversed(lines):
            if (bytes := bytes + len(msgspec.json.encode(line)) + 1) > query.max_bytes:
                break
            found.append(line)
        return Logs(found[::-1], len(lines) - len(found))


def public_text(record: logging.LogRecord, private: tuple[str, ...] = ()) -> str:
    """The text of a log record as it may leave the device, in one line."""
    if getattr(record, "local", False):
        return f"{record.module}: about the device's own data; the text stays on the device"
    arguments = record.args if isinstance(record.args, tuple) else ()
    try:
        text = str(record.msg) % tuple(_public(argument) for argument in arguments)
    except (TypeError, ValueError):
        text = str(record.msg)
    if record.exc_info and (error := record.exc_info[1]):
        place = next(
            (
                f" in {paths.text(Path(f.filename).name)}:{f.lineno}"
                for f in extract_tb(error.__traceback__)[-1:]
            ),
            "",
        )
        text += f" ({type(error).__name__}{place})"
    for path in private:
        text = text.partition(path)[0] + "(a path of the owner)" if path in text else text
    return " ".join(text.split())


def _public(argument: object) -> object:
    """An argument of a log call without what people wrote into settings or called their files."""
    match argument:
        case EdgeFLError() if not isinstance(argument, InputError):
            return str(argument)
        case OSError():
            return f"{type(argument).__name__}: {argument.strerror}"
        case BaseException():
            return type(argument).__name__
        case str() | int() | float() | Endpoint():
            return argument
    return type(argument).__name__


def private_paths(config: DeviceConfig) -> tuple[str, ...]:
    """Paths and addresses in the settings that say something about the owner's data."""
    data = config.data.partition(":")[2] or config.data
    resolved = paths.text(Path(data).resolve()) if config.reads_folder else ""
    source = config.capture.source.partition(":")[2]
    return tuple(
        encodable(path)
        for path in (resolved, data, source, config.capture.source, config.mirror)
        if len(path) > 3
    )


def note(device: str, message: Struct) -> None:
    """Log what a device publishes of its state and its own log."""
    match message:
        case DeviceState():
            serving = f", release {message.release}" if message.release else ""
            why = f" ({message.why})" if message.why else ""
            log.info("%s: %s, %s%s%s", device, message.status, message.activity, serving, why)
        case Log():
            log.log(LEVELS[message.level], "%s: %s", device, message.text)


@contextmanager
def recording(file: LogFile) -> Iterator[None]:
    """Write what the agent logs, from level info, to `file`."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(file)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.removeHandler(file)
            logger.setLevel(level)
        file.close()
