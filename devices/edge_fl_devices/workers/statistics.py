"""What a head-only device may add to a sum of class statistics over devices, and what it has added.

    FOLDER/statistics/next.safetensors    the vector for the next sum, with the hashes of its pictures' features; made after every fit
    FOLDER/statistics/sent.json           the pictures that are in a sum, by hash

Every labelled picture is in at most one sum per extractor: the difference of two sums says nothing of the devices that are in both. After a
first sum a device takes part again once its labels have grown by GROWTH, with the new pictures alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import Struct, json
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from edge_fl.errors import StatisticsError
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.heads.statistics import class_statistics
from edge_fl_devices.storage import read_json

GROWTH = 0.5
"""Share by which the labels of a device must have grown since its last sum."""
NEXT, SENT = "next.safetensors", "sent.json"


class Sent(Struct, frozen=True):
    """The pictures of a device that are in a sum: class by hash of the features from one `extractor`; `labels` it had at the last sum."""

    extractor: str = ""
    labels: int = 0
    counted: dict[str, int] = {}


@dataclass(frozen=True, eq=False)
class StatisticsOffer:
    """The vector for the next sum on a release, with the pictures in it as in `Sent`."""

    vector: NDArray[np.float64]
    release: int
    pictures: Sent


class StatisticsOffers:
    """The offers of one device, in `folder`. The vectors given out are also in memory, by release."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "statistics"
        self._given: dict[int, StatisticsOffer] = {}

    def prepare(
        self, release: int, extractor: str, z: NDArray[np.float32], y: NDArray[np.int64], classes: int
    ) -> None:
        """Store the offer of the labelled pictures with features z [n, d] and class ids y [n], or remove it if there is none.

        Raises ArtefactError if the disk fails, StatisticsError for too many classes.
        """
        sent, keys = self._sent(extractor), class_statistics.keys_of(z)
        rows = class_statistics.uncounted(keys, y, sent.counted)
        if not len(rows) or len(np.unique(y)) < 2 or len(y) < (1 + GROWTH) * sent.labels:
            (self._folder / NEXT).unlink(missing_ok=True)
            return
        vector = class_statistics.of(z, y, classes, rows).flat
        pictures = Sent(extractor, len(y), {keys[row]: int(y[row]) for row in rows})
        described = {"release": str(release), "pictures": json.encode(pictures).decode()}
        self._write(NEXT, save({"vector": vector}, described))

    def give(self, release: int, length: int) -> NDArray[np.float64] | None:
        """Return the vector for a sum of `length` numbers; None if there is nothing to add. Raises StatisticsError for another length."""
        found = self._next()
        if found is None or found.release != release:
            return None
        if found.pictures.counted.keys() & self._sent(found.pictures.extractor).counted.keys():
            return None  # the power was cut after `add`
        if len(found.vector) != length:
            raise StatisticsError(
                f"a sum of {length} numbers, this device has {len(found.vector)}", "nothing was sent"
            )
        self._given = {release: found}
        return found.vector

    def add(self, release: int) -> None:
        """Remember that the server may know a sum with the vector given for this release."""
        if (given := self._given.pop(release, None)) is None:
            return
        sent = self._sent(given.pictures.extractor)
        counted = {**sent.counted, **given.pictures.counted}
        self._write(SENT, json.encode(Sent(given.pictures.extractor, given.pictures.labels, counted)))
        (self._folder / NEXT).unlink(missing_ok=True)

    def _sent(self, extractor: str) -> Sent:
        """What is in sums of features from this extractor; those of another one are other numbers."""
        found = read_json(self._folder / SENT, Sent)
        return found if found and found.extractor == extractor else Sent(extractor)

    def _next(self) -> StatisticsOffer | None:
        try:
            with safe_open(self._folder / NEXT, "numpy") as file:
                described = file.metadata()
                pictures = json.decode(described["pictures"], type=Sent)
                return StatisticsOffer(file.get_tensor("vector"), int(described["release"]), pictures)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return None

    def _write(self, name: str, content: bytes) -> None:
        with reporting(str(self._folder / name)):
            self._folder.mkdir(parents=True, exist_ok=True)
            with atomic.writing(self._folder / name, private=True) as file:
                file.write(content)
