"""A device's data as features with labels, by extractor, and how an agent asks a child for them.

Images and onnxruntime live in the short-lived child (`devices.features.child`), so that an agent holds neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from safetensors.numpy import load, save

from devices.board.benchmark import Speed
from devices.child import Children, metadata
from devices.config import DeviceConfig
from devices.data.report import DataReport
from devices.features.onnx_runtime import Runtime
from devices.storage.slots import Installed
from edge_fl.release.manifest import encode

SETS = ("train", "validation", "test")
DEADLINE_S = 1800.0  # ResNet-18 at 224 pixels on a slow board: 5 images a second


@dataclass(frozen=True, eq=False)
class FeatureSet:
    """Features z float32 [n, d] of one set, with their class ids y int64 [n]."""

    z: NDArray[np.float32]
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class ClientFeatures:
    """A client's three sets as one extractor sees them; it takes `latency_ms` for one image (0: not measured)."""

    train: FeatureSet
    validation: FeatureSet
    test: FeatureSet
    latency_ms: float = 0.0


@dataclass(frozen=True, eq=False)
class LoadedFeatures:
    """Features by extractor, in the order asked for (None where the images do not fit it), and the fingerprint of the data behind them."""

    by_extractor: tuple[ClientFeatures | None, ...]
    fingerprint: str


class FeatureLoader(Protocol):
    """Passes the device's data through the extractors of these releases, the first of which must fit. Raises DataError, ArtefactError."""

    def __call__(self, releases: Sequence[Installed]) -> LoadedFeatures: ...


class FeatureRequest(Struct, frozen=True):
    """What the child is asked for: features by these releases, given as (extractor, manifest); without any, an `Inspection`."""

    config: DeviceConfig
    releases: list[tuple[str, str]] = []


class Inspection(Struct, frozen=True):
    """What is there before any release says what it needs; `report` is None when that cannot be told yet, `trouble` says why.

    `reach_ms` is the way to the broker, 0 if it did not answer.
    """

    runtime: Runtime
    report: DataReport | None = None
    trouble: str = ""
    speed: Speed = Speed()
    reach_ms: float = 0.0

    @property
    def notes(self) -> list[str]:
        """What was measured and what is odd about the data, for whoever looks after the fleet."""
        reach = f", the broker {self.reach_ms:.1f} ms away" if self.reach_ms else ""
        return [f"{self.speed}{reach}", *(self.report.notes if self.report else [])]


class ChildFeatureLoader:
    """Loads in a child process that reads the data anew and ends."""

    def __init__(self, config: DeviceConfig, children: Children) -> None:
        self._config, self._children = config, children

    def __call__(self, releases: Sequence[Installed]) -> LoadedFeatures:
        request = FeatureRequest(
            self._config, [(str(found.extractor), encode(found.manifest).decode()) for found in releases]
        )
        return unpack(self._ask(request))

    def inspect(self) -> Inspection:
        """Counts the data and asks the runtime what it can run. Raises DataError only for settings that cannot be right."""
        return msgspec.json.decode(self._ask(FeatureRequest(self._config)), type=Inspection)

    def _ask(self, request: FeatureRequest) -> bytes:
        return self._children.ask(msgspec.json.encode(request), DEADLINE_S)


def pack(loaded: LoadedFeatures) -> bytes:
    """Loaded features as safetensors."""
    arrays: dict[str, NDArray[Any]] = {}
    times_ms: dict[str, str] = {}
    for number, features in enumerate(loaded.by_extractor):
        if features is None:
            continue
        times_ms[f"{number}.latency_ms"] = repr(features.latency_ms)
        for name in SETS:
            found: FeatureSet = getattr(features, name)
            arrays |= {f"{number}.{name}.z": np.ascontiguousarray(found.z), f"{number}.{name}.y": found.y}
    return save(
        arrays, {"fingerprint": loaded.fingerprint, "extractors": str(len(loaded.by_extractor)), **times_ms}
    )


def unpack(payload: bytes) -> LoadedFeatures:
    """The inverse of `pack`."""
    arrays, said = load(payload), metadata(payload)
    by_extractor = (
        _client_features(
            [FeatureSet(arrays[f"{number}.{name}.z"], arrays[f"{number}.{name}.y"]) for name in SETS],
            float(said[f"{number}.latency_ms"]),
        )
        if f"{number}.train.z" in arrays
        else None
        for number in range(int(said["extractors"]))
    )
    return LoadedFeatures(tuple(by_extractor), said["fingerprint"])


def _client_features(sets: Sequence[FeatureSet], latency_ms: float) -> ClientFeatures:
    train, validation, test = sets
    return ClientFeatures(train, validation, test, latency_ms)
