"""What a device may add to a sum of class statistics over devices, and what it has added.

    FOLDER/statistics/next.msgpack    the vector for the next sum, with the hashes of its pictures' features; made after every fit
                                      on a release that asks for sums
    FOLDER/statistics/trained.msgpack the same of a full device, made with the extractor of a run's final round
    FOLDER/statistics/sent.json       the pictures of which a vector left, or may have left, by hash
    FOLDER/statistics/own.msgpack     what the device has added, by the key of the sum
    FOLDER/statistics/survivals.msgpack    its histograms for the next sum of SURVIVALS (`edge_fl.heads.promise`)
    FOLDER/statistics/survivals.json  the extractor of which histograms left, or may have left

A prior is used without the device's own part of it (`without_own`): its pictures count once, as labels, and cross-validation predicts
pictures that the prior does not know.

Every labelled picture is in one vector per extractor that leaves, and every vector in one sum. After a first sum a device takes part again
once its labels have grown by GROWTH, with the new pictures alone. A full device has no release: it takes part once for an extractor, in
the run that trained it. Should it become head-only later, its release's features are those of ONNX, whose hashes are others: then a
picture may be in two sums.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
from msgspec import Struct, json
from msgspec.structs import replace
from numpy.typing import NDArray

from edge_fl.errors import StatisticsError
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.files.paths import text
from edge_fl.files.shared import make_folder
from edge_fl.heads.class_statistics import sums
from edge_fl.heads.class_statistics.prior import PRIOR
from edge_fl.heads.class_statistics.sums import ADDED, ALL_CLASSES, LEFT_OUT, Shape, key_of
from edge_fl.heads.head import Array
from edge_fl.secure import fixed_point
from edge_fl.untrusted import NOT_JSON
from edge_fl_devices.child import decode, encode
from edge_fl_devices.storage import read_json

log = logging.getLogger(__name__)

GROWTH = 0.5
"""Share by which the labels of a device must have grown since its last sum."""
HISTOGRAMS, HISTOGRAMS_SENT = "survivals.msgpack", "survivals.json"
NEXT, TRAINED, SENT, OWN = "next.msgpack", "trained.msgpack", "sent.json", "own.msgpack"
T = TypeVar("T")


class Sent(Struct, frozen=True):
    """The pictures of which a vector left: class by hash of the features from one `extractor`; `labels` the device had at the last one."""

    extractor: str = ""
    labels: int = 0
    counted: dict[str, int] = {}


class StatisticsOffer(Struct, frozen=True, eq=False):
    """The vector for the next sum on a release, with its shape, the pictures in it as in `Sent`, and the stamp of the data it is of.

    trained: RUN/ROUND of a full device's extractor, which is of no release yet ("": of a release).
    """

    vector: Array
    shape: Shape
    release: int
    pictures: Sent
    stamp: str
    trained: str = ""


class SurvivalsOffer(Struct, frozen=True, eq=False):
    """Histograms float64 [2, BINS] for the next sum on a release of an extractor, and the stamp of the data they are of."""

    rows: Array
    release: int
    extractor: str
    stamp: str


class Added(Struct, frozen=True):
    """What `device` has added to sums of features from one `extractor`: `arrays` by KEY.NAME, their ids by key; `sum`: the last."""

    extractor: str = ""
    device: str = ""
    sum: str = ""
    ids: dict[str, str] = {}
    arrays: dict[str, Array] = {}


class StatisticsOffers:
    """The offers of one device, in `folder`. A vector is given to one sum at a time, and for good with `commit`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "statistics"
        self._given: tuple[str, StatisticsOffer] | None = None
        self._given_rows: tuple[str, SurvivalsOffer] | None = None

    def prepare_survivals(
        self, release: int, extractor: str, rows: NDArray[np.float64], stamp: str = ""
    ) -> None:
        """Store the histograms [2, BINS] of a served head for the next sum, unless some left for this extractor; without rows remove them.

        So sums over nearly the same devices do not tell one of them. Raises ArtefactError if the disk fails.
        """
        if not len(rows) or self._left(extractor):
            (self._folder / HISTOGRAMS).unlink(missing_ok=True)
            return
        self._write(HISTOGRAMS, encode(SurvivalsOffer(rows, release, extractor, stamp)))

    def give_survivals(
        self, id: str, release: int, length: int, stamp: str = ""
    ) -> NDArray[np.float64] | None:
        """Return the histograms for the sum `id` of `length` numbers, as `give`."""
        self._given_rows = None
        found = self._read(HISTOGRAMS, SurvivalsOffer)
        if found is None or (found.release, found.stamp) != (release, stamp) or self._left(found.extractor):
            return None
        if found.rows.size != length:
            raise StatisticsError(
                f"a sum of {length} numbers, this device has {found.rows.size}", "nothing was sent"
            )
        self._given_rows = (id, found)
        return found.rows.ravel()

    def commit_survivals(self, id: str) -> None:
        """Record that the histograms of the sum `id` leave, or may have left. Raises as `commit`."""
        given, self._given_rows = self._given_rows, None
        if given is None or given[0] != id:
            raise StatisticsError(f"the histograms are not those of the sum {id}", "nothing was sent")
        self._write(HISTOGRAMS_SENT, json.encode(Sent(given[1].extractor)))
        (self._folder / HISTOGRAMS).unlink(missing_ok=True)

    def _left(self, extractor: str) -> bool:
        """Whether histograms of this extractor left; also if the record of it is damaged."""
        path = self._folder / HISTOGRAMS_SENT
        found = read_json(path, Sent)
        return path.exists() if found is None else found.extractor == extractor

    def prepare(
        self,
        release: int,
        extractor: str,
        z: NDArray[np.float32],
        y: NDArray[np.int64],
        classes: int,
        stamp: str = "",
    ) -> None:
        """Store the offer of the labelled pictures with features z [n, d] and class ids y [n], or remove it if there is none.

        stamp: of the data; the offer is made as long as they are these.
        Raises ArtefactError if the disk fails, StatisticsError for too many classes.
        """
        sent, keys = self._sent(extractor), sums.keys_of(z)
        rows = sums.uncounted(keys, y, sent.counted)
        if not len(rows) or len(np.unique(y)) < 2 or len(y) < (1 + GROWTH) * sent.labels:
            (self._folder / NEXT).unlink(missing_ok=True)
            return
        found = sums.of(z, y, classes, rows)
        pictures = Sent(extractor, len(y), {keys[row]: int(y[row]) for row in rows})
        self._write(NEXT, encode(StatisticsOffer(found.flat, found.shape, release, pictures, stamp)))

    def prepare_trained(
        self, trained: str, z: NDArray[np.float32], y: NDArray[np.int64], classes: int, stamp: str = ""
    ) -> None:
        """Store the offer of a full device's labelled pictures, as `prepare` does; features z of the extractor of RUN/ROUND `trained`."""
        if len(np.unique(y)) < 2:
            (self._folder / TRAINED).unlink(missing_ok=True)
            return
        keys = sums.keys_of(z)
        rows = sums.uncounted(keys, y, {})
        found = sums.of(z, y, classes, rows)
        pictures = Sent("", len(y), {keys[row]: int(y[row]) for row in rows})
        self._write(TRAINED, encode(StatisticsOffer(found.flat, found.shape, 0, pictures, stamp, trained)))

    def withdraw(self) -> None:
        """Remove the offers: the release does not ask for sums."""
        for name in (NEXT, HISTOGRAMS):
            (self._folder / name).unlink(missing_ok=True)

    def give(
        self,
        id: str,
        release: int,
        length: int,
        stamp: str = "",
        *,
        extractor: str = "",
        trained: str = "",
    ) -> NDArray[np.float64] | None:
        """Return the vector for the sum `id` of `length` numbers; None if there is nothing to add.

        extractor, trained: as of `SumRequest`. The sum that it was given to before does not have it any more. stamp: of the data as they
        are now. If they are others, a deleted picture may be in the vector; the next fit prepares another one. Raises StatisticsError for
        another length.
        """
        self._given = None
        found = self._read(NEXT, StatisticsOffer)
        if found is None or found.release != release:
            found = self._trained(extractor, trained)
        if found is None or found.stamp != stamp:
            return None
        if found.pictures.counted.keys() & self._sent(found.pictures.extractor).counted.keys():
            return None  # the power was cut during `commit`
        if len(found.vector) != length:
            raise StatisticsError(
                f"a sum of {length} numbers, this device has {len(found.vector)}", "nothing was sent"
            )
        self._given = (id, found)
        return found.vector

    def _trained(self, extractor: str, trained: str) -> StatisticsOffer | None:
        """The offer of a full device, if the request is for its extractor and nothing of it has left."""
        found = self._read(TRAINED, StatisticsOffer) if extractor and trained else None
        if found is None or found.trained != trained or self._sent(extractor).counted:
            return None
        return replace(found, pictures=replace(found.pictures, extractor=extractor))

    def commit(self, id: str, clip: float = 0.0, device: str = "", *, leaves: bool = True) -> None:
        """Record that the vector of `device` for the sum `id`, shortened to the norm `clip`, leaves: no picture of it is offered again.

        Without `leaves` it may have left before, and is no part of this sum. Raises StatisticsError for a vector that this sum does not
        have, ArtefactError if the disk fails: then nothing may leave.
        """
        given, self._given = self._given, None
        if given is None or given[0] != id:
            raise StatisticsError(f"the vector is not that of the sum {id}", "nothing was sent")
        offer = given[1]
        extractor = offer.pictures.extractor
        sent = self._sent(extractor)
        counted = {**sent.counted, **offer.pictures.counted}
        self._write(SENT, json.encode(Sent(extractor, offer.pictures.labels, counted)))
        if leaves:
            own = sums.from_flat(fixed_point.clipped(offer.vector, clip), offer.shape)
            before, key = self._added(extractor), str(key_of(id))
            arrays = {**before.arrays, **{f"{key}.{name}": array for name, array in own.addends().items()}}
            self._write(OWN, encode(Added(extractor, device, id, {**before.ids, key: id}, arrays)))
        (self._folder / (TRAINED if offer.trained else NEXT)).unlink(missing_ok=True)

    def settle(self, id: str, *, added: bool) -> None:
        """Note whether the vector of the last `commit` is in its sum. If not, no prior contains it, but its pictures have left."""
        own = self._added()
        if not added and own.sum == id:
            gone = str(key_of(id))
            arrays = {name: array for name, array in own.arrays.items() if name.partition(".")[0] != gone}
            ids = {key: other for key, other in own.ids.items() if key != gone}
            self._write(OWN, encode(replace(own, sum="", ids=ids, arrays=arrays)))

    def without_own(
        self, extras: Mapping[str, Mapping[str, Array]], extractor: str
    ) -> dict[str, Mapping[str, Array]]:
        """Return the extras of a release, its prior without what this device has added to it; a damaged one as it is."""
        prior, own = extras.get(PRIOR, {}), self._added(extractor)
        keys = [int(key) for key in prior.get(ADDED, ()) if str(key) in own.ids]
        if not keys:
            return dict(extras)
        try:
            found = sums.from_arrays(prior)
            for key in keys:
                arrays = {name: own.arrays[f"{key}.{name}"] for name in sums.SUMS}
                ours = sums.left_out_key(own.ids[str(key)], own.device)
                listed = [
                    int(label) for at, who, label in prior.get(LEFT_OUT, ()) if (at, who) == (key, ours)
                ]
                if ALL_CLASSES not in listed:
                    found = found.without(sums.from_arrays(arrays).left_out(np.array(listed, np.int64)))
        except (StatisticsError, ValueError, IndexError, KeyError) as error:
            log.warning("own part of the prior: %s", error)
            return dict(extras)
        kept = {name: array for name, array in prior.items() if name == sums.SURVIVALS}
        return {**extras, PRIOR: {**found.addends(), **kept}}

    def _added(self, extractor: str = "") -> Added:
        """What the device has added to sums of features from this extractor ("": the last)."""
        found = self._read(OWN, Added) or Added()
        return found if extractor in ("", found.extractor) else Added()

    def _sent(self, extractor: str) -> Sent:
        """What has left of features from this extractor; those of another one are other numbers.

        Raises StatisticsError if the record is damaged.
        """
        path = self._folder / SENT
        if (found := read_json(path, Sent)) is None and path.exists():
            raise StatisticsError(
                f"{text(path)}: damaged: which pictures have left is not known", "this device adds to no sums"
            )
        return found if found and found.extractor == extractor else Sent(extractor)

    def _read(self, name: str, kind: type[T]) -> T | None:
        """Return the content of a file; None if it is missing or damaged."""
        with suppress(OSError, TypeError, ValueError, *NOT_JSON):
            return decode((self._folder / name).read_bytes(), kind)
        return None

    def _write(self, name: str, content: bytes) -> None:
        with reporting(text(self._folder / name)):
            make_folder(self._folder)
            with atomic.writing(self._folder / name, private=True) as file:
                file.write(content)
