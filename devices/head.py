"""Fitting a personal head in a child process, so that the agent never holds scikit-learn: `python -m devices.head` is the child.

Features and labels go to the child through its standard input and the head comes back through its standard output, both as
safetensors; nothing of them touches the disk. A child is limited in memory and time and ends after one fit, unless a simulated fleet,
which fits thousands of heads on one machine, keeps its children.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from queue import Empty, LifoQueue
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from safetensors.numpy import load, save

from devices.child import Child, serve
from edge_fl import heads
from edge_fl.heads import Head, HeadPlan
from edge_fl.heads.auto import AUTO, Choice, Held, choose
from edge_fl.heads.head import Extras

NUMBERS = "numbers"
NOTHING_HELD = Held(np.empty((0, 0), np.float32), np.empty(0, np.int64))
SEPARATOR = ":"  # between an extra's name and its tensor's


@dataclass(frozen=True, slots=True)
class FitLimits:
    """What a child may use; `max_address_mb` counts reserved address space, which is several times what is resident."""

    deadline_s: float = 120.0
    max_address_mb: int = 1024


class Order(Struct, frozen=True):
    """What to fit; the arguments of `edge_fl.heads.fit`, or "auto" as `kind`: then the best kind within `budget_s` is chosen."""

    kind: str
    classes: int
    unit_norm: bool
    extractor: str
    seed: int = 0
    balanced: bool = False
    plan: HeadPlan = HeadPlan()
    budget_s: float = 60.0


class Fitter(Protocol):
    """Fits a head on features z float32 [n, d] with class ids y int64 [n]; `extras` came with the release, `held` is judged on.

    Raises DataError, RunError, DeadlineError or MemoryError.
    """

    def __call__(
        self,
        order: Order,
        z: NDArray[np.float32],
        y: NDArray[np.int64],
        extras: Extras | None = None,
        held: Held = NOTHING_HELD,
    ) -> Choice: ...


def fit_here(
    order: Order,
    z: NDArray[np.float32],
    y: NDArray[np.int64],
    extras: Extras | None = None,
    held: Held = NOTHING_HELD,
) -> Choice:
    """The fit itself, in this process."""

    def fit(kind: str, z: NDArray[np.float32], y: NDArray[np.int64]) -> Head:
        return heads.fit(
            kind,
            z,
            y,
            order.classes,
            unit_norm=order.unit_norm,
            extractor=order.extractor,
            seed=order.seed,
            balanced=order.balanced,
            plan=order.plan,
            extras=extras,
        )

    if order.kind == AUTO:
        return choose(fit, z, y, held, budget_s=order.budget_s)
    return Choice(fit(order.kind, z, y))


class ChildFitter:
    """Fits in child processes; as many at a time as there are threads that call it. With `keep` children are used again."""

    def __init__(self, limits: FitLimits = FitLimits(), *, keep: bool = False) -> None:
        self._limits, self._keep = limits, keep
        self._idle: LifoQueue[Child] = LifoQueue()

    def __call__(
        self,
        order: Order,
        z: NDArray[np.float32],
        y: NDArray[np.int64],
        extras: Extras | None = None,
        held: Held = NOTHING_HELD,
    ) -> Choice:
        arrays: dict[str, NDArray[Any]] = {
            "z": np.ascontiguousarray(z, np.float32),
            "y": np.ascontiguousarray(y, np.int64),
            "held_z": np.ascontiguousarray(held.z, np.float32),
            "held_y": np.ascontiguousarray(held.y, np.int64),
            **{
                f"{part}{SEPARATOR}{name}": np.ascontiguousarray(array)
                for part, held in (extras or {}).items()
                for name, array in held.items()
            },
        }
        lesson = save(arrays, {"order": msgspec.json.encode(order).decode()})
        child = self._child()
        try:
            answer = child.exchange(lesson, self._limits.deadline_s)
        except BaseException:
            child.close()
            raise
        if self._keep:
            self._idle.put(child)
        else:
            child.close()
        return _choice(answer)

    def close(self) -> None:
        """Ends the children that wait for work."""
        with suppress(Empty):
            while True:
                self._idle.get_nowait().close()

    def _child(self) -> Child:
        try:
            return self._idle.get_nowait()
        except Empty:
            return Child("devices.head", "head", [str(self._limits.max_address_mb)])


class _WithoutPandas(MetaPathFinder):
    """scikit-learn imports pandas wherever it is installed, which no head needs: 60 MB, and a quarter of the child's start."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(f"{name} is left out of this process", name=name)


def main(arguments: list[str]) -> int:
    """The child: answers lessons from standard input until it ends."""
    sys.meta_path.insert(0, _WithoutPandas())
    limit = int(arguments[0]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return serve("head", answer)


def answer(lesson: bytes) -> bytes:
    """A lesson as bytes -> the head as bytes."""
    arrays, order = load(lesson), msgspec.json.decode(_words(lesson)["order"], type=Order)
    extras: dict[str, dict[str, NDArray[Any]]] = {}
    for key in arrays.keys() - {"z", "y", "held_z", "held_y"}:
        part, _, name = key.partition(SEPARATOR)
        extras.setdefault(part, {})[name] = arrays[key]
    held = Held(arrays["held_z"], arrays["held_y"])
    choice = fit_here(order, arrays["z"], arrays["y"], extras, held)
    numbers = msgspec.json.encode(choice.numbers).decode()
    return save(choice.head.to_arrays(), {**choice.head.describe(), NUMBERS: numbers})


def _choice(payload: bytes) -> Choice:
    words = _words(payload)
    numbers = msgspec.json.decode(words.pop(NUMBERS), type=dict[str, float])
    return Choice(heads.from_arrays(load(payload), words), numbers)


def _words(payload: bytes) -> dict[str, Any]:
    """The metadata of a safetensors file."""
    length = int.from_bytes(payload[:8], "little")
    words: dict[str, Any] = json.loads(payload[8 : 8 + length])["__metadata__"]
    return words


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
