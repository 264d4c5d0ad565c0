"""Load features in a short-lived child process (`child_main`), so that the agent holds neither images nor onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from edge_fl.release.manifest import Manifest
from edge_fl_devices.board import imports
from edge_fl_devices.board.benchmark import Speed
from edge_fl_devices.child import Children, decode, encode
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import record
from edge_fl_devices.data.report import DataReport
from edge_fl_devices.features.client_features import LoadedFeatures
from edge_fl_devices.features.onnx_runtime import Runtime
from edge_fl_devices.storage.slots import Installed

DEADLINE_S = 1800.0  # ResNet-18 at 224 pixels on a slow board: 5 images a second


class FeatureRequest(Struct, frozen=True):
    """Request to the child: compute features for these releases, given as (extractor, manifest); without any, return an `Inspection`.

    Without `count` the inspection leaves out the data.
    """

    config: DeviceConfig
    releases: list[tuple[str, Manifest]] = []
    count: bool = True


class Inspection(Struct, frozen=True):
    """The device's runtime, data and speed. `report` is None when the data cannot be read; `trouble` says why.

    `out_of_memory`: the child that counted the data ran out of memory.
    `reach_ms` is the round-trip time to the broker, 0 if it did not answer.
    """

    runtime: Runtime
    report: DataReport | None = None
    trouble: str = ""
    out_of_memory: bool = False
    speed: Speed = Speed()
    reach_ms: float = 0.0

    @property
    def notes(self) -> list[str]:
        """Measurements and remarks about the data, for the birth message."""
        reach = f", the broker {self.reach_ms:.1f} ms away" if self.reach_ms else ""
        return [f"{self.speed}{reach}", *(self.report.notes if self.report else [])]


class ChildFeatureLoader:
    """A `FeatureLoader` that starts a child process; the child reads the data again each time."""

    def __init__(self, config: DeviceConfig, children: Children) -> None:
        self._config, self._children = config, children

    def __call__(self, releases: Sequence[Installed]) -> LoadedFeatures:
        given = [(str(release.extractor), release.manifest) for release in releases]
        return decode(self._request(FeatureRequest(self._config, given)), LoadedFeatures)

    def inspect(self) -> Inspection:
        """Count the data and measure the board. Raises DataError only for settings that can never work.

        Raises MemoryError only if a child runs out of memory even without the data.
        """
        try:
            return decode(self._request(FeatureRequest(self._config)), Inspection)
        except MemoryError as error:
            record.remember_problem(Path(self._config.folder), "out_of_memory", str(error))
            inspection = decode(self._request(FeatureRequest(self._config, count=False)), Inspection)
            return replace(inspection, trouble=str(error), out_of_memory=True)

    def _request(self, request: FeatureRequest) -> bytes:
        with imports.naming("numpy", "onnxruntime"):
            return self._children.request(encode(request), DEADLINE_S)
