"""The agent's log: what a line may contain, how large the ring grows, and what a query selects."""

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from edge_fl.errors import ArtefactError, ConfigError, DataError
from edge_fl.wire.messages import LogLine, Query
from edge_fl_devices.remote.log_file import FILE, FILE_BYTES, LOCAL, LogFile, public_text, recording

SECRET = "/srv/anna/beach.jpg"
log = logging.getLogger("edge_fl_devices.test")


def record(text: str, *arguments: object, **fields: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "edge_fl_devices.x", "module": "x", "msg": text, "args": arguments})
    made.__dict__.update(fields)
    return made


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (record("%s: round %d", "pi-01", 3), "pi-01: round 3"),
        (record("no_data: %s", DataError(f"{SECRET}: damaged")), "no_data: DataError"),
        (record("%s", ConfigError(f"data = {SECRET!r}")), "ConfigError"),
        (record("%s", OSError(2, "No such file", SECRET)), "FileNotFoundError: No such file"),
        (record("%s", ValueError(SECRET)), "ValueError"),
        (record("%s", Path(SECRET)), "PosixPath"),
        (record("%s", ArtefactError("chunk 3: sha256 12ab")), "chunk 3: sha256 12ab; not used"),
        (
            record("%s", "8 files in folder 'anna'", **LOCAL),
            "x: about the device's own data; the text stays on the device",
        ),
        (record("open %s failed: %s", SECRET, "x"), "open (a path of the owner)"),
        (record("two\nlines\x1b %s", "a\tb"), "two lines\x1b a b"),
        (record("100 %"), "100 %"),
    ],
)
def test_what_a_line_says(given: logging.LogRecord, expected: str) -> None:
    assert public_text(given, ("/srv/anna",)) == expected


def test_a_traceback_leaves_only_type_and_place() -> None:
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        given = record("a job failed", exc_info=(type(error), error, error.__traceback__))
    text = public_text(given)
    assert text.startswith("a job failed (ValueError in test_log_file.py:") and SECRET not in text


def test_the_ring_stays_small_and_keeps_the_newest(tmp_path: Path) -> None:
    file = LogFile(tmp_path, "pi-01")
    with recording(file):
        for number in range(4000):
            log.warning("pi-01: line %d %s", number, "x" * 100)
        log.debug("below the level")
    kept = [line.text.split()[1] for line in file.lines()]
    assert kept == [str(number) for number in range(4000 - len(kept), 4000)] and len(kept) > 500
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * FILE_BYTES
    assert max(len(line) for line in (tmp_path / FILE).read_text().splitlines()) < 700


def test_a_repeated_line_is_written_once(tmp_path: Path) -> None:
    file = LogFile(tmp_path, "pi-01")
    with recording(file):
        for _ in range(5):
            log.warning("again")
        log.error("again")
    assert [(line.level, line.text) for line in file.lines()] == [("warning", "again"), ("error", "again")]


def test_a_folder_that_cannot_be_written_does_not_stop_the_agent(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "missing", "pi-01")
    with recording(file):
        log.warning("lost")
    assert list(file.lines()) == []


def test_a_query_selects_by_level_age_and_size(tmp_path: Path) -> None:
    now, file = datetime.now(UTC), LogFile(tmp_path, "pi-01")
    ages = [(7200, "warning"), (3600, "info"), (1800, "error"), (60, "warning")]
    lines = [
        LogLine((now - timedelta(seconds=age)).isoformat(timespec="milliseconds"), level, f"{age}")  # type: ignore[arg-type]
        for age, level in ages
    ]
    (tmp_path / FILE).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines) + b'{"at":')

    def found(**query: object) -> list[str]:
        return [line.text for line in file.matching(Query("q", "logs", **query)).lines]  # type: ignore[arg-type]

    assert found(level="debug") == ["7200", "3600", "1800", "60"]  # without the damaged last line
    assert found(level="warning") == ["7200", "1800", "60"]
    assert found(since_s=4000.0) == ["3600", "1800", "60"]
    assert found(since_s=4000.0, until_s=1000.0) == ["3600", "1800"]
    (tmp_path / FILE).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines * 20))
    few = file.matching(Query("q", "logs", max_bytes=1024))
    assert len(msgspec.json.encode(few)) <= 1024 < len(msgspec.json.encode(few)) + 150
    assert few.left_out == 80 - len(few.lines) and few.lines[-1].text == "60"
