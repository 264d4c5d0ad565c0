"""The labelling session of a device: which file each person labels next, what people do with it, and how to undo that."""

from __future__ import annotations

import hashlib
import random
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from edge_fl import errors
from edge_fl.data import grouping
from edge_fl.data.class_names import class_of
from edge_fl.errors import ArtefactError, DataError
from edge_fl.heads.probability_calibration import LEAST_MEASURED, Calibration
from edge_fl.heads.wording import MeasuredAccuracy
from edge_fl.inputs import Kind
from edge_fl.modalities import ABOUT, UnusableFileError
from edge_fl_devices.data.file_index import RECORDED
from edge_fl_devices.data.first_guesses import FirstGuess
from edge_fl_devices.data.record import MOST_NAMED
from edge_fl_devices.features.feature_rows import file_key
from edge_fl_devices.serving.predict import ClassCandidate
from edge_fl_maker.capture.pools import Pool
from edge_fl_maker.labelling.learner import (
    EXAMINING,
    NOT_EXAMINED,
    DoubtedLabel,
    ExaminedLabels,
    Learner,
    LearnerProgress,
)
from edge_fl_maker.labelling.moves import NOTHING, Moves, shortened
from edge_fl_maker.labelling.suggestions import Suggestions

OFFER_S = 60.0
"""Time for which a file is shown to one person only, after the last look of that person's page."""
FORGOTTEN_S = 3600.0
"""Time after which a page that does not look is forgotten."""
KEPT_ACTIONS = 200
UPCOMING = 3
RANDOM_EVERY = 3
"""One of so many files is offered at random, not because it is informative."""
DRAWN = 4
"""Files that are drawn ahead."""
MOST_DOUBTED = 12
"""Labels to look at that are shown at a time."""


@dataclass
class Offers:
    """Files on the screens of clients, given by random ids, and skipped files in the order of skipping.

    A file is on the screen of one client: a page that was away for longer than OFFER_S keeps its file until another one is given it.
    """

    _shown: dict[str, tuple[str, float]] = field(default_factory=dict)
    _skipped: dict[str, None] = field(default_factory=dict)

    def next(self, client: str, order: Sequence[str], now_s: float, count: int = 1) -> list[str]:
        """Return the first `count` files for a client: the one on its screen, then those of `order`, skipped ones last.

        Files on the screens of others are left out.
        """
        present = set(order)
        self._skipped = {name: None for name in self._skipped if name in present}
        mine, others = self.on_screen(client), self._others(client, now_s)
        names = dict.fromkeys([mine, *order]) if mine in present else dict.fromkeys(order)
        fresh = [name for name in names if name not in self._skipped]
        found = [name for name in (*fresh, *self._skipped) if name not in others][:count]
        self.show(client, found[0] if found else "", now_s)
        return found

    def on_screen(self, client: str) -> str:
        """Return the file that was last given to a client and to no other one since; "" if there is none."""
        return self._shown.get(client, ("", 0.0))[0]

    @property
    def on_screens(self) -> set[str]:
        """The files that were last given to clients."""
        return {name for name, _ in self._shown.values() if name}

    def show(self, client: str, name: str, now_s: float) -> None:
        """Put a file on the screen of a client, unless it is on another one."""
        if name in self._others(client, now_s):
            return
        self._shown = {
            other: (shown, until_s)
            for other, (shown, until_s) in self._shown.items()
            if shown != name and until_s + FORGOTTEN_S > now_s
        }
        self._shown[client] = (name, now_s + OFFER_S)

    def skip(self, name: str) -> None:
        """Offer a file after all others."""
        self._skipped.pop(name, None)
        self._skipped[name] = None

    def restore(self, name: str) -> None:
        """Undo `skip`."""
        self._skipped.pop(name, None)

    def _others(self, client: str, now_s: float) -> set[str]:
        return {
            name
            for other, (name, until_s) in self._shown.items()
            if name and other != client and until_s > now_s
        }


@dataclass(frozen=True)
class ClassCount:
    """A class with its number of labelled files; `learned`: whether the release names it, so that heads learn it."""

    name: str
    count: int
    learned: bool


@dataclass(frozen=True)
class Upcoming:
    """A file of the pool: its name and the version of its file, which changes with the contents."""

    name: str
    version: str


