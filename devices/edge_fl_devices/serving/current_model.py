"""The predictor of a device's folder, replaced when the agent installs a new model."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from edge_fl.errors import EdgeFLError
from edge_fl_devices.serving.predict import Predictor

Stamp = tuple[tuple[int, int], ...]


class CurrentModel:
    """Loads the served model; `options` are those of the predictor. Raises InputError when the folder holds none yet."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._stamp = _stamp(folder)
        self._folder, self._load = folder, partial(Predictor, folder, remember=True, **options)
        self._predictor = self._load()

    def current(self) -> Predictor:
        """Return the current model, or the previous one while the new one cannot be read."""
        stamp = _stamp(self._folder)
        if stamp != self._stamp:
            with suppress(EdgeFLError):  # the agent is replacing the model
                self._predictor, self._stamp = self._load(), stamp
        return self._predictor


def _stamp(folder: Path) -> Stamp:
    """Return a value that changes when the served model may have changed."""
    files = [
        folder / "answers.json",
        folder / "release" / "state.json",
        *sorted((folder / "heads").glob("*.safetensors")),
    ]
    stamps = []
    for file in files:
        with suppress(OSError):
            stat = file.stat()
            stamps.append((stat.st_mtime_ns, stat.st_ino))
    return tuple(stamps)
