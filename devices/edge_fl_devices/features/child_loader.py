"""Load features in a short-lived child process (`child_main`), so that the agent holds neither images nor onnxruntime."""

import dataclasses
import threading
from collections.abc import Sequence
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
from edge_fl_devices.data.report import DataReport
from edge_fl_devices.features.client_features import LoadedFeatures
from edge_fl_devices.features.onnx_runtime import Runtime
from edge_fl_devices.features.progress import ReadingProgress
from edge_fl_devices.storage.slots import InstalledRelease

DEADLINE_S = 600.0  # without progress; a step is at most 32 pictures, or an .npz
BOARD_DEADLINE_S = 120.0  # below half of the unit's TimeoutStartSec: the agent is not ready before


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
