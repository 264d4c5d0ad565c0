"""What a device's data look like through an extractor: features with labels, and no image, in the agent; who looks is `devices.sight.eyes`.

Images and onnxruntime live in a short-lived child (`ChildLook`), so that an agent holds neither between two looks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from safetensors.numpy import load, save

from devices.board.benchmark import Speed
from devices.child import Children
from devices.config import DeviceConfig
from devices.data import DataReport
from devices.install.runtime import Runtime
from edge_fl.release.artefact import Installed
from edge_fl.release.manifest import encode

SETS = ("train", "validation", "test")
DEADLINE_S = 1800.0  # ResNet-18 at 224 pixels on a slow board: 5 images a second


@dataclass(frozen=True, eq=False)
class Seen:
    """Features z float32 [n, d] of one set, with their class ids y int64 [n]."""

    z: NDArray[np.float32]
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class View:
    """A device's three sets through one extractor, which takes `latency_ms` for one image (0: not measured)."""

    train: Seen
    validation: Seen
    test: Seen
    latency_ms: float = 0.0


@dataclass(frozen=True, eq=False)
class Sight:
    """A view per extractor that was asked for (None where the images do not fit it), and the fingerprint of the data behind them."""

    views: tuple[View | None, ...]
    fingerprint: str


class Look(Protocol):
    """Looks at the device's data through the extractors of these releases, the first of which must fit. Raises DataError, ArtefactError."""

    def __call__(self, releases: Sequence[Installed]) -> Sight: ...


class Order(Struct, frozen=True):
    """What the child is to look at: the device's data, through releases given as (extractor, manifest); without any, only inspect."""

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


class ChildLook:
    """Looks in a child process that reads the data anew and ends."""

    def __init__(self, config: DeviceConfig, eyes: Children) -> None:
        self._config, self._eyes = config, eyes

    def __call__(self, releases: Sequence[Installed]) -> Sight:
        order = Order(
            self._config, [(str(found.extractor), encode(found.manifest).decode()) for found in releases]
        )
        return unpack(self._ask(order))

    def inspect(self) -> Inspection:
        """Counts the data and asks the runtime what it can run. Raises DataError only for settings that cannot be right."""
        return msgspec.json.decode(self._ask(Order(self._config)), type=Inspection)

    def _ask(self, order: Order) -> bytes:
        return self._eyes.ask(msgspec.json.encode(order), DEADLINE_S)


def pack(sight: Sight) -> bytes:
    """A sight as safetensors."""
    arrays: dict[str, NDArray[Any]] = {}
    for number, view in enumerate(sight.views):
        for name in SETS if view else ():
            seen: Seen = getattr(view, name)
            arrays |= {f"{number}.{name}.z": np.ascontiguousarray(seen.z), f"{number}.{name}.y": seen.y}
    times_ms = {
        f"{number}.latency_ms": repr(view.latency_ms) for number, view in enumerate(sight.views) if view
    }
    return save(arrays, {"fingerprint": sight.fingerprint, "views": str(len(sight.views)), **times_ms})


def unpack(payload: bytes) -> Sight:
    """The inverse of `pack`."""
    arrays, said = load(payload), words(payload)
    views = (
        _view(
            [Seen(arrays[f"{number}.{name}.z"], arrays[f"{number}.{name}.y"]) for name in SETS],
            float(said[f"{number}.latency_ms"]),
        )
        if f"{number}.train.z" in arrays
        else None
        for number in range(int(said["views"]))
    )
    return Sight(tuple(views), said["fingerprint"])


def _view(sets: Sequence[Seen], latency_ms: float) -> View:
    train, validation, test = sets
    return View(train, validation, test, latency_ms)


def words(payload: bytes) -> dict[str, str]:
    """The metadata of a safetensors file."""
    length = int.from_bytes(payload[:8], "little")
    found: dict[str, str] = json.loads(payload[8 : 8 + length])["__metadata__"]
    return found