@dataclass(frozen=True)
class Shown:
    """A picture or a recording to label, with where and when (seconds since 1970) it was taken and the most probable classes.

    about: size of a recording in words. remarks: on its quality, or why it cannot be shown.
    """

    name: str
    version: str
    source: str
    time: float
    guesses: tuple[ClassCandidate, ...] = ()
    about: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suggestion:
    """Files that resemble each other and none of the classes; `id` changes with them."""

    id: str
    files: tuple[Upcoming, ...]


@dataclass(frozen=True)
class View:
    """What the page shows. accuracy: measured by cross-validation on `measured` labelled samples, weighted back to all samples; None if
    these are too few. On new scenes it is between `low` and `high`, with a probability of 90 %; fleet: that of the fleet's head on the same
    ones, None without one. accuracy_words, head_words: all of that, and what the head is, in words. remark: why it says little, or "".

    first_guesses: how many files were classified correctly before they were labelled, or "". contradiction: whether labels contradict
    the fleet's head, or "".
    examined: what was found about the labels when a person asked last, those left out that were moved, deleted or called right since.
    upcoming: the files after this one, to load ahead. waiting: labelled files whose features are still to be computed. problem: why
    the last label was not learned, or "". kind: what is labelled, and word: what a file of that is called. forecast: what more labels are
    expected to add, and the class that is right least often, or "". suggestion: files that may be of a class that is missing.
    """

    item: Shown | None
    upcoming: tuple[Upcoming, ...]
    unlabelled: int
    classes: tuple[ClassCount, ...]
    accuracy: float | None
    measured: int
    low: float
    high: float
    remark: str
    release: int
    head: str
    fits: int
    busy: bool
    waiting: int
    problem: str
    fleet: float | None = None
    accuracy_words: str = ""
    head_words: str = ""
    first_guesses: str = ""
    contradiction: str = ""
    kind: Kind = "picture"
    word: str = "picture"
    forecast: str = ""
    examined: ExaminedLabels = NOT_EXAMINED
    suggestion: Suggestion | None = None


@dataclass(frozen=True)
class ActionDone:
    """An action that can be undone, and the view after it."""

    action: str
    view: View


@dataclass(frozen=True)
class NewClass:
    """A class that was added, under its name, with how that differs from what was asked for, and the view after it."""

    name: str
    remark: str
    view: View


@dataclass(frozen=True)
class _Moved:
    """A file that was labelled or discarded, and the key of its first guess, if it has one."""

    path: Path
    key: bytes = b""


@dataclass(frozen=True)
class _Action:
    kind: Literal["label", "skip", "discard", "correct", "approve"]
    name: str
    moved: tuple[_Moved, ...] = ()
    approved: bytes = b""


