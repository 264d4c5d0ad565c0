"""What is installed: two slots, one of them current, switched in one step, so that a device always has one whole release to serve.

    FOLDER/state.json            which slot is current and which is the way back, whether current is still pending, what was refused
    FOLDER/a/ and FOLDER/b/      extractor.onnx, EXTRA.safetensors, manifest.json
    FOLDER/chunks/SHA256         what is being fetched, its verified chunks each at their place

A release is written into the slot that is not in use, checked there, and becomes current when state.json is replaced: before that step
the old one serves, after it the new one, whichever line a power cut hits. It stays *pending* until `mark_good`; three process starts
while pending, or `rollback`, return to the previous release and remember the refused one. Release numbers are not compared: what is
authentic and wanted is decided elsewhere, and an older artefact may come back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from devices.storage.chunks import Chunks
from edge_fl.errors import ArtefactError
from edge_fl.files import atomic
from edge_fl.files.disk import reporting, require_space
from edge_fl.release.manifest import Manifest, blobs, decode, encode
from edge_fl.wire.blob import Blob

EXTRACTOR = "extractor.onnx"
MANIFEST = "manifest.json"
RESERVE_BYTES = 16 * 1024 * 1024
MAX_PENDING_BOOTS = 3
MAX_REFUSED = 16

Slot = Literal["a", "b", ""]


class State(Struct, frozen=True, forbid_unknown_fields=True):
    """state.json. "" is no slot; `boots` counts process starts while pending; `refused` maps release to reason."""

    current: Slot = ""
    previous: Slot = ""
    pending: bool = False
    boots: int = 0
    refused: dict[int, str] = {}


@dataclass(frozen=True)
class Installed:
    """A release on this device's disk."""

    manifest: Manifest
    extractor: Path
    extras: dict[str, Path]
    pending: bool

    @property
    def files(self) -> list[tuple[Path, Blob]]:
        """Every artefact file with what it must be."""
        extras = [(path, self.manifest.extras[name]) for name, path in self.extras.items()]
        return [(self.extractor, self.manifest.extractor), *extras]


