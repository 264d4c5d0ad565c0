"""Fit a personal head in a child process, so that the agent never loads scikit-learn: `python -m edge_fl_devices.workers.head_fitting`.

Request and head travel through the child's standard input and output; nothing is written to disk. A child has limits of memory and
time and ends after one fit, unless it is kept, as in a simulated fleet, which fits thousands of heads on one machine.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.abc import MetaPathFinder
from typing import Self

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from edge_fl import heads
from edge_fl.data.grouping import Groups, Importance, alone
from edge_fl.heads import HeadPlan, probability_calibration
from edge_fl.heads.auto import AUTO, MIN_HELD_OUT, Choice, HeldOut, choose
from edge_fl.heads.head import Array, Extras, TrainingSet
from edge_fl.heads.probability_calibration import UNCALIBRATED
from edge_fl_devices.board import imports
from edge_fl_devices.child import Children, decode, encode, serve

NOTHING_HELD_OUT = HeldOut(np.empty((0, 0), np.float32), np.empty(0, np.int64))
GC_THRESHOLD = 50_000  # new objects per collection: scikit-learn creates 200,000 that stay; the default of 700 slows its import


@dataclass(frozen=True, slots=True)
class FitLimits:
    """Limits of a child; `max_address_mb` counts reserved address space, several times what is resident."""

    deadline_s: float = 120.0
    max_address_mb: int = 1024


class FitSpec(Struct, frozen=True):
    """Which head to fit: the arguments of `edge_fl.heads.fit`. Kind "auto" selects the best kind within `budget_s`.

    With `calibrate` the head is also calibrated, which fits up to five more unless the release has a fleet's head. closed: only classes
    with labels are predicted.
    """

    kind: str
    classes: int
    unit_norm: bool
    extractor: str
    seed: int = 0
    balanced: bool = False
    plan: HeadPlan = HeadPlan()
    budget_s: float = 60.0
    calibrate: bool = False
    closed: bool = False


@dataclass(frozen=True, eq=False)
class FitData:
    """Training features z float32 [n, d] with class ids y int64 [n], the release's extras, and held-out data for kind "auto".

    groups int64 [n]: pictures that belong together (empty: all alone); no fold cuts a group. unlabelled float32 [m, d]: features of
    pictures without a label. importance float64 [n]: how many pictures each stands for (`edge_fl.data.grouping.Importance`).
    """

    z: NDArray[np.float32]
    y: NDArray[np.int64]
    extras: Extras = field(default_factory=dict)
    held: HeldOut = NOTHING_HELD_OUT
    groups: Groups = field(default_factory=alone)
    unlabelled: NDArray[np.float32] | None = None
    importance: Importance = field(default_factory=lambda: np.empty(0))


class FittedHead(Struct, frozen=True):
    """A `Choice` as it travels: head and calibration by their arrays."""

    arrays: dict[str, Array]
    description: dict[str, str]
    numbers: dict[str, float]
    calibration: dict[str, Array]

    @classmethod
    def of(cls, choice: Choice) -> Self:
        """Encode a choice."""
        head, calibration = choice.head, choice.calibration
        return cls(head.to_arrays(), head.describe(), choice.numbers, calibration.to_arrays())

    def choice(self) -> Choice:
        """Decode it."""
        calibration = probability_calibration.from_arrays(self.calibration)
        return Choice(heads.from_arrays(self.arrays, self.description), self.numbers, calibration=calibration)


Fitter = Callable[[FitSpec, FitData], Choice]
"""Fits a head. Raises DataError, RunError, DeadlineError, ChildError or MemoryError."""


def training_set(spec: FitSpec, data: FitData) -> TrainingSet:
    """What a head is fitted on."""
    return heads.training_set(
        data.z,
        data.y,
        spec.classes,
        spec.unit_norm,
        spec.extractor,
        seed=spec.seed,
        balanced=spec.balanced,
        plan=spec.plan,
        extras=data.extras,
        groups=data.groups,
        closed=spec.closed,
        unlabelled=data.unlabelled,
        importance=data.importance,
    )


def fit_here(spec: FitSpec, data: FitData) -> Choice:
    """Fit a head in this process."""

    def fit(kind: str, z: NDArray[np.float32], y: NDArray[np.int64]) -> heads.Head:
        return heads.fitted(kind, training_set(spec, FitData(z, y, data.extras)))

    kind, numbers = spec.kind, dict[str, float]()
    if kind == AUTO:
        if heads.uses_fleet(heads.Logistic.kind, spec.plan) and len(data.y) < MIN_HELD_OUT:
            kind = heads.Logistic.kind
        else:
            choice = choose(fit, data.z, data.y, data.held, data.groups, budget_s=spec.budget_s)
            kind, numbers = choice.kind, choice.numbers
    if heads.uses_fleet(kind, spec.plan):
        training = training_set(spec, data)
        estimate = heads.estimated(kind, training)
        calibration = probability_calibration.of_estimate(estimate, training)
        return Choice(estimate.head, numbers, kind, calibration if spec.calibrate else UNCALIBRATED)
    head = fit(kind, data.z, data.y)
    if not spec.calibrate:
        return Choice(head, numbers, kind)
    calibration = probability_calibration.calibrate(
        partial(fit, kind),
        data.z,
        data.y,
        data.groups,
        importance=data.importance,
        unlabelled=data.unlabelled,
        budget_s=spec.budget_s,
    )
    return Choice(head, numbers, kind, calibration)


class ChildFitter:
    """Fits heads in child processes, one per calling thread; with `keep`, children are reused."""

    def __init__(self, limits: FitLimits = FitLimits(), *, keep: bool = False) -> None:
        self._deadline_s = limits.deadline_s
        arguments = [str(limits.max_address_mb)]
        self._children = Children("edge_fl_devices.workers.head_fitting", "head", arguments, keep=keep)

    def __call__(self, spec: FitSpec, data: FitData) -> Choice:
        with imports.naming("numpy", "scipy", "sklearn"):
            response = self._children.request(encode((spec, data)), self._deadline_s)
        return decode(response, FittedHead).choice()

    def close(self) -> None:
        """End the idle children."""
        self._children.close()


class _WithoutPandas(MetaPathFinder):
    """Hides pandas, which scikit-learn imports if installed and no head needs: 60 MB and a quarter of the child's start."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(f"{name} is not available in this process", name=name)


def main(arguments: list[str]) -> int:
    """Run the child: answer requests until standard input ends."""
    sys.meta_path.insert(0, _WithoutPandas())
    gc.set_threshold(GC_THRESHOLD)
    limit = int(arguments[0]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return serve("head", _respond)


def _respond(request: bytes) -> bytes:
    return encode(FittedHead.of(fit_here(*decode(request, tuple[FitSpec, FitData]))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
