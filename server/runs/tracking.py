"""A run's rounds for the viewers that researchers have open anyway: TensorBoard's event files, or an MLflow store, inside the run's folder.

What is shown is what round_metrics.jsonl says of the round and nothing else. Both are asked for by name (`--track`), and neither
reaches beyond this machine.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import NamedTuple, Protocol

from edge_fl.errors import ConfigError, RunError, nearest
from server.runs.round_metrics import RoundLine

log = logging.getLogger(__name__)

ROUND = ("asked", "answered", "seconds", "bytes_down", "bytes_up")
FLEET = ("mean", "std", "bottom_decile")
"""Of a round, and of each metric over the clients, under the words of the results."""


class Tracker(Protocol):
    """One viewer's file, open for writing."""

    def note(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


Opener = Callable[[Path, int | None], Tracker]
"""(the run's folder, the round that it goes on after or None) -> its tracker."""


def scalars(line: RoundLine) -> dict[str, float]:
    """What a line says, by name: `round/seconds`, `personal.test_acc.before/mean`; the closing step's behind `closing/`.

    What was not measured has no name here.
    """
    prefix = "closing/" if line.closing else ""
    found = {} if line.closing else {f"round/{name}": getattr(line, name) for name in ROUND}
    for metric, summary in line.summaries.items():
        found |= {f"{prefix}{metric}/{field}": getattr(summary, field) for field in FLEET}
    return {name: float(value) for name, value in found.items() if value is not None and isfinite(value)}


def find(names: Sequence[str]) -> dict[str, Opener]:
    """The trackers of these names, their packages imported. Raises ConfigError for an unknown name or a package that is not there."""
    return {name: _find(name) for name in names}


def _find(name: str) -> Opener:
    if name not in TRACKERS:
        raise ConfigError(f"--track {name}: unknown tracker{nearest(name, TRACKERS)}")
    extra, load = TRACKERS[name]
    try:
        return load()
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--track {name}: {error.name} is not installed; needs pip install 'edge-fl[{extra}]'"
        ) from error


class Tracking:
    """All trackers of one run. One that fails later on is let go: the run's own files have everything."""

    def __init__(self, openers: Mapping[str, Opener], folder: Path, after: int | None = None) -> None:
        self._trackers: dict[str, Tracker] = {}
        for name, opener in openers.items():
            try:
                self._trackers[name] = opener(folder, after)
            except Exception as error:  # other people's libraries raise what they like
                raise RunError(f"{folder}: {name} cannot write there ({error}); the run ends here") from error

    def note(self, line: RoundLine) -> None:
        self._each(lambda tracker: tracker.note(line.round, scalars(line)))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:
                log.warning("%s does not take the round (%s); this run goes on without it", name, error)
                del self._trackers[name]


def _tensorboard() -> Opener:
    from torch.utils.tensorboard import SummaryWriter

    class TensorBoard:
        """Event files; after a resume the viewer forgets the rounds that come again."""

        def __init__(self, folder: Path, after: int | None) -> None:
            again = None if after is None else after + 1
            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=again)

        def note(self, step: int, scalars: Mapping[str, float]) -> None:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

        def close(self) -> None:
            self._writer.close()

    return TensorBoard


def _mlflow() -> Opener:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would tell its makers of every run
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    class MLflow:
        """A store in one SQLite file (MLflow refuses plain files by now): the run is an experiment, each resume a run of it."""

        def __init__(self, folder: Path, after: int | None) -> None:
            home = (folder / "mlflow").absolute()
            home.mkdir(exist_ok=True)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The ``noload`` loader", DeprecationWarning)
                self._client = MlflowClient(f"sqlite:///{home}/mlflow.db")
            known = self._client.get_experiment_by_name(folder.name)
            experiment = (
                known.experiment_id
                if known
                else self._client.create_experiment(folder.name, (home / "artifacts").as_uri())
            )
            name = folder.name if after is None else f"{folder.name}, after round {after}"
            self._run = self._client.create_run(experiment, run_name=name).info.run_id

        def note(self, step: int, scalars: Mapping[str, float]) -> None:
            now = time.time_ns() // 1_000_000  # shown beside the step, which orders
            self._client.log_batch(self._run, [Metric(*item, now, step) for item in scalars.items()])

        def close(self) -> None:
            self._client.set_terminated(self._run)

    return MLflow


class Kind(NamedTuple):
    """The extra that brings a tracker's package, and what imports it."""

    extra: str
    load: Callable[[], Opener]


TRACKERS = {"tensorboard": Kind("track", _tensorboard), "mlflow": Kind("mlflow", _mlflow)}