class Slots:
    """The releases below one folder. Any process may read; one, the agent, writes, and calls `boot` when it starts."""

    def __init__(self, folder: Path, reserve_bytes: int = RESERVE_BYTES) -> None:
        self.folder = folder
        self._reserve_bytes = reserve_bytes
        self._chunks = Chunks(folder / "chunks")

    def current(self) -> Installed | None:
        """The release to serve; None when there is none yet."""
        state = self._state()
        return self._installed(state.current, pending=state.pending)

    def previous(self) -> Installed | None:
        """The release that `rollback` would return to."""
        return self._installed(self._state().previous)

    @property
    def refused(self) -> dict[int, str]:
        """Release -> reason, for releases that failed here."""
        return self._state().refused

    def boot(self) -> Installed | None:
        """Once per process start: removes leftovers, checks the current release's bytes, and rolls back one that stays pending.

        A release whose files have gone bad on the disk is dropped for the previous one, but not refused: it may be fetched again.
        """
        for folder in (self.folder, *map(self._slot, ("a", "b"))):
            for leftover in folder.glob(".*.part"):
                leftover.unlink(missing_ok=True)
        state = self._state()
        if state.current and not _intact(self._installed(state.current)):
            state = State(current=state.previous, refused=state.refused)
            if not _intact(self._installed(state.current)):
                state = State(refused=state.refused)
            self._save(state)
        if state.pending:
            self._save(replace(state, boots=state.boots + 1))
            if state.boots + 1 >= MAX_PENDING_BOOTS:
                return self.rollback("crash_loop")
        return self.current()

    def prepare(self, manifest: Manifest) -> None:
        """Before a fetch: makes sure it may and can succeed, and takes over chunks that an installed release has as well.

        Raises ArtefactError ("refused", "enospc").
        """
        self._require_not_refused(manifest)
        wanted = blobs(manifest)
        self._chunks.keep_only({blob.sha256 for blob in wanted})
        self.folder.mkdir(parents=True, exist_ok=True)
        fetch_bytes = sum(len(self.missing(blob)) * blob.chunk_bytes for blob in wanted)
        require_space(self.folder, fetch_bytes + self._reserve_bytes, f"release {manifest.release}")
        for installed in filter(None, map(self._installed, ("a", "b"))):
            for path, source in installed.files:
                for blob in wanted:
                    self._chunks.take_over(blob, path, source)

    def missing(self, blob: Blob) -> list[int]:
        """Chunks still to fetch, ascending, as the disk has it."""
        return self._chunks.missing(blob)

    def add_chunk(self, blob: Blob, index: int, payload: bytes) -> bool:
        """Verifies one chunk, then keeps it; True once the blob is complete. Raises ArtefactError ("chunk_hash", "enospc")."""
        return self._chunks.add(blob, index, payload)

    def assemble(self, blob: Blob, path: Path) -> None:
        """Puts the whole blob at `path`, its hash checked. Raises ArtefactError."""
        self._chunks.assemble(blob, path)

    def install(self, manifest: Manifest, check: Callable[[Installed], None] | None = None) -> Installed:
        """Writes the release into the slot not in use, lets `check` try it there, and makes it current, pending.

        Nothing happens when it is current already, as after a kill late in an install.
        When `check` raises ArtefactError the release is remembered as refused, its slot emptied, and the old one serves on.
        Raises ArtefactError ("refused", "incomplete", "chunk_hash", "enospc", or what `check` says).
        """
        self._require_not_refused(manifest)
        if (current := self.current()) and current.manifest == manifest:
            self._chunks.keep_only(set())
            return current
        self._require_complete(manifest)
        slot = self._free_slot()
        with reporting(f"release {manifest.release}"):
            staged = self._fill(slot, manifest)
        if check:
            self._try(check, staged, slot)
        state = self._state()
        self._save(State(current=slot, previous=state.current, pending=True, refused=state.refused))
        self._chunks.keep_only(set())
        return staged

    def mark_good(self) -> None:
        """The current release has proved itself: process starts no longer count against it."""
        state = self._state()
        if state.pending:
            self._save(replace(state, pending=False, boots=0))

    def rollback(self, reason: str) -> Installed | None:
        """Refuses the current release for good and returns to the previous one; None when there is none to serve."""
        state = self._state()
        failed = self._installed(state.current)
        refused = _remember(state.refused, failed.manifest.release, reason) if failed else state.refused
        target: Slot = state.previous if _intact(self._installed(state.previous)) else ""
        self._save(State(current=target, refused=refused))
        if failed:
            self._clear(state.current)
        return self.current()

    def _free_slot(self) -> Slot:
        """A slot that nobody needs any more. An unproved current release gives way to the proved one behind it, never the reverse."""
        before = state = self._state()
        if state.pending and _intact(self._installed(state.previous)):
            state = replace(state, current=state.previous, pending=False, boots=0)
        if (freed := replace(state, previous="")) != before:
            self._save(freed)
        return _other(freed.current)

    def _fill(self, slot: Slot, manifest: Manifest) -> Installed:
        """The manifest comes last: a slot without one is empty."""
        folder = self._slot(slot)
        folder.mkdir(parents=True, exist_ok=True)
        self._clear(slot)
        staged = _at(folder, manifest, pending=True)
        for path, blob in staged.files:
            self.assemble(blob, path)
        atomic.write(folder / MANIFEST, encode(manifest))
        return staged

    def _try(self, check: Callable[[Installed], None], staged: Installed, slot: Slot) -> None:
        try:
            check(staged)
        except ArtefactError as error:
            state = self._state()
            refused = _remember(state.refused, staged.manifest.release, error.why or str(error))
            self._save(replace(state, refused=refused))
            self._clear(slot)
            self._chunks.keep_only(set())
            raise

    def _clear(self, slot: Slot) -> None:
        folder = self._slot(slot)
        (folder / MANIFEST).unlink(missing_ok=True)
        for path in folder.iterdir():
            path.unlink(missing_ok=True)

    def _installed(self, slot: str, *, pending: bool = False) -> Installed | None:
        """What the slot holds, if it is whole by its files' lengths."""
        folder = self._slot(slot)
        try:
            installed = _at(folder, decode((folder / MANIFEST).read_bytes()), pending=pending)
            whole = all(path.stat().st_size == blob.bytes for path, blob in installed.files)
        except (OSError, ArtefactError):
            return None
        return installed if whole else None

    def _require_complete(self, manifest: Manifest) -> None:
        for blob in blobs(manifest):
            if missing := self.missing(blob):
                raise ArtefactError(
                    f"release {manifest.release}: {len(missing)} of {len(blob.chunks)} chunks of {blob.sha256[:8]} missing",
                    "incomplete",
                    consequence="not installed",
                )

    def _require_not_refused(self, manifest: Manifest) -> None:
        if reason := self.refused.get(manifest.release):
            raise ArtefactError(
                f"release {manifest.release}: failed here before ({reason}); waiting for a newer one",
                "refused",
            )

    def _slot(self, slot: str) -> Path:
        return self.folder / slot

    def _state(self) -> State:
        try:
            return msgspec.json.decode((self.folder / "state.json").read_bytes(), type=State)
        except (OSError, msgspec.DecodeError):
            return State()

    def _save(self, state: State) -> None:
        with reporting("state.json"):
            atomic.write(self.folder / "state.json", msgspec.json.encode(state))


def _at(folder: Path, manifest: Manifest, *, pending: bool) -> Installed:
    extras = {name: folder / f"{name}.safetensors" for name in manifest.extras}
    return Installed(manifest, folder / EXTRACTOR, extras, pending)


def _other(slot: Slot) -> Slot:
    return "b" if slot == "a" else "a"


def _remember(refused: dict[int, str], release: int, reason: str) -> dict[int, str]:
    kept = {number: why for number, why in refused.items() if number != release} | {release: reason[:200]}
    return dict(list(kept.items())[-MAX_REFUSED:])


def _intact(installed: Installed | None) -> bool:
    """Whether every file is what the manifest says, by its sha256."""
    if installed is None:
        return False
    try:
        return all(_sha256(path) == blob.sha256 for path, blob in installed.files)
    except OSError:
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
