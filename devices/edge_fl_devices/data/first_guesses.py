"""First guesses: what a device predicted of each picture before a person labelled it on the label page, and why the picture was offered.

    FOLDER/labelling/first.guesses    a row per label, appended; no picture is in it

A guess made before a label was known is right as often as on new pictures, so their share is an accuracy that needs no held-out pictures.
Pictures that were offered because they are informative are harder than others: they stand for themselves only, all other labelled pictures
for the rest (`importance`). The agent finds the rows by its pictures' files, so it weights as the label page does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from edge_fl.data.grouping import Importance
from edge_fl.files.disk import reporting
from edge_fl.files.paths import text
from edge_fl.heads import promise as promises
from edge_fl.untrusted import NOT_JSON
from edge_fl_devices.storage.rows import RowFile

FILE = "labelling/first.guesses"
NEWEST = 50
"""Labels of which the share outside their sets is shown."""
MOST = 20_000
"""Rows after which the file is written anew with the newest half."""


class FirstGuess(Struct, frozen=True, array_like=True):
    """A labelled picture: the key of its file, its class, and the first guesses of the served head and of the fleet's head ("": none).

    chosen: whether it was offered because it is informative, not at random. unlabelled: pictures without a label after this one. undone:
    the label was taken back; another label of the same picture keeps the guesses. possible: the prediction set of the first guess, for
    `promise` (0: none was made).
    """

    key: bytes
    label: str
    guess: str = ""
    fleet: str = ""
    chosen: bool = False
    unlabelled: int = 0
    undone: bool = False
    possible: tuple[str, ...] = ()
    promise: float = 0.0

    @property
    def is_outside(self) -> bool:
        """Whether the label was not in its prediction set."""
        return self.label not in self.possible


class PromiseRecord(NamedTuple):
    """How prediction sets made before a label was known have kept their promise: `outside` of `labels`, and `promises.alarm` of them."""

    labels: int
    outside: int
    alarm: float

    @property
    def missed(self) -> float:
        """The share of labels that were outside, if it is an alarm; otherwise 0."""
        return self.outside / self.labels if self.alarm >= 1 else 0.0

    @property
    def words(self) -> str:
        """Like "in 57 of 60 cases the set had the right class"; "" without labels."""
        if not self.labels:
            return ""
        said = (
            f"in {self.labels - self.outside} of {self.labels} cases the prediction set had the right class"
        )
        return f"{said}: the promise is broken" if self.alarm >= 1 else said


def promise_record(rows: Iterable[FirstGuess]) -> PromiseRecord:
    """Of the newest NEWEST labels of samples that were not offered for being informative, and were not taken back; the alarm of all."""
    tested = [each for each in rows if each.promise and not each.chosen and not each.undone]
    alarm = promises.alarm((each.is_outside, 1 - each.promise) for each in tested)
    newest = tested[-NEWEST:]
    return PromiseRecord(len(newest), sum(each.is_outside for each in newest), alarm)


class GuessTotals(Struct, frozen=True):
    """How many labelled pictures had a guess, and how many were right; the same of those with guesses of both heads."""

    guesses: int = 0
    right: int = 0
    compared: int = 0
    compared_right: int = 0
    fleet_right: int = 0

    @property
    def words(self) -> str:
        """Like "first guesses: 41 of 60 right; fleet's head 38 of 60"; "" without any."""
        if not self.guesses:
            return ""
        said = f"first guesses: {self.right} of {self.guesses} right"
        return f"{said}; fleet's head {self.fleet_right} of {self.compared}" if self.compared else said


class FirstGuesses:
    """The first guesses of a device's folder; one process writes."""

    def __init__(self, folder: Path) -> None:
        self._file = RowFile(folder / FILE)
        self._rows = read(folder, self._file)

    @property
    def rows(self) -> Mapping[bytes, FirstGuess]:
        """By the key of the picture's file, the newest last."""
        return self._rows

    @property
    def totals(self) -> GuessTotals:
        """Of the labels that were not taken back."""
        guessed = [each for each in tuple(self._rows.values()) if each.guess and not each.undone]
        both = [each for each in guessed if each.fleet]
        return GuessTotals(
            len(guessed),
            sum(each.guess == each.label for each in guessed),
            len(both),
            sum(each.guess == each.label for each in both),
            sum(each.fleet == each.label for each in both),
        )

    def add(self, found: FirstGuess) -> None:
        """Append a label; the guesses of the picture's first label stay. Raises ArtefactError for a full disk."""
        if before := self._rows.get(found.key):
            first = {
                name: getattr(before, name) for name in ("guess", "fleet", "chosen", "possible", "promise")
            }
            found = replace(found, **first)
        self._put(found)

    def undo(self, key: bytes) -> None:
        """Take the label of a picture back. Raises ArtefactError for a full disk."""
        if before := self._rows.get(key):
            self._put(replace(before, undone=True))

    def _put(self, found: FirstGuess) -> None:
        rows = {key: each for key, each in self._rows.items() if key != found.key} | {found.key: found}
        with reporting(text(self._file.path)):
            if len(rows) > MOST:
                rows = dict([*rows.items()][-MOST // 2 :])
                self._file.replace(map(msgspec.msgpack.encode, rows.values()))
            else:
                self._file.append([msgspec.msgpack.encode(found)])
        self._rows = rows


def stamp(folder: Path) -> tuple[int, int]:
    """Size and time of the file, which change with every label; (0, 0) without one."""
    with suppress(OSError):
        found = (folder / FILE).stat()
        return found.st_size, found.st_mtime_ns
    return 0, 0


def read(folder: Path, file: RowFile | None = None) -> dict[bytes, FirstGuess]:
    """Read the first guesses of a device by the key of the picture's file, the newest last."""
    rows = dict[bytes, FirstGuess]()
    decoder = msgspec.msgpack.Decoder(FirstGuess)
    with suppress(*NOT_JSON):
        for row in map(decoder.decode, (file or RowFile(folder / FILE)).read()):
            rows.pop(row.key, None)
            rows[row.key] = row
    return rows


def importance(rows: Mapping[bytes, FirstGuess], keys: Iterable[bytes]) -> Importance:
    """How many files that of each labelled sample stands for [n], divided by the mean of all files; empty if all are alike.

    Those that were chosen stand for themselves, the others for the rest of labelled and unlabelled pictures. Without others the sum stays
    below n.
    """
    of_samples = [*keys]
    files = dict.fromkeys(of_samples)
    unlabelled = [*rows.values()][-1].unlabelled if rows else 0
    found = weights([bool((row := rows.get(key)) and row.chosen) for key in files], unlabelled)
    by_file = dict(zip(files, found, strict=False))
    return np.array([by_file[key] for key in of_samples]) if by_file else found


def weights(chosen: Sequence[bool], unlabelled: int) -> Importance:
    """As `importance`, by which labelled pictures were `chosen` and how many pictures are `unlabelled`."""
    of_chosen, n = sum(chosen), len(chosen)
    if not of_chosen or not unlabelled:
        return np.empty(0)
    one = n / (n + unlabelled)
    rest = (n - of_chosen * one) / max(n - of_chosen, 1)
    return np.where(chosen, one, rest)
