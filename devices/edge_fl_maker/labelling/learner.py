"""Learn from labels at once: a thread of `edge-fl device serve` that keeps the features of all files, fits a head after each label, and
orders the unlabelled files. All samples of a file have its label.

The head is stored as the immediate head of the extractor (`Store.keep_immediate_head`), in a file that only this service writes. The agent
owns everything else in the folder, including its lock: it notices the changed data, as always, fits the configured kind of head within
`refit_every_s` or sooner, compares it with its own last head and reports it. Then that head predicts, until the next label. So neither
process waits for the other, the agent's guard and reports never depend on an immediate head, and the immediate head survives a restart of
either.

Groups, fits and orders run in a child that is kept for IDLE_S after the last one; this process holds an extractor, but no features.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from edge_fl import modalities, threads
from edge_fl.data import grouping
from edge_fl.data.class_names import class_of
from edge_fl.data.grouping import Groups
from edge_fl.errors import EdgeFLError, InputError, KilledError
from edge_fl.files.folder import is_system
from edge_fl.files.paths import text
from edge_fl.heads import Head
from edge_fl.heads.auto import Choice
from edge_fl.heads.label_doctor import Examination, LabelToLookAt
from edge_fl.inputs import Kind
from edge_fl.modalities import ABOUT, UnusableFileError, kind_of_most
from edge_fl.modalities.limits import UNKNOWN_DEPTH
from edge_fl.release.manifests import Manifest
from edge_fl_devices.child import KILLS, Children, decode, encode
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import first_guesses, load, sources
from edge_fl_devices.data.decoding_marker import FATAL, DecodingMarker
from edge_fl_devices.data.file_index import origin
from edge_fl_devices.data.first_guesses import FirstGuesses
from edge_fl_devices.data.right_labels import RightLabels
from edge_fl_devices.data.sources import LabelledFolder
from edge_fl_devices.data.spec import DataSpec
from edge_fl_devices.features.extractor import Extractor
from edge_fl_devices.features.feature_rows import MOST_UNLABELLED, FeatureRows, file_key
from edge_fl_devices.serving.predict import Prediction, Predictor
from edge_fl_devices.storage.slots import InstalledRelease
from edge_fl_devices.storage.store import ImmediateHead, Store
from edge_fl_devices.workers.head_fitting import FitSpec, FittedHead
from edge_fl_maker.capture.pools import Pool
from edge_fl_maker.current_model import CurrentModel
from edge_fl_maker.labelling import immediate
from edge_fl_maker.labelling.immediate import Grouping, ImmediateFit, LabelExamination, Ordered, Ordering
from edge_fl_maker.labelling.moves import FOLDER

if TYPE_CHECKING:
    from edge_fl_maker.labelling.previews import Preview

log = logging.getLogger(__name__)

CHECK_S = 5.0
"""Interval of looks for files that came or went in other ways, and for a new release."""
IDLE_S = 60.0
FIT_DEADLINE_S = 60.0
TOP = 3
MOST_ORDERED = 4000
"""Samples of the pool that are ordered at a time, those of the first files by name, which is random: the child's memory grows with them."""
LEAST = 2
"""Labelled files without which no head is fitted, as by the agent, unless the release has a fleet's head."""
EXAMINING = "examining the labels ..."
Files = dict[bytes, Path]
"""Files by their keys."""


@dataclass(frozen=True)
class LearnerProgress:
    """What the thread knows: the classes of the release, if any.

    missing: labelled files without features yet. fits: immediate heads since the start. single: classes whose samples are all of one
    scene. unreadable: labelled files that cannot be used, with the reason. problem: why the last step failed, or "".
    """

    classes: tuple[str, ...] = ()
    release: int = 0
    missing: int = 0
    fits: int = 0
    single: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class DoubtedLabel:
    """A labelled file to look at: its path in the folder of the data, its version as of a file to label, its class, the one that it rather
    is, and why, in words.
    """

    name: str
    version: str
    class_name: str
    likely: str
    why: str


