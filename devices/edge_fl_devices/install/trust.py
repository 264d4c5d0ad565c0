"""The trust of a device in releases: a TUF client (python-tuf) that reads metadata through a callback and lists the signed releases.

python-tuf detects rollback, freeze, mix-and-match, endless data and wrong keys; here they are mapped to failure words. The latest time
seen is stored: a clock that is set back (a Pi has no battery) does not make expired metadata valid again. It is stored only after a
successful refresh, so a clock that ran ahead may expire metadata early but never locks a device out for good.

    FOLDER/metadata/         the trusted metadata, as python-tuf stores them
    FOLDER/first.root.json   the root that was trusted on first use, where that was allowed
    FOLDER/last_seen.txt     the latest time of a successful refresh
    FOLDER/refused.txt       the failure word of the last refresh, if it failed for one of REFUSALS
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from securesystemslib.signer import Signature
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
from tuf.api.metadata import Metadata, Root, Targets, Timestamp
from tuf.api.serialization import DeserializationError
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from edge_fl.errors import EdgeFLError, TrustError
from edge_fl.failures import Failure
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.files.shared import make_folder
from edge_fl.release import agent
from edge_fl.release.agent import AgentRelease
from edge_fl.release.manifests import Manifest, listed
from edge_fl.untrusted import NOT_JSON

Fetch = Callable[[str], bytes]

LIMITS = UpdaterConfig(
    max_root_rotations=32,
    root_max_length=64 * 1024,
    timestamp_max_length=16 * 1024,
    snapshot_max_length=64 * 1024,
    targets_max_length=256 * 1024,
)
FIRST_ROOT = "1.root.json"
SEEN_FILE = "last_seen.txt"
REFUSED_FILE = "refused.txt"
REFUSALS = (Failure.WRONG_KEY, Failure.ROLLBACK)
"""What another server, or one restored from a backup, leads to, and what only people can mend."""
ROLES = ("root", "timestamp", "snapshot", "targets")

REASONS: tuple[tuple[type[Exception], Failure, str], ...] = (
    (BadVersionNumberError, Failure.ROLLBACK, "an older version than the trusted one"),
    (
        ExpiredMetadataError,
        Failure.EXPIRED,
        "the server stopped signing, or new metadata are being withheld",
    ),
    (UnsignedMetadataError, Failure.WRONG_KEY, "not signed by the root's keys"),
    (DeserializationError, Failure.TRUNCATED, "unreadable: truncated, or not metadata"),
    (LengthOrHashMismatchError, Failure.MIX_AND_MATCH, "not the file that the other metadata name"),
    (DownloadLengthMismatchError, Failure.ENDLESS, "longer than allowed"),
    (DownloadHTTPError, Failure.MISSING, "not published"),
    (RepositoryError, Failure.INVALID, "violates the rules of signed metadata"),
    (DownloadError, Failure.MISSING, "could not be fetched"),
)
"""Exceptions of python-tuf with the failure word and an explanation; the first match applies."""


def last_seen(folder: Path) -> datetime:
    """Return the latest time of a successful refresh; 1970 if there is none."""
    try:
        return datetime.fromisoformat((folder / SEEN_FILE).read_text()).astimezone(UTC)
    except (OSError, ValueError):
        return datetime.fromtimestamp(0, UTC)


def last_refusal(folder: Path) -> Failure | None:
    """Why the last refresh failed, if people have to do something; from any process."""
    try:
        return Failure.of((folder / REFUSED_FILE).read_text().strip())
    except (OSError, ValueError):
        return None


def wall_clock() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


class Trust:
    """The trusted metadata of one device. `root_bytes` is the root it was shipped with; without one, `trust_on_first_use` must be set."""

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
        self._newest: Root | None = None
        self._lock = threading.Lock()  # releases and the agent's updates are looked up by different threads

    def refresh(self, fetch: Fetch) -> list[Manifest]:
        """Return the signed releases, the last published last. Raises TrustError; the metadata trusted before remain.

        `fetch(name)` returns a published file such as "timestamp.json", or raises KeyError if there is none.
        """
        with self.refreshed(fetch) as updater:
            names = list(self._trusted(Targets.type).targets)
            targets = [updater.get_targetinfo(name) for name in names]
        return [entry.read() for entry in listed(target.custom for target in targets if target)]

    def agents(self, fetch: Fetch) -> list[AgentRelease]:
        """Return the signed releases of the agent, by number. Raises as `refresh`."""
        with self.refreshed(fetch):
            fields = self._trusted(Targets.type).unrecognized_fields
        return agent.listed(fields.get(agent.FIELD, []))

    def require_online_signature(self, content: bytes, signatures: Mapping[str, str], expires: int) -> None:
        """Require the signature of the server's online keys (role timestamp), in hex by key id, and that it has not expired.

        Raises TrustError: `no_root` (none is trusted yet), `wrong_key` (none of the keys that the trusted root names, which may be an old
        one), `forged`, `expired` (0: never).
        """
        root = self._root()
        if not signatures.keys() & set(root.roles[Timestamp.type].keyids):
            raise TrustError(
                f"signed with none of the keys that the trusted root names: {_remedy(Failure.WRONG_KEY)}",
                Failure.WRONG_KEY,
            )
        try:
            signed = {keyid: Signature(keyid, value) for keyid, value in signatures.items()}
            root.verify_delegate(Timestamp.type, content, signed)
        except (UnsignedMetadataError, ValueError) as error:
            raise TrustError("its signature is not on this message", Failure.FORGED) from error
        if expires and max(self._clock(), last_seen(self._folder)).timestamp() > expires:
            raise TrustError("its signature has expired: newer messages are being withheld", Failure.EXPIRED)

    def _root(self) -> Root:
        """The newest trusted root; not from the disk while a refresh replaces the file. Raises TrustError if there is none."""
        if self._newest is None:
            self._newest = self._stored_root()
        return self._newest

    def _stored_root(self) -> Root:
        try:
            trusted = self._metadata / "root.json"
            payload = self._root_bytes if self._root_bytes and not trusted.exists() else trusted.read_bytes()
            return Metadata[Root].from_bytes(payload).signed
        except (OSError, DeserializationError) as error:
            raise TrustError("no trusted root", Failure.NO_ROOT) from error

    @contextmanager
    def refreshed(self, fetch: Fetch) -> Iterator[Updater]:
        """Refresh the trusted metadata and yield python-tuf's client for look-ups. Raises TrustError, also for errors of look-ups."""
        with self._lock, reporting("release metadata"):
            make_folder(self._metadata)
            fetcher = _Fetcher(fetch)
            with suppress(TrustError):
                self._root()  # python-tuf removes the file for a moment
            try:
                updater = self._updater(fetcher)
                updater.refresh()
                self._flush()
                self._require_not_expired()
                (self._folder / REFUSED_FILE).unlink(missing_ok=True)
                yield updater
            except (RepositoryError, DownloadError) as error:
                raised = _as_trust_error(error, fetcher)
                self._note(raised)
                raise raised from error
            finally:
                with suppress(TrustError):
                    self._newest = self._stored_root()

    def _note(self, error: EdgeFLError) -> None:
        """Store the failure word, for `device status`."""
        if (
            isinstance(error, TrustError)
            and error.why in REFUSALS
            and last_refusal(self._folder) != error.why
        ):
            with suppress(OSError):
                atomic.write(self._folder / REFUSED_FILE, error.why.encode())

    def _updater(self, fetcher: _Fetcher) -> Updater:
        first = self._folder / "first.root.json"
        root = self._root_bytes or (first.read_bytes() if first.exists() else None)
        if root is None and not self._trust_on_first_use:
            raise TrustError(
                "no root: none was shipped, and trust on first use is not allowed",
                Failure.NO_ROOT,
                consequence="nothing is fetched",
            )
        root = root or fetcher.download_bytes(FIRST_ROOT, LIMITS.root_max_length)
        updater = Updater(os.fspath(self._metadata), "", fetcher=fetcher, config=LIMITS, bootstrap=root)
        if self._root_bytes is None and not first.exists():
            atomic.write(first, root)
        return updater

    def _require_not_expired(self) -> None:
        """Check all trusted metadata against the latest time seen, then store the time. Raises ExpiredMetadataError."""
        seen = last_seen(self._folder)
        reference = max(self._clock(), seen)
        for role in ROLES:
            if self._trusted(role).is_expired(reference):
                raise ExpiredMetadataError(
                    f"{role}.json had expired by {reference:%Y-%m-%d}, the latest time seen"
                )
        if reference > seen:
            atomic.write(self._folder / SEEN_FILE, reference.isoformat())

    def _trusted(self, role: str) -> Any:
        return Metadata[Any].from_file(os.fspath(self._metadata / f"{role}.json")).signed

    def _flush(self) -> None:
        """Flush the files that python-tuf replaced; rollback protection must survive a power cut."""
        for path in (*(self._metadata / f"{role}.json" for role in ROLES), self._metadata):
            atomic.flush_to_disk(path)


class _Fetcher(FetcherInterface):
    """Adapter from the callback to python-tuf; keeps the last file for error messages."""

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


def _as_trust_error(error: Exception, fetcher: _Fetcher) -> EdgeFLError:
    if isinstance(error.__cause__, EdgeFLError):
        return error.__cause__  # the callback's own, for example DeadlineError
    why, words = next((why, words) for kind, why, words in REASONS if isinstance(error, kind))
    if why == Failure.MIX_AND_MATCH and not _is_json(fetcher.payload):
        why, words = Failure.TRUNCATED, "incomplete file"
    detail = f" ({error})" if str(error) else ""
    remedy = f"; {_remedy(why)}" if why in REFUSALS else ""
    return TrustError(
        f"tuf/{fetcher.file}: {why}, {words}{detail}{remedy}",
        why,
        consequence="the installed release keeps serving",
    )


def _remedy(why: Failure) -> str:
    return why.stated.remedy if why.stated else ""


def _is_json(payload: bytes) -> bool:
    try:
        msgspec.json.decode(payload)
    except NOT_JSON:
        return False
    return True
