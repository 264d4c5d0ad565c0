"""What a device keeps on its disk, in one folder, so that a power cut at any line loses nothing that was promised.

    FOLDER/memory.json                    assignments that are done
    FOLDER/outbox/ID.json                 unacknowledged reports, each with its
    FOLDER/outbox/ID.safetensors          blob, if any; the .json is written last and makes both valid
    FOLDER/own/RUN/ROUND-STAGE.safetensors   the client's personal parts after a round; the last three of a run
    FOLDER/measured.json                  a full device's newest accuracy, as in its report
    FOLDER/privacy.safetensors            the epsilon spent by the device's updates, over all runs
    FOLDER/heads/SHA256.safetensors       the personal head for the extractor with this hash, its calibration, its release, and the
                                          report on its fit
    FOLDER/features/fitted                stamp of the data that were fitted last: whether they changed while no agent ran
    FOLDER/immediate/SHA256.safetensors   the head fitted at once after a label, with its calibration; serves until the agent has fitted
    FOLDER/labelling/                     the label page's own: features, discarded pictures, dismissed suggestions, first guesses
                                          (`data.first_guesses`), right labels (`data.right_labels`)
    FOLDER/answers.json                   the owner's promise and false alarm rate of predictions
    FOLDER/statistics/                    class statistics for the next sum, and the pictures that are in one (`workers.statistics`);
                                          sums.json: the last secure sum
    FOLDER/release/, tuf/, features/      written by `slots`, `edge_fl_devices.install.trust` and `edge_fl_devices.features.local_loader`

Every file is written atomically, and every step that is repeated after a cut gives the same result: personal parts enter a round as
they left the one before, and a head's file contains the report that its fit must still deliver.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from edge_fl import __version__, heads
from edge_fl.errors import ArtefactError, InputError
from edge_fl.files import atomic
from edge_fl.files.accounts import not_allowed
from edge_fl.files.disk import reporting
from edge_fl.files.paths import text
from edge_fl.files.shared import make_folder, open_private
from edge_fl.heads import Head, probability_calibration
from edge_fl.heads.probability_calibration import UNCALIBRATED, Calibration
from edge_fl.untrusted import decoder
from edge_fl_devices.agent.effects import Memory
from edge_fl_devices.agent.outbox import REFIT, Parcel
from edge_fl_devices.storage import allowed, listed, read_json, write_json

KEPT_GENERATIONS = 3
KEPT_RUNS = 4
CALIBRATION = "calibration."
BITS = "bits"
IMMEDIATE = "immediate"
FITTED_DATA = "features/fitted"
MEASURED = "measured.json"
SUMS = "statistics/sums.json"
"""Among what a device keeps when its work is deleted (`edge_fl_maker.upkeep.device_folder.LEDGERS`)."""
UNUSABLE = (SafetensorError, ArtefactError, KeyError, ValueError, TypeError)
"""Errors of a missing or damaged file of a head."""
PRIVACY_FILE = "privacy.safetensors"
OWN_AFTER_TRAINING, OWN_AFTER_PERSONALISING = 0, 1
"""Stages of a round, in order."""


@dataclass(frozen=True, eq=False)
class StoredHead:
    """A head with its release, the report on its fit and its calibration. Equal `fit_key`s mean equal inputs, hence equal heads.

    `bits`: how many the 16-bit pictures used that it was fitted on; 0 if there were none.
    """

    head: Head
    release: int
    parcel: Parcel
    fit_key: str = ""
    calibration: Calibration = UNCALIBRATED
    bits: int = 0


@dataclass(frozen=True, eq=False)
class ImmediateHead:
    """A head that was fitted at once after a label, on the labels with this `fingerprint`.

    It serves until the agent replaces its own head, whose fit key was `after` ("": the agent had none). `bits`: as of StoredHead.
    """

    head: Head
    calibration: Calibration
    fingerprint: str
    after: str = ""
    bits: int = 0


class Answers(Struct, frozen=True):
    """The promise of prediction sets (0: every sample is answered), and the share of known samples called unknown (0: none)."""

    promise: float = 0.0
    false_alarm: float = 0.05


class SumRecord(Struct, frozen=True):
    """The secure sum `id` for which a vector left last, and `number`, that of the signature that opened it (0: not signed).

    `declined`: why the device took no part in a later one; "" if it did not decline one.
    """

    id: str = ""
    number: int = 0
    declined: str = ""


class Store:
    """One device's folder. One agent writes at a time (`owned`); any process may read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Lock the folder for one agent. Raises InputError if another process holds it."""
        try:
            # private: heads and metrics reveal something of the samples
            make_folder(self.folder, 0o700)
            descriptor = open_private(self.folder / "lock", os.O_RDWR)
        except PermissionError as error:
            raise InputError(not_allowed(self.folder, "write in")) from error
        except OSError as error:
            raise InputError(f"{text(self.folder)}: {error.strerror}; expected a writable folder") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise InputError(
                f"{text(self.folder)}: another agent runs in this folder; expected it to be stopped"
                " (sudo systemctl stop edge-fl edge-fl-label)"
            ) from error
        finally:
            os.close(descriptor)

    def tidy(self) -> None:
        """Delete what a power cut left incomplete; once per process start."""
        for leftover in self.folder.rglob(".*.part"):
            leftover.unlink(missing_ok=True)
        for blob in (self.folder / "outbox").glob("*.safetensors"):
            if not blob.with_suffix(".json").exists():
                blob.unlink(missing_ok=True)
        for id in self.memory().done:
            self.forget(id)  # acknowledged, but the power was cut before the report was deleted
        heads = {stored.head.extractor: stored.parcel.report.id for stored in self.heads()}
        for parcel in self.outbox():  # the power was cut before a later fit had deleted them
            report = parcel.report
            if report.id.startswith(REFIT) and heads.get(report.extractor, report.id) != report.id:
                self.forget(report.id)

    # memory

    def memory(self) -> Memory:
        """Return the stored memory; an empty one if it is absent or unreadable."""
        return read_json(self.folder / "memory.json", Memory) or Memory()

    def begin(self) -> Memory:
        """Count a start of this agent and return the memory. The clock keeps the count growing where the folder was deleted."""
        memory = self.memory()
        starts = max(memory.starts + 1, int(time.time()))
        memory = msgspec.structs.replace(memory, starts=starts, agent=__version__)
        self.remember(memory)
        return memory

    def remember(self, memory: Memory) -> None:
        self._write("memory.json", msgspec.json.encode(memory))

    # outbox

    def outbox(self) -> list[Parcel]:
        """Return the unacknowledged reports, including those of fits whose process ended before `keep`."""
        files = listed(self.folder / "outbox", ".json")
        parcels = [parcel for file in files if (parcel := read_json(file, Parcel))]
        memory = self.memory()
        known = {*memory.done, *memory.given_up, *(parcel.report.id for parcel in parcels)}
        return [*parcels, *(stored.parcel for stored in self.heads() if stored.parcel.report.id not in known)]

    def keep(self, parcel: Parcel, blob: bytes | None = None) -> None:
        """Store a report and its blob. Raises ArtefactError for a full disk."""
        id = parcel.report.id
        if blob is not None:
            self._write(f"outbox/{id}.safetensors", blob)
        self._write(f"outbox/{id}.json", msgspec.json.encode(parcel))

    def blob(self, id: str) -> bytes | None:
        return self._read(f"outbox/{id}.safetensors")

    def forget(self, id: str) -> None:
        """Delete the report `id` and its blob."""
        for suffix in ("json", "safetensors"):
            (self.folder / "outbox" / f"{id}.{suffix}").unlink(missing_ok=True)

    # personal parts

    def own(self, run_id: str, round: int, stage: int = OWN_AFTER_TRAINING) -> bytes | None:
        """Return the personal parts as they left the last round and stage before this one; None before the first."""
        before = [file for file in self._generations(run_id) if file.stem < _generation(round, stage)]
        return before[-1].read_bytes() if before else None

    def keep_own(self, run_id: str, round: int, stage: int, payload: bytes) -> None:
        """Store the personal parts as they leave a round. Raises ArtefactError for a full disk."""
        self._write(f"own/{run_id}/{_generation(round, stage)}.safetensors", payload)
        for old in self._generations(run_id)[:-KEPT_GENERATIONS]:
            old.unlink(missing_ok=True)
        runs = sorted(listed(self.folder / "own"), key=lambda folder: folder.stat().st_mtime)
        for folder in runs[:-KEPT_RUNS]:
            shutil.rmtree(folder, ignore_errors=True)

    def measured(self) -> dict[str, float] | None:
        """The metrics of a full device's newest report with an accuracy; None for other devices."""
        return read_json(self.folder / MEASURED, dict[str, float])

    def keep_measured(self, found: dict[str, float]) -> None:
        """Store the metrics of a full device's report. Raises ArtefactError for a full disk."""
        self._write(MEASURED, msgspec.json.encode(found))

    def runs(self) -> list[str]:
        return [folder.name for folder in listed(self.folder / "own")]

    def _generations(self, run_id: str) -> list[Path]:
        return listed(self.folder / "own" / run_id, ".safetensors")

    # privacy

    def privacy_spent(self) -> bytes | None:
        """Return the stored epsilon spent; None before the first update."""
        return self._read(PRIVACY_FILE)

    def keep_privacy_spent(self, payload: bytes) -> None:
        """Replace the epsilon spent. Raises ArtefactError for a full disk."""
        self._write(PRIVACY_FILE, payload)

    # heads

    def head(self, extractor_sha256: str) -> StoredHead | None:
        """Return the head for this extractor; None if it is absent or unusable."""
        path = self._head_file(extractor_sha256)
        with suppress(OSError, *UNUSABLE), allowed(path):
            head, calibration, metadata = _read_head(path, extractor_sha256)
            parcel = decoder(Parcel).decode(metadata["parcel"])
            bits = int(metadata[BITS])
            return StoredHead(head, int(metadata["release"]), parcel, metadata["fit_key"], calibration, bits)
        return None

    def heads(self) -> list[StoredHead]:
        """Return all heads, in the order of their releases."""
        files = listed(self.folder / "heads", ".safetensors")
        stored = filter(None, (self.head(file.stem) for file in files))
        return sorted(stored, key=lambda head: head.release)

    def keep_head(self, stored: StoredHead, extractors: Collection[str] = ()) -> None:
        """Replace the head for the same extractor, atomically; delete those for none of `extractors`.

        Raises ArtefactError for a full disk.
        """
        metadata = {
            "release": str(stored.release),
            "parcel": msgspec.json.encode(stored.parcel).decode(),
            "fit_key": stored.fit_key,
            BITS: str(stored.bits),
        }
        file = self._head_file(stored.head.extractor)
        self._write(f"heads/{text(file.name)}", _head_bytes(stored.head, stored.calibration, metadata))
        (self.folder / MEASURED).unlink(missing_ok=True)  # this is no full device any more
        for other in file.parent.glob("*.safetensors"):
            if other != file and other.stem not in extractors:
                other.unlink(missing_ok=True)

    def immediate_head(self, extractor_sha256: str) -> ImmediateHead | None:
        """Return the immediate head for this extractor; None if it is absent, unusable, or older than the agent's head."""
        fitted = self.head(extractor_sha256)
        path = self.folder / IMMEDIATE / f"{extractor_sha256}.safetensors"
        with suppress(OSError, *UNUSABLE), allowed(path):
            head, calibration, metadata = _read_head(path, extractor_sha256)
            if metadata["after"] == (fitted.fit_key if fitted else ""):
                bits = int(metadata[BITS])
                return ImmediateHead(head, calibration, metadata["fingerprint"], metadata["after"], bits)
        return None

    def keep_immediate_head(self, head: ImmediateHead) -> None:
        """Replace the immediate head and delete those for other extractors. Raises ArtefactError for a full disk."""
        metadata = {"fingerprint": head.fingerprint, "after": head.after, BITS: str(head.bits)}
        name = f"{IMMEDIATE}/{head.head.extractor}.safetensors"
        self._write(name, _head_bytes(head.head, head.calibration, metadata))
        for other in (self.folder / IMMEDIATE).glob("*.safetensors"):
            if other != self.folder / name:
                other.unlink(missing_ok=True)

    def answers(self) -> Answers:
        """Return the settings of predictions; the defaults if they are absent or unreadable."""
        return read_json(self.folder / "answers.json", Answers) or Answers()

    def keep_answers(self, answers: Answers) -> None:
        """Store the settings of predictions. Raises ArtefactError for a full disk."""
        self._write("answers.json", msgspec.json.encode(answers))

    def sums(self) -> SumRecord:
        """Return what is recorded of secure sums."""
        return read_json(self.folder / SUMS, SumRecord) or SumRecord()

    def keep_sums(self, record: SumRecord) -> None:
        """Replace the record of secure sums. Raises ArtefactError if the disk fails."""
        if record != self.sums():
            with reporting(SUMS):
                make_folder((self.folder / SUMS).parent)
                write_json(self.folder / SUMS, record, private=True)

    def fitted_data(self) -> str:
        """Return the stamp of the data of the last fit; "" if it is unknown."""
        return (self._read(FITTED_DATA) or b"").decode("ascii", "replace")

    def keep_fitted_data(self, stamp: str) -> None:
        """Store the stamp of the data of a fit. Raises ArtefactError for a full disk."""
        if stamp != self.fitted_data():
            self._write(FITTED_DATA, stamp.encode())

    def revoke(self) -> None:
        """Delete the personal heads."""
        for folder in ("heads", IMMEDIATE):
            for file in (self.folder / folder).glob("*.safetensors"):
                file.unlink(missing_ok=True)

    def _head_file(self, extractor_sha256: str) -> Path:
        return self.folder / "heads" / f"{extractor_sha256}.safetensors"

    def _read(self, name: str) -> bytes | None:
        path = self.folder / name
        with suppress(FileNotFoundError), allowed(path):
            return path.read_bytes()
        return None

    def _write(self, name: str, payload: bytes) -> None:
        with reporting(name):
            path = self.folder / name
            make_folder(path.parent)
            atomic.write(path, payload)


def _read_head(path: Path, extractor_sha256: str) -> tuple[Head, Calibration, dict[str, str]]:
    """Read a head with its calibration and metadata. Raises OSError or one of UNUSABLE."""
    with path.open("rb"):  # safetensors does not tell a file that may not be read
        pass
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
        arrays: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    prefixed = [name for name in arrays if name.startswith(CALIBRATION)]
    calibrated = {name.removeprefix(CALIBRATION): arrays.pop(name) for name in prefixed}
    head = heads.from_arrays(arrays, metadata)
    head.require(extractor_sha256)
    return head, probability_calibration.from_arrays(calibrated), metadata


def _head_bytes(head: Head, calibration: Calibration, metadata: dict[str, str]) -> bytes:
    arrays = head.to_arrays()
    if calibration is not UNCALIBRATED:
        arrays |= {CALIBRATION + name: array for name, array in calibration.to_arrays().items()}
    return save(arrays, {**head.describe(), **metadata})


def _generation(round: int, stage: int) -> str:
    return f"{round:012d}-{stage}"
