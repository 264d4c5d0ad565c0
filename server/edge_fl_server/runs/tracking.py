"""Experiment trackers: the round metrics as TensorBoard event files or an MLflow store inside the run's folder (`--track`).

Trackers receive the values of round_metrics.jsonl and nothing else. Nothing leaves this machine.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Protocol

from edge_fl.errors import ConfigError, RunError, nearest
from edge_fl.files.paths import text
from edge_fl_server.runs.round_metrics import RoundMetrics

log = logging.getLogger(__name__)

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
        if name not in TRACKERS:
            raise ConfigError(f"--track {name}: unknown tracker{nearest(name, TRACKERS)}")
        extra, load = TRACKERS[name]
        try:
            openers[name] = load()
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--track {name}: {error.name} is not installed; needs pip install 'edge-fl[{extra}]'"
            ) from error
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


def _tensorboard() -> Opener:
    from torch.utils.tensorboard import SummaryWriter

    class TensorBoard:
        """Event files; after a resume TensorBoard drops the repeated rounds."""

        def __init__(self, folder: Path, after: int | None) -> None:
            again = None if after is None else after + 1
            self._writer = SummaryWriter(os.fspath(folder / "tensorboard"), purge_step=again)

        def note(self, step: int, scalars: Mapping[str, float]) -> None:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

        def close(self) -> None:
            self._writer.close()

    return TensorBoard


def _mlflow() -> Opener:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    class MLflow:
        """A store in one SQLite file: the run is an experiment, each resume a run of it."""

        def __init__(self, folder: Path, after: int | None) -> None:
            home = (folder / "mlflow").absolute()
            home.mkdir(exist_ok=True)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The ``noload`` loader", DeprecationWarning)
                self._client = MlflowClient(f"sqlite:///{text(home)}/mlflow.db")
            known = self._client.get_experiment_by_name(folder.name)
            experiment = (
                known.experiment_id
                if known
                else self._client.create_experiment(folder.name, (home / "artifacts").as_uri())
            )
            name = folder.name if after is None else f"{text(folder.name)}, after round {after}"
            self._run = self._client.create_run(experiment, run_name=name).info.run_id

        def note(self, step: int, scalars: Mapping[str, float]) -> None:
            now = time.time_ns() // 1_000_000  # shown next to the step, which orders
            self._client.log_batch(self._run, [Metric(*item, now, step) for item in scalars.items()])

        def close(self) -> None:
            self._client.set_terminated(self._run)

    return MLflow


TRACKERS = {"tensorboard": ("track", _tensorboard), "mlflow": ("mlflow", _mlflow)}
"""Name -> the extra that brings the tracker's package, and the function that imports it."""
