"""The believing side of releases: a TUF client (python-tuf) that reads metadata through a callback and tells a device what it may run.

Rollback, freeze, mix-and-match, endless data and wrong keys are refused by python-tuf; here they get our words. A time that was once
seen stays seen: a clock that is set back (a Pi has no battery for it) does not make expired metadata valid again, and because the time
is only stored after a refresh that was believed, a clock that ran ahead can shorten lives but never lock a device out for good.

    FOLDER/metadata/         what is believed now, as python-tuf keeps it
    FOLDER/first.root.json   the root that was trusted on first use, where that was allowed
    FOLDER/last_seen.txt     the latest time at which a refresh was believed
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from tuf.api.exceptions import (
    BadVersionNumberError,
    DownloadError,
    DownloadHTTPError,
    DownloadLengthMismatchError,
    ExpiredMetadataError,
    LengthOrHashMismatchError,
    RepositoryError,
    UnsignedMetadataError,
)
from tuf.api.metadata import Metadata, Targets
from tuf.api.serialization import DeserializationError
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from edge_fl.errors import EdgeFLError, TrustError
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.release.manifest import Manifest, listed

Fetch = Callable[[str], bytes]

LIMITS = UpdaterConfig(
    max_root_rotations=32,
    root_max_length=64 * 1024,
    timestamp_max_length=16 * 1024,
    snapshot_max_length=64 * 1024,
    targets_max_length=256 * 1024,
)
FIRST_ROOT = "1.root.json"
ROLES = ("root", "timestamp", "snapshot", "targets")

REASONS: tuple[tuple[type[Exception], str, str], ...] = (
    (BadVersionNumberError, "rollback", "an older version than the one believed"),
    (
        ExpiredMetadataError,
        "expired",
        "its time is over: the server stopped signing, or somebody holds new metadata back",
    ),
    (UnsignedMetadataError, "wrong_key", "not signed by the keys that the root names"),
    (DeserializationError, "truncated", "cannot be read: cut short, or no metadata"),
    (LengthOrHashMismatchError, "mix_and_match", "not the file that the other metadata names"),
    (DownloadLengthMismatchError, "endless", "longer than it may be"),
    (DownloadHTTPError, "missing", "not published"),
    (RepositoryError, "invalid", "breaks the rules of signed metadata"),
    (DownloadError, "missing", "could not be fetched"),
)
"""What python-tuf says, the word a device reports, and our words; the first that fits."""


def wall_clock() -> datetime:
    """Now, in UTC."""
    return datetime.now(UTC)


class Trust:
    """What one device believes. `root_bytes` is the root it was shipped with; without one it believes nobody, unless told otherwise."""

    def __init__(
        self,
        folder: Path,
        root_bytes: bytes | None = None,
        *,
        trust_on_first_use: bool = False,
        clock: Callable[[], datetime] = wall_clock,
    ) -> None:
        self._folder = folder
        self._metadata = folder / "metadata"
        self._root_bytes = root_bytes
        self._trust_on_first_use = trust_on_first_use
        self._clock = clock

    def refresh(self, fetch: Fetch) -> list[Manifest]:
        """The releases this device may run, last published last. Raises TrustError; what was believed before still stands.

        `fetch("timestamp.json")` and so on gives a published file, or raises KeyError when there is none.
        """
        with reporting("release metadata"):
            self._metadata.mkdir(parents=True, exist_ok=True)
            fetcher = _Fetcher(fetch)
            try:
                updater = self._updater(fetcher)
                updater.refresh()
                self._flush()
                self._require_not_expired()
                names = list(self._believed(Targets.type).targets)
                targets = [updater.get_targetinfo(name) for name in names]
            except (RepositoryError, DownloadError) as error:
                raise _in_our_words(error, fetcher) from error
        return [entry.read() for entry in listed(target.custom for target in targets if target)]

    def _updater(self, fetcher: _Fetcher) -> Updater:
        first = self._folder / "first.root.json"
        root = self._root_bytes or (first.read_bytes() if first.exists() else None)
        if root is None and not self._trust_on_first_use:
            raise TrustError(
                "no root: none was shipped, and the first one seen may not be trusted here",
                "no_root",
                consequence="nothing is fetched",
            )
        root = root or fetcher.download_bytes(FIRST_ROOT, LIMITS.root_max_length)
        updater = Updater(str(self._metadata), "", fetcher=fetcher, config=LIMITS, bootstrap=root)
        if self._root_bytes is None and not first.exists():
            atomic.write(first, root)
        return updater

    def _require_not_expired(self) -> None:
        """Checks all that is believed against the latest time ever seen, then remembers the time. Raises ExpiredMetadataError."""
        path = self._folder / "last_seen.txt"
        try:
            seen = datetime.fromisoformat(path.read_text()).astimezone(UTC)
        except (OSError, ValueError):
            seen = datetime.fromtimestamp(0, UTC)
        reference = max(self._clock(), seen)
        for role in ROLES:
            if self._believed(role).is_expired(reference):
                raise ExpiredMetadataError(
                    f"{role}.json had expired by {reference:%Y-%m-%d}, a time this device has seen"
                )
        if reference > seen:
            atomic.write(path, reference.isoformat())

    def _believed(self, role: str) -> Any:
        return Metadata[Any].from_file(str(self._metadata / f"{role}.json")).signed

    def _flush(self) -> None:
        """python-tuf replaces files without flushing them; rollback protection must outlive a power cut."""
        for path in (*(self._metadata / f"{role}.json" for role in ROLES), self._metadata):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


class _Fetcher(FetcherInterface):
    """python-tuf's view of the callback; remembers the last file for the error message."""

    def __init__(self, fetch: Fetch) -> None:
        self._callback = fetch
        self.file = FIRST_ROOT
        self.payload = b""

    def download_bytes(self, url: str, max_length: int) -> bytes:
        """As in the base class, but without a temporary file."""
        self.payload = b"".join(self.fetch(url))
        if len(self.payload) > max_length:
            raise DownloadLengthMismatchError(f"{len(self.payload)} bytes, at most {max_length}")
        return self.payload

    def _fetch(self, url: str) -> Iterator[bytes]:
        self.file = url.rpartition("/")[2]
        try:
            payload = self._callback(self.file)
        except KeyError:
            payload = b""
        if not payload:
            raise DownloadHTTPError("no retained message", 404)
        return iter([payload])


def _in_our_words(error: Exception, fetcher: _Fetcher) -> EdgeFLError:
    if isinstance(error.__cause__, EdgeFLError):
        return error.__cause__  # the callback's own, for example DeadlineError
    why, words = next((why, words) for kind, why, words in REASONS if isinstance(error, kind))
    if why == "mix_and_match" and not _is_json(fetcher.payload):
        why, words = "truncated", "cut short"
    detail = f" ({error})" if str(error) else ""
    return TrustError(
        f"tuf/{fetcher.file}: {why}, {words}{detail}", why, consequence="the installed release keeps serving"
    )


def _is_json(payload: bytes) -> bool:
    try:
        msgspec.json.decode(payload)
    except msgspec.DecodeError:
        return False
    return True