@dataclass
class LabelSession:
    """Several people may label at once: every action names its file and the version of that.

    It is refused unless that file was last given to this client, to no other one since, and is still the same.
    """

    pool: Pool
    moves: Moves
    learner: Learner
    suggestions: Suggestions
    clock: Callable[[], float] = time.monotonic
    _offers: Offers = field(default_factory=Offers)
    _actions: OrderedDict[str, _Action] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _drawn: dict[str, None] = field(default_factory=dict)
    _rng: random.Random = field(default_factory=random.SystemRandom)

    def view(self, client: str) -> View:
        """Return what a client sees: its next file, and the progress."""
        busy = self.learner.is_busy  # first: what follows is then final, or shown as not final
        progress, predictor = self.learner.progress, self.learner.predictor()
        kind = self.learner.kind
        order = self._mixed(self.learner.order([] if kind == "table" else self.pool.names()))
        offered = self._offer(client, order)
        calibration = predictor.calibration if predictor else None
        measured = len(calibration.right) if calibration else 0
        found = MeasuredAccuracy.of_calibration(calibration) if calibration else None
        return View(
            self._shown(offered[0]) if offered else None,
            offered[1:],
            len(order),
            tuple(
                ClassCount(name, count, not progress.classes or name in progress.classes)
                for name, count in self.learner.counts.items()
            ),
            found.accuracy if found else None,
            measured,
            *(calibration.interval if calibration else (0.0, 1.0)),
            _remark(calibration, progress, kind),
            progress.release,
            predictor.head.kind if predictor else "",
            progress.fits,
            busy,
            progress.missing,
            progress.problem,
            found.fleet if found else None,
            found.words if found else "",
            predictor.head_words if predictor else "",
            self.learner.guesses.totals.words,
            predictor.contradiction if predictor else "",
            kind,
            word_of(kind),
            predictor.forecast if predictor else "",
            self._examined(),
            self._suggestion(),
        )

    def examine(self, client: str) -> View:
        """Look for labels that are probably wrong; a later view has them."""
        self.learner.examine()
        return self.view(client)

    def correct(self, client: str, name: str, version: str, class_name: str) -> ActionDone:
        """Move a doubted label's file to another class. Raises as `label`, also for a file that was changed since."""
        self._require_class(class_name)
        path, _ = self._doubted(name, version)
        moved = self.moves.relabel(path, class_name)
        self._guess_of(moved, class_name)
        return self._done(client, _Action("correct", name, (_Moved(moved),)))

    def approve(self, client: str, name: str, version: str) -> ActionDone:
        """Remember that a doubted label is right. Raises as `correct`."""
        _, found = self._doubted(name, version)
        self.learner.right.add(bytes.fromhex(found.version), found.class_name)
        return self._done(client, _Action("approve", name, approved=bytes.fromhex(found.version)))

    def label(self, client: str, name: str, version: str, class_name: str) -> ActionDone:
        """Label a file. Raises DataError if there is no such class or file, ArtefactError for a full disk."""
        self._require_class(class_name)
        self._require_on_screen(client, name, version)
        guess = self._guess(name, bytes.fromhex(version), class_name)
        return self._done(client, _Action("label", name, (self._label(name, class_name, guess),)))

    def _label(self, name: str, class_name: str, guess: FirstGuess) -> _Moved:
        path, key = self.moves.label(name, class_name), b""
        with suppress(OSError, ArtefactError):  # the label counts without a record of its guess
            key = file_key(path)
            self.learner.guesses.add(replace(guess, key=key, unlabelled=len(self.pool.names())))
        return _Moved(path, key)

    def name_suggestion(self, client: str, suggestion: str, class_name: str) -> ActionDone:
        """Label all files of a suggestion, with a new class or one that is there. Those that were labelled meanwhile are left out.

        Raises DataError if it is another suggestion by now, or as `add_class`.
        """
        files = self._require_suggestion(suggestion)
        added, _ = shortened(class_name)
        if added not in self.learner.counts:
            self.moves.add_class(added, self.learner.counts)
            self.learner.count()
        moved = list[_Moved]()
        for each in files:
            guess = replace(self._guess(each.name, bytes.fromhex(each.version), added), chosen=True)
            with suppress(DataError):
                moved.append(self._label(each.name, added, guess))
        if not moved:
            raise DataError("suggestion: all of its files were labelled or dropped at this moment", NOTHING)
        return self._done(client, _Action("label", files[0].name, tuple(moved)))

    def dismiss_suggestion(self, client: str, suggestion: str) -> View:
        """Suggest these files no more. Raises as `name_suggestion`, ArtefactError for a full disk."""
        files = self._require_suggestion(suggestion)
        present = self._keys(self.pool.names())
        self.suggestions.dismiss([bytes.fromhex(each.version) for each in files], present.values())
        return self.view(client)

    def discard(self, client: str, name: str, version: str) -> ActionDone:
        """Remove a file that shows nothing to learn from. Raises as `label`."""
        self._require_on_screen(client, name, version)
        return self._done(client, _Action("discard", name, (_Moved(self.moves.discard(name)),)))

    def skip(self, client: str, name: str, version: str) -> ActionDone:
        """Offer a file again after all others. Raises DataError if it is not on this client's screen."""
        self._require_on_screen(client, name, version)
        with self._lock:
            self._offers.skip(name)
        return self._done(client, _Action("skip", name))

    def undo(self, client: str, action: str) -> View:
        """Undo an action of this client. Raises DataError if that is not possible any more, ArtefactError for a full disk."""
        with self._lock:
            found = self._actions.get(action)
        if found is None:
            raise DataError("undo: too long ago, or undone already", NOTHING)
        if found.kind in ("correct", "approve"):
            return self._undone(client, action, found)
        problem, restored = None, 0
        for each in found.moved:
            try:
                self.moves.put_back(each.path)
            except DataError as error:  # the others are put back
                problem = error
                continue
            restored += 1
            with suppress(ArtefactError):
                self.learner.guesses.undo(each.key)
        if problem and not restored:
            raise problem
        with self._lock:
            self._actions.pop(action, None)
            self._offers.restore(found.name)
            self._offers.show(client, found.name, self.clock())
        self.learner.look()
        return self.view(client)

    def add_class(self, client: str, name: str) -> NewClass:
        """Create the folder of a class, with at most LONGEST characters of its name.

        Raises DataError for an unusable name or one that is already there, ArtefactError for a full disk.
        """
        added, remark = shortened(name)
        self.moves.add_class(added, self.learner.counts)
        self.learner.count()
        return NewClass(added, remark, self.view(client))

    def file(self, name: str, version: str) -> Path:
        """Return the path of a file. Raises DataError if it is gone, or is another one than `version`, unless that is ""."""
        if name in {each.name for each in self.learner.examined.labels}:
            return self._doubted(name, version)[0]
        path = self.pool.path(name)
        if version not in ("", self._version(name)):
            raise DataError(f"{name}: the file was changed since it was offered", NOTHING)
        return path

    def _undone(self, client: str, action: str, found: _Action) -> View:
        """Undo a corrected or an approved label."""
        before = Path(found.name)
        if found.approved:
            self.learner.right.undo(found.approved, class_of(before.parent.name))
        for each in found.moved:
            back = self.moves.relabel(each.path, before.parent.name, before.name)
            self._guess_of(back, before.parent.name)
        with self._lock:
            self._actions.pop(action, None)
        self.learner.count()
        self.learner.look()
        return self.view(client)

    def _examined(self) -> ExaminedLabels:
        """What was found about labels, as far as it still holds."""
        found = self.learner.examined
        if found.words == EXAMINING and not self.learner.progress.release:
            return replaced(found, words="labels are examined once there is a release")
        return replaced(found, labels=tuple(filter(self._holds, found.labels))[:MOST_DOUBTED])

    def _holds(self, label: DoubtedLabel) -> bool:
        """Whether a doubted label's file is still the same, and nobody has called it right."""
        key = bytes.fromhex(label.version)
        with suppress(OSError):
            is_same = file_key(self.learner.data / label.name) == key
            return is_same and (key, label.class_name) not in self.learner.right
        return False

    def _doubted(self, name: str, version: str) -> tuple[Path, DoubtedLabel]:
        """The file of a doubted label. Raises DataError unless it is still as it was examined."""
        for each in self.learner.examined.labels:
            if each.name == name and version in ("", each.version) and self._holds(each):
                return self.learner.data / name, each
        raise DataError(
            f"{name[:100]}: not among the labels to look at; changed, moved or called right since", NOTHING
        )

    def _guess_of(self, path: Path, class_name: str) -> None:
        """Let the first guess of a file count against its new class."""
        with suppress(OSError, ArtefactError):
            if row := self.learner.guesses.rows.get(file_key(path)):
                self.learner.guesses.add(replace(row, label=class_name))

    def _require_class(self, class_name: str) -> None:
        if class_name not in self.learner.counts:
            known = ", ".join(self.learner.counts) or "none yet"
            raise DataError(f"class {class_name[:100]!r}: expected one of {known}", NOTHING)

    def _offer(self, client: str, order: Sequence[str]) -> tuple[Upcoming, ...]:
        """Return the next files of a client, those left out that are deleted at this moment."""
        left = list(order)
        while True:
            with self._lock:
                names = self._offers.next(client, left, self.clock(), 1 + UPCOMING)
            offered = [Upcoming(name, version) for name in names if (version := self._version(name))]
            if not names or (offered and offered[0].name == names[0]):
                return tuple(offered)
            left.remove(names[0])

    def _mixed(self, order: Sequence[str]) -> list[str]:
        """The files of `order` with one drawn at random at every RANDOM_EVERYth place of the first ones: these stand for all others."""
        present = set(order)
        if not any(map(self.learner.is_ranked, order[:1])):
            return list(order)
        with self._lock:
            waiting = [name for name in self._drawn if name in present]
            free = sorted(present.difference(waiting, self._offers.on_screens))
            wanted = min(max(DRAWN - len(waiting), 0), len(free) // 2)
            for name in self._rng.sample(free, wanted):
                self._drawn[name] = None
                waiting.append(name)
        rest = iter([name for name in order if name not in self._drawn])
        mixed = list[str]()
        place = len(self.learner.guesses.rows)
        for drawn in waiting:
            while (place + len(mixed)) % RANDOM_EVERY != RANDOM_EVERY - 1:
                if (informative := next(rest, None)) is None:
                    break
                mixed.append(informative)
            mixed.append(drawn)
        return [*mixed, *rest]

    def _guess(self, name: str, key: bytes, class_name: str) -> FirstGuess:
        """What is predicted of a file before its label is known, of a class that can be predicted, and why it was offered."""
        chosen = self.learner.is_ranked(name) and name not in self._drawn
        if class_name not in self.learner.progress.classes:
            return FirstGuess(key, class_name, chosen=chosen)
        found = self.learner.prediction(name, key)
        if not found:
            return FirstGuess(key, class_name, chosen=chosen)
        guess, fleet = found.top[0].label, self.learner.fleet_guess(key)
        return FirstGuess(
            key, class_name, guess, fleet, chosen, possible=found.possible, promise=found.promise
        )

    def _require_on_screen(self, client: str, name: str, version: str) -> None:
        """Raise DataError unless the client was given this file, with the contents that it has now."""
        self.file(name, version or "unknown")
        with self._lock:
            given = self._offers.on_screen(client)
        if given != name:
            raise DataError(
                f"{name}: not the {word_of(self.learner.kind)} that this page was last given"
                f" ({given or 'none'}); it may be on another person's screen",
                NOTHING,
            )

    def _keys(self, names: Iterable[str]) -> dict[str, bytes]:
        """The keys of those files that are in the pool."""
        return {name: bytes.fromhex(version) for name in names if (version := self._version(name))}

    def _suggestion(self) -> Suggestion | None:
        keys = self._keys(name for group in self.learner.alike for name in group)
        names = self.suggestions.first(self.learner.alike, keys)
        if not names:
            return None
        id = hashlib.blake2b(b"".join(keys[name] for name in names), digest_size=8).hexdigest()
        return Suggestion(id, tuple(Upcoming(name, keys[name].hex()) for name in names))

    def _require_suggestion(self, id: str) -> tuple[Upcoming, ...]:
        found = self._suggestion()
        if found is None or found.id != id:
            raise DataError(
                "suggestion: its files were changed, labelled or dropped since it was shown", NOTHING
            )
        return found.files

    def _version(self, name: str) -> str:
        """Return the version of a file; "" if it is gone."""
        with suppress(FileNotFoundError):
            return file_key(self.pool.folder / name).hex()
        return ""

    def _done(self, client: str, action: _Action) -> ActionDone:
        id = secrets.token_hex(8)
        with self._lock:
            self._actions[id] = action
            while len(self._actions) > KEPT_ACTIONS:
                self._actions.popitem(last=False)
        if action.moved:
            self.learner.count()
            self.learner.look()
        return ActionDone(id, self.view(client))

    def _shown(self, offered: Upcoming) -> Shown:
        entry = self.pool.entry(offered.name)
        found = self.learner.prediction(offered.name, bytes.fromhex(offered.version))
        guesses = found.top if found else ()
        source, time_s = (entry.source, entry.time) if entry else ("", 0.0)
        about, remarks = "", tuple[str, ...]()
        try:
            if preview := self.learner.preview(self.pool.folder / offered.name):
                about, remarks = preview.about, preview.remarks
        except UnusableFileError as error:
            remarks = (error.words,)
        return Shown(offered.name, offered.version, source, time_s, guesses, about, remarks)


def word_of(kind: Kind) -> str:
    """What a file of a kind of samples is called."""
    return "recording" if kind in RECORDED else ABOUT[kind].sample


def _remark(calibration: Calibration | None, progress: LearnerProgress, kind: Kind) -> str:
    """What is to be said of a measured accuracy: few scenes, or classes and files that it leaves out."""
    if calibration is None:
        return ""
    samples = ABOUT[kind].samples
    remarks = [grouping.few(len(calibration.right), calibration.scenes, samples)]
    if not calibration.is_measured and calibration.scenes >= LEAST_MEASURED:
        remarks.append(
            f"not measured yet: so far only informative {word_of(kind)}s are labelled, which are harder than others"
        )
    if progress.single:
        remarks.append(f"not measured, since all {samples} are of one scene: {', '.join(progress.single)}")
    if progress.unreadable:
        remarks.append(f"cannot be read: {errors.shortened(progress.unreadable, MOST_NAMED)}")
    return "; ".join(filter(None, remarks))
