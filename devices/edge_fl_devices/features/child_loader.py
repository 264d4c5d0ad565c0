"""Load features in a short-lived child process (`child_main`), so that the agent holds neither samples nor onnxruntime; show its progress.

FOLDER/features/progress.json    how far a slow reading of the data is, for `device status`
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from msgspec import Struct

from edge_fl.errors import EdgeFLError, StoppedError
from edge_fl.release.manifests import Manifest
from edge_fl_devices.board import imports
from edge_fl_devices.board.benchmark import Speed
from edge_fl_devices.child import Children, decode, encode
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import record
from edge_fl_devices.data.current import CurrentData
from edge_fl_devices.data.location import Snapshot
from edge_fl_devices.data.record import DataReport
from edge_fl_devices.features.client_features import LoadedFeatures
from edge_fl_devices.features.onnx_runtime import Runtime
from edge_fl_devices.storage import read_json, write_json
from edge_fl_devices.storage.slots import InstalledRelease

PROGRESS_FILE = "features/progress.json"
SLOW_S = 5.0
"""What takes less is not worth a line."""
RECENT_S, WRITE_S = 60.0, 2.0
STALE_S = 900.0
"""Longer than the deadline of a reading without progress: its process is gone."""
DEADLINE_S = 600.0  # without progress; a step is at most 32 samples, a recording, or an .npz
BOARD_DEADLINE_S = 120.0  # below half of the unit's TimeoutStartSec: the agent is not ready before


class Reading(Struct, frozen=True):
    """A reading under way: `done` of `of` files at the time `at_s`; `ends_s`: when it will be done (seconds since 1970)."""

    what: str
    done: int
    of: int
    at_s: float
    ends_s: float

    def __str__(self) -> str:
        ends = datetime.fromtimestamp(self.ends_s)
        day = "" if self.ends_s - self.at_s < 12 * 3600 else f"{ends:%a} "
        return f"{self.what} of {self.done:,} of {self.of:,} files, done at about {day}{ends:%H:%M}"


class ReadingProgress:
    """Follows one reading after the other of one device; `current` is a slow one that is under way. For any thread."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.current: Reading | None = None
        self._path, self._clock, self._wall_clock = folder / PROGRESS_FILE, clock, wall_clock
        self._what = ""
        self._began_s = self._written_s = 0.0
        self._marks: deque[tuple[float, int]] = deque()

    def begin(self, what: str) -> None:
        """Begin a reading; `what` is read of each file."""
        self._what, self._began_s, self._written_s = what, self._clock(), self._clock()
        self._marks = deque([(self._began_s, 0)])

    def __call__(self, done: int, of: int) -> None:
        """Take how far it is. The pace is that of the last minute: files that are known already cost nothing."""
        now_s = self._clock()
        self._marks.append((now_s, done))
        while len(self._marks) > 2 and self._marks[0][0] < now_s - RECENT_S:
            self._marks.popleft()
        began_s, before = self._marks[0]
        if now_s - self._began_s < SLOW_S or not before < done < of:
            return
        left_s = (of - done) * (now_s - began_s) / (done - before)
        at_s = self._wall_clock()
        self.current = Reading(self._what, done, of, at_s, at_s + left_s)
        if now_s - self._written_s >= WRITE_S:
            self._written_s = now_s
            with suppress(OSError):  # only the status misses it
                write_json(self._path, self.current, flush=False)

    def end(self) -> None:
        """End the reading."""
        self.current = None
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def read_progress(folder: Path, now_s: float | None = None) -> Reading | None:
    """Return the reading that the agent of this folder is working on, if it is a slow one."""
    found = read_json(folder / PROGRESS_FILE, Reading)
    now_s = time.time() if now_s is None else now_s
    return found if found and abs(now_s - found.at_s) < STALE_S else None


class FeatureRequest(Struct, frozen=True):
    """Request to the child: compute features for these releases, given as (extractor, manifest); without any, return an `Inspection`.

    Of the data only `files` count, as of `DataSpec`. Without `count` the inspection leaves out the data.
    """

    config: DeviceConfig
    releases: list[tuple[str, Manifest]] = []
    count: bool = True
    files: frozenset[bytes] | None = None


class Inspection(Struct, frozen=True):
    """The device's runtime, data and speed. `report` is None when the data were not counted; `trouble` says why they cannot be read.

    `reach_ms` is the round-trip time to the broker, 0 if it did not answer.
    """

    runtime: Runtime
    report: DataReport | None = None
    trouble: str = ""
    speed: Speed = Speed()
    reach_ms: float = 0.0

    @property
    def measured(self) -> str:
        """The measurements of the board, for the birth message."""
        reach = f", the broker {self.reach_ms:.1f} ms away" if self.reach_ms else ""
        return f"{self.speed}{reach}"


class ChildFeatureLoader:
    """A `FeatureLoader` that starts a child process; the child reads the data again each time, as they are now (`current`).

    One child works at a time: a board has no memory for two. `progress` follows it.
    """

    def __init__(self, config: DeviceConfig, children: Children, current: CurrentData | None = None) -> None:
        self._config, self._children = config, children
        self._current = current or CurrentData(config)
        self.progress = ReadingProgress(Path(config.folder))
        self._working = threading.Lock()

    def __call__(self, releases: Sequence[InstalledRelease]) -> LoadedFeatures:
        given = [(str(release.extractor), release.manifest) for release in releases]
        now = self._current.now()
        request = FeatureRequest(self._config, given, files=now.files)
        loaded = decode(self._request(request, DEADLINE_S, "features"), LoadedFeatures)
        return dataclasses.replace(loaded, stamp=now.stamp)

    def inspect_board(self) -> Inspection:
        """Measure the board, and leave out the data. Raises as `Children.request`; the reason is stored."""
        return self._inspect(FeatureRequest(self._config, count=False), BOARD_DEADLINE_S)

    def inspect(self, snapshot: Snapshot) -> Inspection:
        """Measure the board and count the data of this snapshot. Raises as `Children.request`; the reason is stored."""
        return self._inspect(FeatureRequest(self._config, files=snapshot.files), DEADLINE_S)

    def _inspect(self, request: FeatureRequest, deadline_s: float) -> Inspection:
        try:
            return decode(self._request(request, deadline_s, "headers"), Inspection)
        except StoppedError:
            raise
        except (EdgeFLError, MemoryError) as error:
            record.remember_problem(Path(self._config.folder), record.failure_word(error), str(error))
            raise

    def _request(self, request: FeatureRequest, deadline_s: float, what: str) -> bytes:
        with self._working, imports.naming("numpy", "onnxruntime"):
            self.progress.begin(what)
            try:
                return self._children.request(encode(request), deadline_s, self.progress)
            finally:
                self.progress.end()
