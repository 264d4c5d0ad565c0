"""The predictor of a device's folder, replaced when the agent installs a new model or a label leads to a new head."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from edge_fl.errors import EdgeFLError, InputError
from edge_fl_devices.features.extractor import Extractor
from edge_fl_devices.serving.predict import Predictor
from edge_fl_devices.storage.slots import InstalledRelease, Slots
from edge_fl_devices.storage.store import IMMEDIATE

Stamp = tuple[tuple[int, int], ...]


class CurrentModel:
    """Loads the served model; `options` are those of the predictor.

    Raises InputError when the folder holds no model yet, unless it is `optional`: then `current` raises it as long as there is none.
    """

    def __init__(self, folder: Path, *, optional: bool = False, **options: Any) -> None:
        self._stamp: Stamp = ()
        self._folder, self._load = folder, partial(Predictor, folder, remember=True, **options)
        self._predictor: Predictor | None = None
        self._extractor: Extractor | None = None
        self._lock = threading.Lock()
        with suppress(*[InputError] * optional):
            self.current()

    def current(self) -> Predictor:
        """Return the current model, or the previous one while the new one cannot be read."""
        with self._lock:
            stamp = _stamp(self._folder)
            if stamp != self._stamp or self._predictor is None:
                try:
                    self._predictor, self._stamp = self._load(extractor=self._extractor), stamp
                    self._extractor = self._predictor.extractor
                except EdgeFLError:
                    if self._predictor is None:
                        raise
            return self._predictor

    def extractor(self) -> tuple[InstalledRelease, Extractor] | None:
        """Return the extractor that predicts, before the first head that of the installed release; None without a release."""
        with suppress(InputError):
            predictor = self.current()
            return predictor.installed, predictor.extractor
        with self._lock:
            if (installed := Slots(self._folder / "release").current()) is None:
                return None
            if self._extractor is None or self._extractor.sha256 != installed.manifest.extractor.sha256:
                self._extractor = Extractor(installed.extractor, installed.manifest)
            return installed, self._extractor


def _stamp(folder: Path) -> Stamp:
    """Return a value that changes when the served model may have changed."""
    files = [
        folder / "answers.json",
        folder / "release" / "state.json",
        *sorted((folder / "heads").glob("*.safetensors")),
        *sorted((folder / IMMEDIATE).glob("*.safetensors")),
    ]
    stamps = []
    for file in files:
        with suppress(OSError):
            stat = file.stat()
            stamps.append((stat.st_mtime_ns, stat.st_ino))
    return tuple(stamps)
