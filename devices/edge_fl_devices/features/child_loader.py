"""Load features in a short-lived child process (`child_main`), so that the agent holds neither images nor onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray
from safetensors.numpy import load, save

from edge_fl.release.manifest import encode
from edge_fl_devices.board.benchmark import Speed
from edge_fl_devices.child import Children, metadata
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import record
from edge_fl_devices.data.report import DataReport
from edge_fl_devices.features.client_features import ClientFeatures, FeatureSet, LoadedFeatures
from edge_fl_devices.features.onnx_runtime import Runtime
from edge_fl_devices.storage.slots import Installed

SETS = ("train", "validation", "test")
DEADLINE_S = 1800.0  # ResNet-18 at 224 pixels on a slow board: 5 images a second


class FeatureRequest(Struct, frozen=True):
    """Request to the child: compute features for these releases, given as (extractor, manifest); without any, return an `Inspection`.

    Without `count` the inspection leaves out the data.
    """

    config: DeviceConfig
    releases: list[tuple[str, str]] = []
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
        paths = [(str(release.extractor), encode(release.manifest).decode()) for release in releases]
        return unpack(self._request(FeatureRequest(self._config, paths)))

    def inspect(self) -> Inspection:
        """Count the data and measure the board. Raises DataError only for settings that can never work.

        Raises MemoryError only if a child runs out of memory even without the data.
        """
        try:
            return msgspec.json.decode(self._request(FeatureRequest(self._config)), type=Inspection)
        except MemoryError as error:
            record.remember_problem(Path(self._config.folder), "out_of_memory", str(error))
            payload = self._request(FeatureRequest(self._config, count=False))
            inspection = msgspec.json.decode(payload, type=Inspection)
            return replace(inspection, trouble=str(error), out_of_memory=True)

    def _request(self, request: FeatureRequest) -> bytes:
        return self._children.request(msgspec.json.encode(request), DEADLINE_S)


def pack(loaded: LoadedFeatures) -> bytes:
    """Encode features as safetensors."""
    arrays: dict[str, NDArray[Any]] = {}
    header = {"fingerprint": loaded.fingerprint, "extractors": str(len(loaded.by_extractor))}
    for number, features in enumerate(loaded.by_extractor):
        if features is None:
            continue
        header[f"{number}.latency_ms"] = repr(features.latency_ms)
        for name in SETS:
            part: FeatureSet = getattr(features, name)
            arrays |= {f"{number}.{name}.z": np.ascontiguousarray(part.z), f"{number}.{name}.y": part.y}
    return save(arrays, header)


def unpack(payload: bytes) -> LoadedFeatures:
    """Decode the output of `pack`."""
    arrays, header = load(payload), metadata(payload)

    def features(number: int) -> ClientFeatures | None:
        if f"{number}.train.z" not in arrays:
            return None
        sets = {name: FeatureSet(arrays[f"{number}.{name}.z"], arrays[f"{number}.{name}.y"]) for name in SETS}
        return ClientFeatures(**sets, latency_ms=float(header[f"{number}.latency_ms"]))

    return LoadedFeatures(tuple(map(features, range(int(header["extractors"])))), header["fingerprint"])
