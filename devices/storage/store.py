"""What a device keeps on its disk, in one folder of its own, so that a power cut at any line loses nothing that was promised.

    FOLDER/memory.json                    wants that are done
    FOLDER/outbox/ID.json                 reports not acknowledged yet, each with its
    FOLDER/outbox/ID.safetensors          blob, if it has one; the .json is written last and makes both valid
    FOLDER/own/RUN/ROUND-STAGE.safetensors   the client's personal parts as they left a round; the last three of a task
    FOLDER/privacy.safetensors            what the device's updates have told of its data, over all tasks
    FOLDER/heads/SHA256.safetensors       the personal head for the extractor of this hash, its release, and the report on its fit
    FOLDER/release/, tuf/, features/      what `edge_fl.release` and `devices.features.cache` keep

Every file is written whole or not at all, and everything that repeats after a cut gives the same result: personal parts enter a
round as they left the round before it, and a head's file carries the report that its fit must still deliver.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from devices.agent.effects import Memory
from devices.agent.outbox import Parcel
from edge_fl import heads
from edge_fl.errors import ArtefactError, InputError
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.heads import Head

T = TypeVar("T")
KEPT_GENERATIONS = 3
KEPT_RUNS = 4
LEDGER = "privacy.safetensors"
OWN_AFTER_TRAINING, OWN_AFTER_PERSONALISING = 0, 1
"""Stages of a round, in order."""


@dataclass(frozen=True, eq=False)
class StoredHead:
    """A head, which names its extractor, with the release it was fitted for; `parcel` is the report on the fit.

    `fit_key` names all that the fit followed from: the same key gives the same head.
    """

    head: Head
    release: int
    parcel: Parcel
    fit_key: str = ""


class Store:
    """One device's folder. One agent writes at a time (`owned`); anybody may read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Holds the folder for one agent. Raises InputError when another process has it."""
        try:
            # its head and its numbers tell something of its images
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise InputError(
                f"{self.folder}: {error.strerror}; expected a folder that this agent may write to"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise InputError(f"{self.folder}: another agent runs in this folder") from error
        finally:
            os.close(descriptor)

    def tidy(self) -> None:
        """Removes what a power cut left half done; once per process start."""
        for leftover in self.folder.rglob(".*.part"):
            leftover.unlink(missing_ok=True)
        for blob in (self.folder / "outbox").glob("*.safetensors"):
            if not blob.with_suffix(".json").exists():
                blob.unlink(missing_ok=True)
        for id in self.memory().done:
            # acknowledged, and then the power went before its report was out of the outbox
            self.forget(id)

    # memory

    def memory(self) -> Memory:
        """What was remembered last; an empty memory if there is none, or it cannot be read."""
        return _decoded(self.folder / "memory.json", Memory) or Memory()

    def remember(self, memory: Memory) -> None:
        """Replaces the memory."""
        self._write("memory.json", msgspec.json.encode(memory))

    # outbox

    def outbox(self) -> list[Parcel]:
        """Reports that wait for an acknowledgement; those of fits whose process ended before they were put here, too."""
        files = sorted((self.folder / "outbox").glob("*.json"))
        parcels = [parcel for file in files if (parcel := _decoded(file, Parcel))]
        memory = self.memory()
        known = {*memory.done, *memory.given_up, *(parcel.report.id for parcel in parcels)}
        return [*parcels, *(stored.parcel for stored in self.heads() if stored.parcel.report.id not in known)]

    def keep(self, parcel: Parcel, blob: bytes | None = None) -> None:
        """Puts a report, and the blob that it describes, into the outbox. Raises ArtefactError for a full disk."""
        id = parcel.report.id
        if blob is not None:
            self._write(f"outbox/{id}.safetensors", blob)
        self._write(f"outbox/{id}.json", msgspec.json.encode(parcel))

    def blob(self, id: str) -> bytes | None:
        """The blob of the report `id`."""
        with suppress(FileNotFoundError):
            return (self.folder / "outbox" / f"{id}.safetensors").read_bytes()
        return None

    def forget(self, id: str) -> None:
        """Takes a report out of the outbox."""
        (self.folder / "outbox" / f"{id}.json").unlink(missing_ok=True)
        (self.folder / "outbox" / f"{id}.safetensors").unlink(missing_ok=True)

    # personal parts

    def own(self, run_id: str, round: int, stage: int = OWN_AFTER_TRAINING) -> bytes | None:
        """The personal parts as they left the last round (and stage) before this one; None before the first."""
        before = [file for file in self._generations(run_id) if file.stem < _generation(round, stage)]
        return before[-1].read_bytes() if before else None

    def keep_own(self, run_id: str, round: int, stage: int, payload: bytes) -> None:
        """Keeps the personal parts as they leave a round. Raises ArtefactError for a full disk."""
        self._write(f"own/{run_id}/{_generation(round, stage)}.safetensors", payload)
        for old in self._generations(run_id)[:-KEPT_GENERATIONS]:
            old.unlink(missing_ok=True)
        runs = sorted((self.folder / "own").iterdir(), key=lambda folder: folder.stat().st_mtime)
        for folder in runs[:-KEPT_RUNS]:
            shutil.rmtree(folder, ignore_errors=True)

    def runs(self) -> list[str]:
        """Tasks with personal parts here."""
        return sorted(folder.name for folder in (self.folder / "own").glob("*"))

    def _generations(self, run_id: str) -> list[Path]:
        return sorted((self.folder / "own" / run_id).glob("*.safetensors"))

    # privacy

    def ledger(self) -> bytes | None:
        """What the device's updates have told; None while they have told nothing."""
        with suppress(FileNotFoundError):
            return (self.folder / LEDGER).read_bytes()
        return None

    def keep_ledger(self, payload: bytes) -> None:
        """Replaces it. Raises ArtefactError for a full disk."""
        self._write(LEDGER, payload)

    # heads

    def head(self, extractor_sha256: str) -> StoredHead | None:
        """The head for this extractor; None if there is none, or its file cannot be used."""
        try:
            with safe_open(self._head_file(extractor_sha256), "numpy") as file:
                words = file.metadata()
                arrays: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            head = heads.from_arrays(arrays, words)
            head.require(extractor_sha256)
            parcel = msgspec.json.decode(words["parcel"], type=Parcel)
            return StoredHead(head, int(words["release"]), parcel, words.get("lesson", ""))
        except (
            OSError,
            SafetensorError,
            ArtefactError,
            KeyError,
            ValueError,
            TypeError,
            msgspec.DecodeError,
        ):
            return None

    def heads(self) -> list[StoredHead]:
        """All heads, in the order of their releases."""
        files = (self.folder / "heads").glob("*.safetensors")
        return sorted(
            filter(None, (self.head(file.stem) for file in files)), key=lambda stored: stored.release
        )

    def keep_head(self, stored: StoredHead, extractors: Collection[str] = ()) -> None:
        """Puts a head in the place of the one for the same extractor, in one step; drops those for none of `extractors`.

        Raises ArtefactError for a full disk.
        """
        parcel = msgspec.json.encode(stored.parcel).decode()
        words = {**stored.head.describe(), "release": str(stored.release), "parcel": parcel}
        words["lesson"] = stored.fit_key  # as files of earlier versions name it
        file = self._head_file(stored.head.extractor)
        self._write(f"heads/{file.name}", save(stored.head.to_arrays(), words))
        for other in file.parent.glob("*.safetensors"):
            if other != file and other.stem not in extractors:
                other.unlink(missing_ok=True)

    def revoke(self) -> None:
        """Removes all heads."""
        for file in (self.folder / "heads").glob("*.safetensors"):
            file.unlink(missing_ok=True)

    def _head_file(self, extractor_sha256: str) -> Path:
        return self.folder / "heads" / f"{extractor_sha256}.safetensors"

    def _write(self, name: str, payload: bytes) -> None:
        with reporting(name):
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write(path, payload)


def _generation(round: int, stage: int) -> str:
    return f"{round:012d}-{stage}"


def _decoded(file: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None
