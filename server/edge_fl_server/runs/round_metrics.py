"""round_metrics.jsonl: a line per round and one for the final personalisation, written and read as the same type; trackers get the values.

A tracker (`--track`) is an entry point of the group `edge_fl.trackers`: a function that returns its `Opener`.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Any, Protocol

import msgspec

from edge_fl import plugins
from edge_fl.errors import ConfigError, RunError, nearest
from edge_fl.files.paths import text
from edge_fl.metrics import Summary
from edge_fl_server.training.records import RoundFigures

FILE = "round_metrics.jsonl"
log = logging.getLogger(__name__)
ENTRY_POINTS = "edge_fl.trackers"
STATISTICS = ("mean", "std", "bottom_decile")
"""The fields of each metric's summary that trackers receive."""


class RoundMetrics(RoundFigures, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One round, or the `final` personalisation after round `round`.

    `rejected` counts rejected reports by reason (`outlier`: updates that arrived but were dropped). `metrics` summarises each metric over
    the clients in `clients`, which holds each client's own values; both are empty in rounds without evaluation. NaN is null in the file.
    `seconds` is wall time, None for the final line.
    """

    final: bool = False
    rejected: Mapping[str, int] = {}
    seconds: float | None = None
    metrics: Mapping[str, Summary] = {}
    clients: Mapping[str, Mapping[str, float]] = {}


class RoundLine(RoundMetrics, frozen=True, kw_only=True):
    """A `RoundMetrics` read from a file, with its line number, counted from 1."""

    line: int


def encode(record: RoundMetrics) -> bytes:
    """The record as one line of JSON, every key written, with a newline."""
    return msgspec.json.encode(record) + b"\n"


def lines(path: Path) -> list[RoundLine]:
    """The complete lines of a file, in order; empty if the file does not exist. A line cut short by a crash is skipped."""
    try:
        texts = path.read_bytes().splitlines()
    except OSError:
        return []
    return [line for number, text in enumerate(texts, 1) if (line := decode(text, number)) is not None]


def decode(text: bytes, number: int) -> RoundLine | None:
    """Line `number` of the file; None if it is not a record."""
    try:
        record = json.loads(text)
        for name in ("metrics", "clients"):
            record[name] = {key: with_nan(values) for key, values in record.get(name, {}).items()}
        return msgspec.convert({**record, "line": number}, RoundLine)
    except (ValueError, TypeError, AttributeError):  # msgspec.ValidationError is a ValueError
        return None


def latest(found: Sequence[RoundLine]) -> list[RoundLine]:
    """One line per round, in order: of a round repeated after a resume the last one."""
    by_round = {(line.round, line.final): line for line in found}
    return [by_round[key] for key in sorted(by_round)]


def with_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values read from JSON, where NaN is null."""
    return {name: nan if value is None else value for name, value in values.items()}


class Tracker(Protocol):
    """An open tracker."""

    def note(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


Opener = Callable[[Path, int | None], Tracker]
"""(the run's folder, the round after which it resumes or None) -> tracker."""


def scalars(record: RoundMetrics) -> dict[str, float]:
    """The finite values of a record by name: `round/seconds`, `personal.test_acc.before/mean`; those of the final line behind `final/`."""
    prefix = "final/" if record.final else ""
    values: dict[str, float | None] = {}
    if not record.final:
        values = {
            "round/selected": len(record.selected),
            "round/responded": len(record.responded),
            "round/seconds": record.seconds,
            "round/bytes_down": record.bytes_down,
            "round/bytes_up": record.bytes_up,
        }
    for metric, summary in record.metrics.items():
        values |= {f"{prefix}{metric}/{field}": getattr(summary, field) for field in STATISTICS}
    return {name: float(value) for name, value in values.items() if value is not None and isfinite(value)}


def find(names: Sequence[str]) -> dict[str, Opener]:
    """Import and return the trackers of these names. Raises ConfigError for an unknown name or a missing package."""
    openers = {}
    for name in names:
        load = plugins.registered(ENTRY_POINTS, name, "--track", ConfigError)
        if load is None:
            raise ConfigError(f"--track {name}: unknown tracker{nearest(name, plugins.names(ENTRY_POINTS))}")
        openers[name] = load()
    return openers


class Tracking:
    """All trackers of one run. A tracker that fails later is dropped: the run's own files are complete."""

    def __init__(self, openers: Mapping[str, Opener], folder: Path, after: int | None = None) -> None:
        self._trackers: dict[str, Tracker] = {}
        for name, opener in openers.items():
            try:
                self._trackers[name] = opener(folder, after)
            except Exception as error:  # third-party libraries raise arbitrary errors
                raise RunError(
                    f"{text(folder)}: {name} cannot write there ({error}); the run ends here"
                ) from error

    def note(self, line: RoundMetrics) -> None:
        self._each(lambda tracker: tracker.note(line.round, scalars(line)))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:
                log.warning("%s failed to write (%s); the run continues without it", name, error)
                del self._trackers[name]
