"""Fitting a personal head in a child process, so that the agent never holds scikit-learn: `python -m devices.workers.head_fitting` is the child.

Features and labels go to the child through its standard input and the head comes back through its standard output, both as
safetensors; nothing of them touches the disk. A child is limited in memory and time and ends after one fit, unless a simulated fleet,
which fits thousands of heads on one machine, keeps its children.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from safetensors.numpy import load, save

from devices.child import Children, metadata, serve
from edge_fl import heads
from edge_fl.heads import Head, HeadPlan
from edge_fl.heads.auto import AUTO, Choice, HeldOut, choose
from edge_fl.heads.head import Extras

NUMBERS = "numbers"
NOTHING_HELD = HeldOut(np.empty((0, 0), np.float32), np.empty(0, np.int64))
GARBAGE = 50_000  # new objects between two collections: scikit-learn is 200,000 that stay, and Python would look every 700
SEPARATOR = ":"  # between an extra's name and its tensor's


@dataclass(frozen=True, slots=True)
class FitLimits:
    """What a child may use; `max_address_mb` counts reserved address space, which is several times what is resident."""

    deadline_s: float = 120.0
    max_address_mb: int = 1024


class FitSpec(Struct, frozen=True):
    """What to fit; the arguments of `edge_fl.heads.fit`, or "auto" as `kind`: then the best kind within `budget_s` is chosen."""

    kind: str
    classes: int
    unit_norm: bool
    extractor: str
    seed: int = 0
    balanced: bool = False
    plan: HeadPlan = HeadPlan()
    budget_s: float = 60.0


@dataclass(frozen=True, eq=False)
class FitData:
    """Features z float32 [n, d] with class ids y int64 [n] to fit to, the extras that came with the release, and what is judged on."""

    z: NDArray[np.float32]
    y: NDArray[np.int64]
    extras: Extras = field(default_factory=dict)
    held: HeldOut = NOTHING_HELD


Fitter = Callable[[FitSpec, FitData], Choice]
"""Fits a head. Raises DataError, RunError, DeadlineError or MemoryError."""


def fit_here(spec: FitSpec, data: FitData) -> Choice:
    """The fit itself, in this process."""

    def fit(kind: str, z: NDArray[np.float32], y: NDArray[np.int64]) -> Head:
        return heads.fit(
            kind,
            z,
            y,
            spec.classes,
            unit_norm=spec.unit_norm,
            extractor=spec.extractor,
            seed=spec.seed,
            balanced=spec.balanced,
            plan=spec.plan,
            extras=data.extras,
        )

    if spec.kind == AUTO:
        return choose(fit, data.z, data.y, data.held, budget_s=spec.budget_s)
    return Choice(fit(spec.kind, data.z, data.y))


class ChildFitter:
    """Fits in child processes; as many at a time as there are threads that call it. With `keep` children are used again."""

    def __init__(self, limits: FitLimits = FitLimits(), *, keep: bool = False) -> None:
        self._deadline_s = limits.deadline_s
        self._children = Children("devices.workers.head_fitting", "head", [str(limits.max_address_mb)], keep=keep)

    def __call__(self, spec: FitSpec, data: FitData) -> Choice:
        return _choice(self._children.ask(_request(spec, data), self._deadline_s))

    def close(self) -> None:
        """Ends the children that wait for work."""
        self._children.close()


class _WithoutPandas(MetaPathFinder):
    """scikit-learn imports pandas wherever it is installed, which no head needs: 60 MB, and a quarter of the child's start."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(f"{name} is left out of this process", name=name)


def main(arguments: list[str]) -> int:
    """The child: answers requests from standard input until it ends."""
    sys.meta_path.insert(0, _WithoutPandas())
    gc.set_threshold(GARBAGE)
    limit = int(arguments[0]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return serve("head", answer)


def answer(request: bytes) -> bytes:
    """A request as bytes -> the head as bytes."""
    choice = fit_here(*_read(request))
    numbers = msgspec.json.encode(choice.numbers).decode()
    return save(choice.head.to_arrays(), {**choice.head.describe(), NUMBERS: numbers})


def _request(spec: FitSpec, data: FitData) -> bytes:
    arrays: dict[str, NDArray[Any]] = {
        "z": np.ascontiguousarray(data.z, np.float32),
        "y": np.ascontiguousarray(data.y, np.int64),
        "held_z": np.ascontiguousarray(data.held.z, np.float32),
        "held_y": np.ascontiguousarray(data.held.y, np.int64),
    }
    for part, held in data.extras.items():
        arrays |= {f"{part}{SEPARATOR}{name}": np.ascontiguousarray(array) for name, array in held.items()}
    return save(arrays, {"spec": msgspec.json.encode(spec).decode()})


def _read(request: bytes) -> tuple[FitSpec, FitData]:
    """The inverse of `_request`."""
    arrays, spec = load(request), msgspec.json.decode(metadata(request)["spec"], type=FitSpec)
    held = HeldOut(arrays.pop("held_z"), arrays.pop("held_y"))
    z, y = arrays.pop("z"), arrays.pop("y")
    extras: dict[str, dict[str, NDArray[Any]]] = {}
    for key, array in arrays.items():
        part, _, name = key.partition(SEPARATOR)
        extras.setdefault(part, {})[name] = array
    return spec, FitData(z, y, extras, held)


def _choice(payload: bytes) -> Choice:
    words = metadata(payload)
    numbers = msgspec.json.decode(words.pop(NUMBERS), type=dict[str, float])
    return Choice(heads.from_arrays(load(payload), words), numbers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
