"""The two release slots: a release is written to the unused one, and one atomic switch makes it current.

    FOLDER/state.json            current and previous slot, whether current is pending, blocked releases
    FOLDER/a/ and FOLDER/b/      extractor.onnx, EXTRA.safetensors, manifest.json
    FOLDER/chunks/SHA256         verified chunks of the download under way

A release becomes current when state.json is replaced: whenever power is lost, one whole release is current before and after. It stays
*pending* until `mark_good`. Three process starts while pending, or `rollback`, return to the previous release and block the failed
one. Release numbers are not compared: an older release may be installed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from edge_fl.blob import Blob
from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl.files import atomic
from edge_fl.files.disk import reporting, require_space
from edge_fl.files.shared import make_folder
from edge_fl.release.manifests import Manifest, blobs, decode, encode
from edge_fl_devices.storage import allowed, read_json, write_json
from edge_fl_devices.storage.chunks import Chunks, ChunkSink

EXTRACTOR = "extractor.onnx"
MANIFEST = "manifest.json"
RESERVE_BYTES = 16 * 1024 * 1024
MAX_PENDING_BOOTS = 3
MAX_BLOCKED = 16

Slot = Literal["a", "b", ""]


class SlotState(Struct, frozen=True, forbid_unknown_fields=True):
    """state.json. "" is no slot; `boots`: process starts while pending; `blocked`: reason by release."""

    current: Slot = ""
    previous: Slot = ""
    pending: bool = False
    boots: int = 0
    blocked: dict[int, str] = {}

    def blocking(self, release: int, reason: str) -> dict[int, str]:
        """`blocked` with one more release."""
        others = {number: why for number, why in self.blocked.items() if number != release}
        return dict(list({**others, release: reason[:200]}.items())[-MAX_BLOCKED:])


@dataclass(frozen=True)
class InstalledRelease:
    """A release on this device's disk."""

    manifest: Manifest
    extractor: Path
    extras: dict[str, Path]
    pending: bool

    @property
    def files(self) -> list[tuple[Path, Blob]]:
        """All files with their descriptors."""
        extras = [(path, self.manifest.extras[name]) for name, path in self.extras.items()]
        return [(self.extractor, self.manifest.extractor), *extras]