@dataclass(frozen=True)
class ExaminedLabels:
    """Labels to look at, the most probably wrong ones first; what was found, in words, and remarks on classes."""

    labels: tuple[DoubtedLabel, ...] = ()
    words: str = ""
    remarks: tuple[str, ...] = ()


NOT_EXAMINED = ExaminedLabels()


@dataclass(frozen=True, eq=False)
class _Release:
    """The release that predicts, with its extractor and the features of files; 16-bit pictures are scaled from `bits`."""

    installed: InstalledRelease
    extractor: Extractor
    rows: FeatureRows
    bits: int = 0

    @property
    def manifest(self) -> Manifest:
        return self.installed.manifest


class Learner:
    """Learns from the folder `data` of labelled files and from the pool; `lock` is held while the extractor works."""

    def __init__(
        self, config: DeviceConfig, data: Path, model: CurrentModel, pool: Pool, lock: threading.Lock
    ) -> None:
        self.progress, self.counts = LearnerProgress(), dict[str, int]()
        self.guesses, self.right = FirstGuesses(Path(config.folder)), RightLabels(Path(config.folder))
        self.examined, self._is_wanted = NOT_EXAMINED, False
        self._config, self._data, self._model, self._pool, self._lock = config, data, model, pool, lock
        self._store = Store(Path(config.folder))
        self._children = Children(immediate.MODULE, "labelling", keep=True)
        self._marker = DecodingMarker(self._store.folder / FOLDER, file_key)
        self._release: _Release | None = None
        self._unusable: dict[bytes, str] = {}
        self._sampled: tuple[Predictor | None, int] | None = None
        self._grouped: tuple[object, Groups] = None, grouping.alone()
        self._order: list[str] = []
        self.alike: list[list[str]] = []
        """Files of the pool that resemble each other and no class, the largest group first."""
        self._ordered: object = None
        self._learned = self._agent_key = ""
        self._fleet: tuple[str, Head | None] = "", None
        self._working = False
        self._killed: dict[type, tuple[object, list[KilledError]]] = {}
        self._changed, self._stopped = threading.Event(), threading.Event()
        self._thread = threads.lasting(
            self._run, "edge-fl-labelling", stopped=self._stopped, report=lambda why: self._show(problem=why)
        )

    def start(self) -> None:
        """Look up the classes, and start the thread."""
        with suppress(EdgeFLError):  # the thread tries again and shows the problem
            self._look_up()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and its child."""
        self._stopped.set()
        self._changed.set()
        self._thread.join()
        self._children.close()
        self._marker.close()

    def look(self) -> None:
        """Look for changes at once: a file was labelled, put back or added."""
        self._changed.set()

    def examine(self) -> None:
        """Examine the labels soon: `examined`."""
        self._is_wanted = True
        self.examined = ExaminedLabels(words=EXAMINING)
        self.look()

    @property
    def data(self) -> Path:
        """The folder of the classes."""
        return self._data

    @property
    def kind(self) -> Kind:
        """What the files hold: what the release takes, before the first one what the pool has."""
        if input := self._pool.input:
            return input.kind
        return kind_of_most(map(Path, self._pool.names())) or "picture"

    def count(self) -> None:
        """Count the files of every class, those included that no release names: `counts`."""
        found: dict[str, int] = {}
        suffixes = ABOUT[self.kind].suffixes
        with (
            suppress(FileNotFoundError),
            os.scandir(self._data) as folders,
        ):  # without a list of paths, for the sake of memory
            for folder in folders:
                name = class_of(folder.name)
                if name and folder.is_dir() and not is_system(folder.name):
                    with os.scandir(folder) as files:
                        count = sum(_is_of(file.name, suffixes) for file in files)
                        found[name] = found.get(name, 0) + count
        counts = dict.fromkeys(self.progress.classes, 0) | dict(sorted(found.items()))
        self.counts = counts

    @property
    def is_busy(self) -> bool:
        """Whether a change is not learned yet."""
        return self._changed.is_set() or self._working

    def order(self, names: Sequence[str]) -> list[str]:
        """Sort files of the pool, the most informative first; those that are not ordered yet come last."""
        ranks = {name: rank for rank, name in enumerate(self._order)}
        return sorted(names, key=lambda name: (ranks.get(name, len(ranks)), name))

    def predictor(self) -> Predictor | None:
        """Return the model that predicts; None before the first head."""
        with suppress(InputError):
            return self._model.current()
        return None

    def prediction(self, name: str, key: bytes) -> Prediction | None:
        """Predict a file from the features of its key; None without a head or before the features are known."""
        predictor, release = self.predictor(), self._release
        if predictor is None or release is None or predictor.extractor is not release.extractor:
            return None
        if predictor.bits not in (0, release.bits):  # the features are computed again
            return None
        z = release.rows.find(key)
        return predictor.of_file(z, name, TOP) if z is not None else None

    def fleet_guess(self, key: bytes) -> str:
        """Return the class of a file for the fleet's head alone; "" without one or before the features are known."""
        release, head = self._release, self._fleet[1]
        if release is None or head is None or head.extractor != release.extractor.sha256:
            return ""
        z = release.rows.find(key)
        return release.manifest.classes[int(head.logits(z).mean(axis=0).argmax())] if z is not None else ""

    def preview(self, path: Path) -> Preview | None:
        """Return what the page shows of a recording; None for a picture, whose file it shows itself. Raises UnusableFileError."""
        if (kind := self.kind) == "picture":
            return None
        from edge_fl_maker.labelling import previews  # here, as below: for pictures nothing else is loaded

        try:
            return previews.of(path, file_key(path), kind, self._pool.input, self._lock)
        except FileNotFoundError as error:
            raise UnusableFileError(path, "labelled or dropped at this moment", passing=True) from error

    def sound(self, path: Path) -> bytes:
        """Return an audio recording as it is learned from, as a WAV file. Raises UnusableFileError."""
        from edge_fl.modalities import audio

        rate = self._pool.input.rate if self._pool.input else audio.RATE
        with self._lock:
            return audio.wav(audio.recording(path, rate)[0], rate)

    def is_ranked(self, name: str) -> bool:
        """Whether the place of a file in `order` says how informative it is."""
        return name in self._order

    def _run(self) -> None:
        idle_s = 0.0
        while not self._stopped.is_set():
            self._working = True
            self._changed.clear()
            try:
                self._update()
                self._show(problem="")
            except (EdgeFLError, OSError, MemoryError) as error:
                self._show(problem=str(error) or type(error).__name__)
            except Exception as error:  # the page gets the type; the log has the rest
                log.exception("unexpected error while learning from labels")
                self._show(problem=type(error).__name__)
            self._working = False
            idle_s = 0.0 if self._changed.wait(CHECK_S) else idle_s + CHECK_S
            if idle_s >= IDLE_S:
                self._children.close()

    def _show(self, **changes: object) -> None:
        self.progress = replace(self.progress, **changes)  # type: ignore[arg-type]

    def _update(self) -> None:
        """Count the labels, compute missing features, fit a head if the labels changed, and order the pool."""
        if (release := self._look_up()) is None:
            return
        missing, y = self._labelled(release)
        if not self._extract(missing, release, count=True):
            return
        y = {key: label for key, label in y.items() if key in release.rows}
        unlabelled = self._unlabelled()
        self._learn(y, unlabelled, release)
        if self._is_wanted:
            self._is_wanted = False
            self._examine(y, release)
        if self._extract(unlabelled, release):
            self._sort(
                {key: path.name for key, path in unlabelled.items() if key in release.rows}, [*y], release
            )
            release.rows.keep([*y, *unlabelled])

    def _look_up(self) -> _Release | None:
        """Return the release that predicts, and count the files of its classes."""
        before = self._release
        if (found := self._model.extractor()) is None:
            self._release = None
            self._show(classes=(), release=0)
        else:
            manifest = found[0].manifest
            self._pool.input = manifest.input
            self._settle(manifest)
            bits = self._bits(manifest)
            if before and before.extractor is found[1] and before.bits == bits:
                rows = before.rows
            else:
                folder = self._store.folder / FOLDER
                rows = FeatureRows(folder, manifest.extractor.sha256, manifest.feature_dim, bits)
            self._release = _Release(*found, rows, bits)
            self._show(classes=tuple(manifest.classes), release=manifest.release)
        self.count()
        return self._release

    def _bits(self, manifest: Manifest) -> int:
        """How many bits 16-bit pictures use: those that the head was fitted on, else those of the settings or of a sample."""
        predictor = self.predictor()
        if predictor and predictor.bits:
            return predictor.bits
        if self._sampled is None or self._sampled[0] is not predictor:
            depth = UNKNOWN_DEPTH
            if manifest.input.kind == "picture":
                depth = sources.depth_of(self._files(manifest), self._spec(manifest), self._marker)
            self._sampled = predictor, depth.bits
        return self._sampled[1]

    def _settle(self, manifest: Manifest) -> None:
        """Read alone what may have ended the last process, before any other file."""
        if self._marker.suspect:
            read = modalities.of(manifest.input.kind).read
            with self._lock:
                self._marker.settle(self._files(manifest), lambda path: read(path, manifest.input))

    def _files(self, manifest: Manifest) -> list[Path]:
        """List the labelled files and those of the pool."""
        labelled = (path for path, _ in self._scan(manifest).files)
        return [*labelled, *(self._pool.folder / name for name in self._pool.names())]

    def _scan(self, manifest: Manifest) -> LabelledFolder:
        """List the labelled files; none before the first label."""
        spec = self._spec(manifest)
        if self._data.is_dir():
            return sources.scan(os.fspath(self._data), spec)
        return LabelledFolder(self._data, spec.classes, manifest.input.kind)

    def _spec(self, manifest: Manifest) -> DataSpec:
        return load.with_settings(DataSpec(tuple(manifest.classes), manifest.input), self._config)

    def _labelled(self, release: _Release) -> tuple[Files, dict[bytes, int]]:
        """List the files that a head is fitted on: those without features, and the class ids of all."""
        files: Files = {}
        y: dict[bytes, int] = {}
        for path, label in self._scan(release.manifest).files:
            with suppress(FileNotFoundError):  # moved at this moment
                y[key := file_key(path)] = label
                if key not in release.rows:
                    files[key] = path
        return files, y

    def _unlabelled(self) -> Files:
        files: Files = {}
        for name in self._pool.names():
            with suppress(FileNotFoundError):  # labelled or dropped at this moment
                files[file_key(self._pool.folder / name)] = self._pool.folder / name
        return files

    def _extract(self, files: Files, release: _Release, *, count: bool = False) -> bool:
        """Compute missing features, one file at a time; return False if something changed before the end."""
        missing = [key for key in files if key not in release.rows and key not in self._unusable]
        for number, key in enumerate(missing):
            if self._changed.is_set():
                return False
            if count:
                self._show(missing=len(missing) - number)
            self._read(files[key], key, release)
        if count:
            self._show(missing=0, unreadable=tuple(filter(None, map(self._unusable.get, files))))
        return True

    def _read(self, path: Path, key: bytes, release: _Release) -> None:
        """Compute the features of a file's samples, and what tells which others belong to them."""
        if self._marker.is_fatal(path):
            self._unusable[key] = f"{_short(path)} ({FATAL})"
            return
        input, comes_from, thumbnails = release.manifest.input, None, None
        try:
            with self._lock, self._marker.of(path):
                x = modalities.of(input.kind).read(path, input, bits=release.bits).samples
                z = release.extractor.features(x)
                if input.kind == "picture":
                    from edge_fl.modalities import pictures

                    comes_from, thumbnails = origin(path, pictures.header(path)), pictures.thumbnails(x)
        except UnusableFileError as error:
            if path.exists():  # not moved at this moment
                self._unusable[key] = f"{_short(path)} ({error.words})"
        except FileNotFoundError:
            return
        else:
            release.rows.add(key, z, thumbnails, comes_from)

    def _learn(self, y: dict[bytes, int], unlabelled: Files, release: _Release) -> None:
        """Fit an immediate head, unless the head that predicts is fitted on these labels."""
        sha256, manifest = release.extractor.sha256, release.manifest
        has_fleet = immediate.adapts_fleet(self._config.head, manifest.heads)
        others = sorted((path.name, key) for key, path in unlabelled.items() if key in release.rows)
        more = release.rows.rows(key for _, key in others)[:MOST_UNLABELLED]
        fingerprint = _fingerprint(y)
        labels = _labels(y, release)
        if not y:  # twice as many samples tell more of the class shares
            fingerprint += f"-{len(more).bit_length()}"
        groups = self._groups([*y], release)
        self._show(single=tuple(manifest.classes[label] for label in grouping.single(labels, groups)))
        agent, newer = self._store.head(sha256), self._store.immediate_head(sha256)
        agent_key, before = agent.fit_key if agent else "", self._agent_key
        if newer:
            self._learned = newer.fingerprint
        elif agent and (
            agent_key != before or not self._learned
        ):  # the agent has fitted; on all these labels?
            all_used = grouping.count(groups, len(labels)) < self._config.cross_validate_below
            covered = not all_used or agent.parcel.report.samples == len(labels)
            if not y:
                covered = not len(more)
            self._learned = fingerprint if covered else ""
        self._agent_key = agent_key
        if has_fleet:
            self._prepare_fleet(release)
        if (len(y) < LEAST and not has_fleet) or fingerprint == self._learned:
            return
        request = self._request(y, more, groups, release)
        fitted = decode(self._ask(request, fingerprint), FittedHead).choice()
        self._store.keep_immediate_head(
            ImmediateHead(fitted.head, fitted.calibration, fingerprint, agent_key, release.bits)
        )
        self._learned = fingerprint
        self._show(fits=self.progress.fits + 1)

    def _examine(self, y: dict[bytes, int], release: _Release) -> None:
        """Look for labels that are probably wrong, among those of the files `y`."""
        manifest, paths = release.manifest, dict[bytes, Path]()
        for path, _ in self._scan(manifest).files:
            with suppress(FileNotFoundError):  # moved at this moment
                paths[file_key(path)] = path.relative_to(self._data)
        y = {key: label for key, label in y.items() if key in paths}
        names = [text(paths[key]) for key in y]
        fit = self._request(y, np.empty(0, np.int64), self._groups([*y], release), release)
        counts, kind = release.rows.counts(y), manifest.input.kind
        request = LabelExamination(fit, counts, names, list(manifest.classes), kind)
        try:
            found = decode(self._ask(request, _fingerprint(y)), Examination)
        except EdgeFLError as error:
            self.examined = ExaminedLabels(words=f"labels were not examined: {error}")
            return
        files, classes = [*y], manifest.classes

        def label(each: LabelToLookAt) -> DoubtedLabel:
            key = files[each.file]
            name = os.fspath(paths[key])
            return DoubtedLabel(name, key.hex(), classes[y[key]], classes[each.likely], each.why)

        left = [
            each
            for each in found.labels
            if (files[each.file], classes[y[files[each.file]]]) not in self.right
        ]
        found = structs.replace(found, labels=left)
        self.examined = ExaminedLabels(tuple(map(label, left)), found.words, tuple(found.remarks))

    def _prepare_fleet(self, release: _Release) -> None:
        """Keep the fleet's head alone, whose guesses are recorded, too; none if it does not fit."""
        key = f"{release.extractor.sha256} {release.manifest.release}"
        if self._fleet[0] == key:
            return
        none = self._request({}, np.empty(0, np.int64), grouping.alone(), release)
        try:
            self._fleet = key, decode(self._ask(none, key), FittedHead).choice().head
        except EdgeFLError as error:
            log.warning("no guesses of the fleet's head: %s", error)
            self._fleet = key, None

    def _request(
        self, y: dict[bytes, int], unlabelled: NDArray[np.int64], groups: Groups, release: _Release
    ) -> ImmediateFit:
        manifest, extras = release.manifest, release.installed.extras
        files = [key for key, count in zip(y, release.rows.counts(y), strict=True) for _ in range(count)]
        spec = FitSpec(
            immediate.immediate_kind(self._config.head, manifest.heads),
            len(manifest.classes),
            manifest.unit_norm,
            release.extractor.sha256,
            seed=manifest.round,
            balanced=self._config.balanced,
            closed=bool(self._config.classes),
            plan=manifest.heads,
        )
        return ImmediateFit(
            str(release.rows.path),
            manifest.feature_dim,
            release.rows.rows(y),
            _labels(y, release),
            spec,
            {name: str(path) for name, path in extras.items()},
            str(self._store.folder),
            groups,
            unlabelled,
            first_guesses.importance(self.guesses.rows, files),
        )

    def _groups(self, keys: list[bytes], release: _Release) -> Groups:
        """Return which labelled samples belong together, computed again when other files are labelled."""
        state = (keys, release.rows)
        if state != self._grouped[0]:
            dim, kind = release.manifest.feature_dim, release.manifest.input.kind
            request = Grouping(os.fspath(release.rows.path), dim, release.rows.rows(keys), kind)
            self._grouped = state, decode(self._ask(request, state), np.ndarray)
        return self._grouped[1]

    def _ask(self, request: ImmediateFit | Grouping | LabelExamination | Ordering, state: object) -> bytes:
        """Return the child's response. A child that a signal ended KILLS times is not asked again before `state` is another one."""
        kind = type(request)
        known, killed = self._killed.get(kind, (state, []))
        if known == state and len(killed) >= KILLS:
            raise killed[-1]
        try:
            response = self._children.request(encode(request), FIT_DEADLINE_S)
        except KilledError as error:
            self._killed[kind] = (state, [*(killed if known == state else []), error])
            raise
        self._killed.pop(kind, None)
        return response

    def _sort(self, unlabelled: dict[bytes, str], labelled: Sequence[bytes], release: _Release) -> None:
        """Order the pool, if its files or the head changed."""
        predictor = self.predictor()
        if predictor and predictor.extractor is not release.extractor:
            return
        state = (predictor, frozenset(unlabelled))
        if state == self._ordered:
            return
        some = sorted(unlabelled.items(), key=lambda item: item[1])
        ends = release.rows.counts(key for key, _ in some).cumsum()
        unlabelled = dict(some[: max(1, int((ends <= MOST_ORDERED).sum()))])
        request = Ordering(
            os.fspath(release.rows.path),
            release.manifest.feature_dim,
            release.rows.rows(unlabelled),
            release.rows.counts(unlabelled),
            release.rows.rows(labelled),
            FittedHead.of(Choice(predictor.head, calibration=predictor.calibration)) if predictor else None,
            predictor.furthest if predictor else 1.0,
            release.manifest.input.kind,
        )
        names = [*unlabelled.values()]
        found = decode(self._ask(request, state), Ordered)
        self._order, self._ordered = [names[position] for position in found.order], state
        self.alike = [[names[position] for position in positions] for positions in found.alike]


def _labels(y: dict[bytes, int], release: _Release) -> NDArray[np.int64]:
    """The class ids of all samples of files, by those of the files."""
    return np.array([*y.values()], np.int64).repeat(release.rows.counts(y))


def _short(path: Path) -> str:
    """The name of a file with that of its folder, which is its class."""
    return text(path.relative_to(path.parents[1]))


def _is_of(name: str, suffixes: frozenset[str]) -> bool:
    return Path(name).suffix.lower() in suffixes and not name.startswith(".")


def _fingerprint(y: dict[bytes, int]) -> str:
    """A hash of files and labels, in any order."""
    total = hashlib.blake2b(digest_size=16)
    for key, label in sorted(y.items()):
        total.update(key + label.to_bytes(4, "big"))
    return total.hexdigest()
