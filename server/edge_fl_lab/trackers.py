"""The trackers `tensorboard` and `mlflow`: event files, and a store, inside the run's folder. Nothing leaves this machine."""

import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from edge_fl.errors import ConfigError
from edge_fl.files.paths import text
from edge_fl_server.runs.round_metrics import Opener


def tensorboard() -> Opener:
    """The tracker `tensorboard`."""
    with _needed("tensorboard", "track"):
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


def mlflow() -> Opener:
    """The tracker `mlflow`."""
    with _needed("mlflow", "mlflow"):
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


@contextmanager
def _needed(tracker: str, extra: str) -> Iterator[None]:
    """Name the extra that brings the packages imported in the block."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--track {tracker}: {error.name} is not installed; needs pip install 'edge-fl[{extra}]'"
        ) from error