class Slots:
    """The releases in one folder. Any process may read; only the agent writes, and calls `boot` when it starts."""

    def __init__(self, folder: Path, reserve_bytes: int = RESERVE_BYTES) -> None:
        self.folder = folder
        self._reserve_bytes = reserve_bytes
        self._chunks = Chunks(folder / "chunks")

    def current(self) -> InstalledRelease | None:
        """Return the release to serve, if any."""
        state = self._state()
        return self._installed(state.current, pending=state.pending)

    def previous(self) -> InstalledRelease | None:
        """Return the release that `rollback` would return to."""
        return self._installed(self._state().previous)

    @property
    def blocked(self) -> dict[int, str]:
        """Releases that failed here, with the reason."""
        return self._state().blocked

    def unblock(self) -> None:
        """Forget which releases failed here."""
        state = self._state()
        if state.blocked:
            self._save(replace(state, blocked={}))

    def sink(self, blob: Blob) -> ChunkSink:
        """Return the destination of a blob's chunks; `sink(blob).missing` are the chunks still to fetch."""
        return ChunkSink(self._chunks, blob)

    def boot(self) -> InstalledRelease | None:
        """Clean up once per process start: delete leftovers, verify the current release, roll back one that stays pending.

        A release whose files are corrupt is dropped for the previous one but not blocked: it may be fetched again.
        """
        for folder in (self.folder, self._slot("a"), self._slot("b")):
            for leftover in folder.glob(".*.part"):
                leftover.unlink(missing_ok=True)
        state = self._state()
        if state.current and not is_intact(self._installed(state.current)):
            state = SlotState(current=state.previous, blocked=state.blocked)
            if not is_intact(self._installed(state.current)):
                state = SlotState(blocked=state.blocked)
            self._save(state)
        if state.pending:
            self._save(replace(state, boots=state.boots + 1))
            if state.boots + 1 >= MAX_PENDING_BOOTS:
                return self.rollback(Failure.CRASH_LOOP)
        return self.current()

    def prepare(self, manifest: Manifest) -> None:
        """Before a download: check that it can succeed, and copy the chunks that an installed release contains too.

        Raises ArtefactError ("blocked", "enospc").
        """
        self._require_not_blocked(manifest)
        required = blobs(manifest)
        self._chunks.keep_only({blob.sha256 for blob in required})
        make_folder(self.folder)
        fetch_bytes = sum(len(self._chunks.missing(blob)) * blob.chunk_bytes for blob in required)
        require_space(self.folder, fetch_bytes + self._reserve_bytes, f"release {manifest.release}")
        for installed in filter(None, map(self._installed, ("a", "b"))):
            for path, source in installed.files:
                for blob in required:
                    self._chunks.copy_common(blob, path, source)

    def install(
        self, manifest: Manifest, check: Callable[[InstalledRelease], None] | None = None
    ) -> InstalledRelease:
        """Write the release into the unused slot, run `check` on it, and make it current and pending.

        A no-op if it is current already, as after a kill late in an installation. If `check` raises ArtefactError, the release is
        blocked, its slot emptied, and the old release keeps serving.
        Raises ArtefactError ("blocked", "incomplete", "chunk_hash", "enospc", or that of `check`).
        """
        self._require_not_blocked(manifest)
        if (current := self.current()) and current.manifest == manifest:
            self._chunks.keep_only(set())
            return current
        self._require_complete(manifest)
        slot = self._free_slot()
        with reporting(f"release {manifest.release}"):
            staged = self._fill(slot, manifest)
        if check:
            self._run_check(check, staged, slot)
        state = self._state()
        self._save(SlotState(current=slot, previous=state.current, pending=True, blocked=state.blocked))
        self._chunks.keep_only(set())
        return staged

    def mark_good(self) -> None:
        """End the pending state: process starts no longer count against the current release."""
        state = self._state()
        if state.pending:
            self._save(replace(state, pending=False, boots=0))

    def rollback(self, reason: str) -> InstalledRelease | None:
        """Block the current release and return to the previous one, if there is one."""
        state = self._state()
        failed = self._installed(state.current)
        blocked = state.blocking(failed.manifest.release, reason) if failed else state.blocked
        target: Slot = state.previous if is_intact(self._installed(state.previous)) else ""
        self._save(SlotState(current=target, blocked=blocked))
        if failed:
            self._clear(state.current)
        return self.current()

    def _free_slot(self) -> Slot:
        """Free a slot. A pending current release gives way to the proved previous one, never the reverse."""
        before = state = self._state()
        if state.pending and is_intact(self._installed(state.previous)):
            state = replace(state, current=state.previous, pending=False, boots=0)
        if (freed := replace(state, previous="")) != before:
            self._save(freed)
        return "b" if freed.current == "a" else "a"

    def _fill(self, slot: Slot, manifest: Manifest) -> InstalledRelease:
        """Write the release; the manifest comes last, since a slot without one counts as empty."""
        folder = self._slot(slot)
        make_folder(folder)
        self._clear(slot)
        staged = _installed_at(folder, manifest, pending=True)
        for path, blob in staged.files:
            self._chunks.assemble(blob, path)
        atomic.write(folder / MANIFEST, encode(manifest))
        return staged

    def _run_check(
        self, check: Callable[[InstalledRelease], None], staged: InstalledRelease, slot: Slot
    ) -> None:
        try:
            check(staged)
        except ArtefactError as error:
            state = self._state()
            blocked = state.blocking(staged.manifest.release, error.why or error.message)
            self._save(replace(state, blocked=blocked))
            self._clear(slot)
            self._chunks.keep_only(set())
            raise

    def _clear(self, slot: Slot) -> None:
        folder = self._slot(slot)
        (folder / MANIFEST).unlink(missing_ok=True)
        for path in folder.iterdir():
            path.unlink(missing_ok=True)

    def _installed(self, slot: str, *, pending: bool = False) -> InstalledRelease | None:
        """Return the release in a slot, if all its files have their full lengths."""
        folder = self._slot(slot)
        try:
            with allowed(folder / MANIFEST):
                installed = _installed_at(folder, decode((folder / MANIFEST).read_bytes()), pending=pending)
                whole = all(path.stat().st_size == blob.bytes for path, blob in installed.files)
        except (OSError, ArtefactError):
            return None
        return installed if whole else None

    def _require_complete(self, manifest: Manifest) -> None:
        for blob in blobs(manifest):
            if missing := self._chunks.missing(blob):
                raise ArtefactError(
                    f"release {manifest.release}: {len(missing)} of {len(blob.chunks)} chunks of {blob.sha256[:8]} missing",
                    Failure.INCOMPLETE,
                    consequence="not installed",
                )

    def _require_not_blocked(self, manifest: Manifest) -> None:
        if reason := self.blocked.get(manifest.release):
            raise ArtefactError(
                f"release {manifest.release}: failed here before ({reason})",
                Failure.BLOCKED,
                consequence="waiting for a newer one",
            )

    def _slot(self, slot: str) -> Path:
        return self.folder / slot

    def _state(self) -> SlotState:
        return read_json(self.folder / "state.json", SlotState) or SlotState()

    def _save(self, state: SlotState) -> None:
        with reporting("state.json"):
            write_json(self.folder / "state.json", state)


def is_intact(installed: InstalledRelease | None) -> bool:
    """Return whether every file of a release has the sha256 of the manifest."""
    if installed is None:
        return False
    try:
        return all(_sha256(path) == blob.sha256 for path, blob in installed.files)
    except OSError:
        return False


def _installed_at(folder: Path, manifest: Manifest, *, pending: bool) -> InstalledRelease:
    extras = {name: folder / f"{name}.safetensors" for name in manifest.extras}
    return InstalledRelease(manifest, folder / EXTRACTOR, extras, pending)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
