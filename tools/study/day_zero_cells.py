"""One cell of `tools.study.day_zero`: features of the devices' images on one trained extractor, and what its fleet knows.

A cell is an .npz file, named DATASET-METHOD[-DOMAIN]-SEED.npz, with these arrays (D head-only devices, F full devices, C classes):

    z float32 [n, d], y int64 [n]       features and labels of the head-only devices' images
    device int64 [n]                    the device of each image, 0..D-1
    test bool [n]                       whether it is for testing; a device's other images are its labels, in the order in which it gets
                                        them: k labels are the first k
    fleet_z [m, d], fleet_y [m], fleet_device [m]    the same of the full devices' training images; fleet_device is 0..F-1
    counts int64 [F, C]                 training images of each full device by class
    weight float32 [C, d], bias [C]     the method's shared linear head, logits z @ weight.T + bias; absent where it has none
    about str                           JSON of `About`

Features are those of the exported extractor, as a head-only device computes them.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from edge_fl.data.samples import Array
from edge_fl.errors import DataError
from edge_fl.files import npz
from edge_fl.heads import HeadPlan
from edge_fl.heads.head import Extras


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a cell is of: `rows` names the row of the table for each head-only device, `head` the shared head ("": none).

    `unit_norm`: every feature vector has length 1. `plan`: how devices fit the method's head today. `settings`: what the cell was made
    with; a cell that was made with other settings is made again.
    """

    dataset: str
    method: str
    seed: int
    rows: tuple[str, ...]
    classes: int
    unit_norm: bool
    plan: HeadPlan
    head: str = ""
    settings: str = ""


@dataclass(frozen=True, eq=False)
class Cell:
    """The content of a cell's file. `weight` and `bias` are empty where the method has no shared head."""

    about: About
    z: Array
    y: Array
    device: Array
    test: Array
    fleet_z: Array
    fleet_y: Array
    fleet_device: Array
    counts: Array
    weight: Array
    bias: Array

    @property
    def extras(self) -> Extras:
        """The shared head, as a release brings it."""
        return {self.about.head: {"weight": self.weight, "bias": self.bias}} if self.about.head else {}

    def labels(self, device: int) -> Array:
        """Positions of a device's images that are not for testing, in the order in which it gets their labels."""
        return np.flatnonzero((self.device == device) & ~self.test)

    def tests(self, device: int) -> Array:
        """Positions of a device's images for testing."""
        return np.flatnonzero((self.device == device) & self.test)


HEAD = ("weight", "bias")
AnyCell = TypeVar("AnyCell", bound=Cell)


def arrays_of(kind: type[Cell]) -> list[str]:
    """Names of the arrays of a kind of cell."""
    return [field.name for field in fields(kind) if field.name != "about"]


def write(path: Path, cell: Cell) -> None:
    """Write a cell's file atomically."""
    names = [name for name in arrays_of(type(cell)) if cell.about.head or name not in HEAD]
    arrays = {name: getattr(cell, name) for name in names}
    about = np.array(msgspec.json.encode(cell.about).decode())
    path.parent.mkdir(parents=True, exist_ok=True)
    npz.write(path, {**arrays, "about": about}, compress=False)


def read(path: Path, kind: type[AnyCell] = Cell) -> AnyCell:
    """Read a cell's file, of this kind. Raises DataError for anything else."""
    content = npz.read(path)
    empty = {name: np.empty(0, np.float32) for name in HEAD}
    try:
        about = msgspec.json.decode(str(content["about"]), type=About)
        expected = {
            name: content[name] if about.head or name not in HEAD else empty[name] for name in arrays_of(kind)
        }
    except (KeyError, msgspec.DecodeError) as error:
        raise DataError(f"{path}: not a cell of the study ({error}); expected one that it wrote") from error
    return kind(about, **expected)
