"""Experiment trackers: they receive the values of round_metrics.jsonl and nothing else (`--track`).

A tracker is an entry point of the group `edge_fl.trackers`: a function that returns its `Opener`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Protocol

from edge_fl import plugins
from edge_fl.errors import ConfigError, RunError, nearest
from edge_fl.files.paths import text
from edge_fl_server.runs.round_metrics import RoundMetrics

log = logging.getLogger(__name__)

ENTRY_POINTS = "edge_fl.trackers"
STATISTICS = ("mean", "std", "bottom_decile")
"""The fields of each metric's summary that trackers receive."""


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
