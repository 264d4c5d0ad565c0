"""The labelling session of a device: which picture is next, what people do with it, and how to undo that."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edge_fl.errors import DataError
from edge_fl_devices.capture.pool import Pool
from edge_fl_devices.labelling.learner import Learner
from edge_fl_devices.labelling.moves import NOTHING, Moves
from edge_fl_devices.labelling.offers import Offers

KEPT_ACTIONS = 200
UPCOMING = 3


@dataclass(frozen=True)
class ClassCount:
    """A class with its number of labelled pictures; `learned`: whether the release names it, so that heads learn it."""

    name: str
    pictures: int
    learned: bool


@dataclass(frozen=True)
class Guess:
    """A class with the probability that the current head gives it."""

    label: str
    probability: float


@dataclass(frozen=True)
class Shown:
    """A picture to label, with where and when (seconds since 1970) it was taken and the most probable classes."""

    name: str
    source: str
    time: float
    guesses: tuple[Guess, ...] = ()


@dataclass(frozen=True)
class View:
    """What the page shows. accuracy: measured by cross-validation on `measured` labelled pictures; None before that.

    upcoming: the pictures after this one, to load ahead. waiting: labelled pictures whose features are still to be computed. problem: why
    the last label was not learned, or "".
    """

    picture: Shown | None
    upcoming: tuple[str, ...]
    unlabelled: int
    classes: tuple[ClassCount, ...]
    accuracy: float | None
    measured: int
    release: int
    head: str
    fits: int
    busy: bool
    waiting: int
    problem: str


@dataclass(frozen=True)
class Done:
    """An action that can be undone, and the view after it."""

    action: str
    view: View


@dataclass(frozen=True)
class _Action:
    kind: Literal["label", "skip", "discard"]
    name: str
    path: Path | None = None


@dataclass
class Session:
    """Several people may label at once: every action names its picture and is refused if that was labelled or deleted meanwhile."""

    pool: Pool
    moves: Moves
    learner: Learner
    clock: Callable[[], float] = time.monotonic
    _offers: Offers = field(default_factory=Offers)
    _actions: OrderedDict[str, _Action] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def view(self, client: str) -> View:
        """Return what a client sees: its next picture, and the progress."""
        progress, predictor = self.learner.progress, self.learner.predictor()
        order = self.learner.order(self.pool.names())
        with self._lock:
            names = self._offers.next(client, order, self.clock(), 1 + UPCOMING)
        calibration = predictor.calibration if predictor else None
        measured = len(calibration.right) if calibration else 0
        return View(
            self._shown(names[0]) if names else None,
            tuple(names[1:]),
            len(order),
            tuple(
                ClassCount(name, count, not progress.classes or name in progress.classes)
                for name, count in self.learner.counts.items()
            ),
            calibration.accuracy if calibration and measured else None,
            measured,
            progress.release,
            predictor.head.kind if predictor else "",
            progress.fits,
            self.learner.is_busy,
            progress.missing,
            progress.problem,
        )

    def label(self, client: str, name: str, class_name: str) -> Done:
        """Label a picture. Raises DataError if there is no such class or picture, ArtefactError for a full disk."""
        if class_name not in self.learner.counts:
            known = ", ".join(self.learner.counts) or "none yet"
            raise DataError(f"class {class_name[:100]!r}: expected one of {known}", NOTHING)
        return self._done(client, _Action("label", name, self.moves.label(name, class_name)))

    def discard(self, client: str, name: str) -> Done:
        """Remove a picture that shows nothing to learn from. Raises as `label`."""
        return self._done(client, _Action("discard", name, self.moves.discard(name)))

    def skip(self, client: str, name: str) -> Done:
        """Offer a picture again after all others. Raises DataError if it is gone."""
        self.pool.path(name)
        with self._lock:
            self._offers.skip(name)
        return self._done(client, _Action("skip", name))

    def undo(self, client: str, action: str) -> View:
        """Undo an action of this client. Raises DataError if that is not possible any more, ArtefactError for a full disk."""
        with self._lock:
            found = self._actions.get(action)
        if found is None:
            raise DataError("undo: too long ago, or undone already", NOTHING)
        if found.path:
            self.moves.put_back(found.path)
        with self._lock:
            self._actions.pop(action, None)
            self._offers.restore(found.name)
            self._offers.show(client, found.name, self.clock())
        self.learner.look()
        return self.view(client)

    def add_class(self, client: str, name: str) -> View:
        """Create the folder of a class. Raises DataError for an unusable name, ArtefactError for a full disk."""
        self.moves.add_class(name.strip())
        self.learner.count()
        return self.view(client)

    def _done(self, client: str, action: _Action) -> Done:
        id = secrets.token_hex(8)
        with self._lock:
            self._actions[id] = action
            while len(self._actions) > KEPT_ACTIONS:
                self._actions.popitem(last=False)
        if action.path:
            self.learner.count()
            self.learner.look()
        return Done(id, self.view(client))

    def _shown(self, name: str) -> Shown:
        entry, found = self.pool.entries().get(name), self.learner.prediction(name)
        guesses = tuple(Guess(each.label, each.probability) for each in found.top) if found else ()
        return Shown(name, entry.source if entry else "", entry.time if entry else 0.0, guesses)
