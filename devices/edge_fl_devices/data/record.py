"""The last count of a device's data, or why it failed, in FOLDER/data.json: for `device status`, and to notice a class that disappeared."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_fl.errors import DeadlineError, KilledError
from edge_fl.failures import Failure
from edge_fl.files import atomic
from edge_fl_devices.data.report import NOTHING, DataReport
from edge_fl_devices.data.spec import DataSpec
from edge_fl_devices.storage import read_json

FILE = "data.json"


class DataRecord(Struct, frozen=True):
    """The report of the last count that succeeded. `why`: failure word of the last count, `problem`: its message; "" if it succeeded."""

    report: DataReport = NOTHING
    why: str = ""
    problem: str = ""


def read(folder: Path) -> DataRecord:
    """Return the record; an empty one if there is none."""
    return read_json(folder / FILE, DataRecord) or DataRecord()


def remember(folder: Path, report: DataReport, spec: DataSpec) -> DataReport:
    """Store the report; return it with the classes of `spec` that had images before and have none now."""
    before = read(folder).report
    gone = {*before.disappeared, *before.with_images} - report.with_images
    for wanted in (spec.classes, spec.only):
        gone &= {*wanted} if wanted else gone
    report = replace(report, disappeared=tuple(sorted(gone)))
    _write(folder, DataRecord(report))
    return report


def remember_problem(folder: Path, why: str, problem: str) -> None:
    """Store why the data could not be used; the last count remains."""
    _write(folder, msgspec.structs.replace(read(folder), why=why, problem=problem))


def failure_word(error: Exception) -> Failure:
    """Return the failure word of an inspection that failed: not because of the data, for which the child has words of its own."""
    match error:
        case MemoryError():
            return Failure.OUT_OF_MEMORY
        case DeadlineError():
            return Failure.DEADLINE
        case KilledError():
            return Failure.KILLED
    return Failure.ERROR


@contextmanager
def noting_deaths(folder: Path) -> Iterator[None]:
    """Store the message of a KilledError for `device status`."""
    try:
        yield
    except KilledError as error:
        remember_problem(folder, Failure.KILLED, error.message)
        raise


def _write(folder: Path, record: DataRecord) -> None:
    if record != read(folder):
        with suppress(OSError):  # no folder yet, or a full disk: only the status misses it
            atomic.write(folder / FILE, msgspec.json.encode(record))
