"""The signing side of releases: a TUF repository (python-tuf) whose metadata names the manifests that devices may trust.

    FOLDER/keys/KEYID.pem          private keys, readable by their owner only; nothing else is secret
    FOLDER/metadata/N.root.json    which keys sign which role (valid for 1 year)
    FOLDER/metadata/N.targets.json the releases: one target RELEASE/extractor.onnx each, with its manifest (30 days)
    FOLDER/metadata/N.snapshot.json, timestamp.json    the current version of targets (7 days)
    FOLDER/artefacts/SHA256        the released bytes, written by the publisher

    FOLDER/lock                    held while a process changes the repository
    FOLDER/signed, signed.lock     the highest number of a signature that may have been used (release/rollout/director.py)

Files are written, and must be published, in this order: timestamp.json is the commit point. Several processes may use one folder: each
change takes the lock and begins with what the others have written. A manifest is JSON text inside `custom`, because the canonical JSON
that TUF signs has no floating point numbers. An older manifest that is published again (a rollback) gets a higher metadata version;
devices reject lower versions. Keys may be taken out to other folders.
"""

import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import tuf.repository
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from msgspec import to_builtins
from securesystemslib.signer import CryptoSigner
from tuf.api.exceptions import UnsignedMetadataError
from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp

from edge_fl.errors import ArtefactError, InputError, nearest, shortened
from edge_fl.files import atomic, paths
from edge_fl.files.disk import reporting
from edge_fl.files.paths import text
from edge_fl.release.manifests import Entry, Manifest, decode, encode, extends, listed, target_path

KEPT_RELEASES = 3
MAX_METADATA_BYTES = 256 * 1024  # one message on the wire
ORDER = (Targets.type, Snapshot.type, Timestamp.type)
LIFETIME_DAYS = {Root.type: 365, Targets.type: 30, Snapshot.type: 7, Timestamp.type: 7}
"""How long each role's metadata is valid; `refresh` signs again when a third of that is left."""
File = tuple[str, bytes]


class Keys:
    """The keys in `folder`, and those that were taken out to the folders `elsewhere`."""

    def __init__(self, folder: Path, elsewhere: Sequence[Path] = ()) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._elsewhere = folder, tuple(elsewhere)

    def create(self, folder: Path | None = None) -> CryptoSigner:
        """Create an ed25519 key, by default in the own folder."""
        signer = CryptoSigner.generate_ed25519()
        if folder and folder not in (self._folder, *self._elsewhere):
            self._elsewhere = (*self._elsewhere, folder)
        _write(_file(folder or self._folder, signer.public_key.keyid), signer.private_bytes)
        return signer

    def folder_of(self, keyid: str) -> Path | None:
        """The folder that holds a key; None if it is not available."""
        return next((f for f in (self._folder, *self._elsewhere) if _file(f, keyid).exists()), None)

    def available(self, keyids: Iterable[str]) -> list[str]:
        """The available ones of these keys."""
        return [keyid for keyid in keyids if self.folder_of(keyid)]

    def require(self, keyids: Sequence[str], threshold: int) -> list[str]:
        """The available ones of these keys. Raises InputError if there are fewer than `threshold`."""
        available = self.available(keyids)
        if len(available) < threshold:
            missing = next(keyid for keyid in keyids if keyid not in available)
            raise InputError(
                f"{text(_file(self._folder, missing))}: this private key is needed to sign, and is not here"
            )
        return available

    def signer(self, keyid: str) -> CryptoSigner:
        """The signer of an available key."""
        folder = self.folder_of(keyid) or self._folder
        return CryptoSigner(load_pem_private_key(_file(folder, keyid).read_bytes(), None))

    def take_out(self, keyids: Iterable[str], folder: Path) -> list[str]:
        """Move keys from the own folder to another one -> the ids of the moved keys."""
        moved = [keyid for keyid in keyids if _file(self._folder, keyid).exists()]
        for keyid in moved:
            source = _file(self._folder, keyid)
            _write(_file(folder, keyid), source.read_bytes())
            source.unlink()
        return moved


def _file(folder: Path, keyid: str) -> Path:
    return folder / f"{keyid}.pem"


def _write(path: Path, pem: bytes) -> None:
    with reporting(text(path.parent)):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, pem, private=True)


def now() -> datetime:
    """The current time in UTC to the second, as TUF writes it."""
    return datetime.now(UTC).replace(microsecond=0)


class Repository(tuf.repository.Repository):
    """Keys and metadata in one folder, created on first use; keys that were taken out are also searched in the folders `elsewhere`.

    Raises InputError if a required key is not available.
    """

    def __init__(
        self,
        folder: Path,
        *,
        lifetime_days: Mapping[str, int] = LIFETIME_DAYS,
        clock: Callable[[], datetime] = now,
        elsewhere: Sequence[Path] = (),
    ) -> None:
        self.folder = folder
        self._metadata = folder / "metadata"
        self._lifetimes = {role: timedelta(days=days) for role, days in lifetime_days.items()}
        self._clock = clock
        self._current: dict[str, Metadata[Any]] = {}
        self._written: list[File] = []
        self._lock, self._depth = threading.RLock(), 0
        with reporting(paths.text(folder)):
            self.keys = Keys(folder / "keys", elsewhere)
            self._metadata.mkdir(exist_ok=True)
            self.reload()
            if not {Root.type, Timestamp.type} <= self._current.keys():
                self._create()

    @classmethod
    def existing(cls, home: Path, fleet: str, elsewhere: Sequence[Path] = ()) -> "Repository":
        """The repository of a fleet in `home`/`fleet`. Raises InputError if nothing was released there."""
        if not (home / fleet / "metadata").is_dir():
            others = [found.parent.name for found in home.glob("*/metadata")]
            raise InputError(
                f"{paths.text(home / fleet)}: no releases of fleet {fleet!r}{nearest(fleet, others)};"
                " expected the --home of a server that has released"
            )
        return cls(home / fleet, elsewhere=elsewhere)

    @property
    def artefacts(self) -> Path:
        """The folder of released bytes, each file named by its sha256."""
        return self.folder / "artefacts"

    @property
    def root_bytes(self) -> bytes:
        """The newest root metadata, which devices are installed with."""
        return self._read(Root.type)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other process change the repository, and begin with its current state; may be nested. Waits for the others."""
        with self._lock:
            if self._depth:
                yield
                return
            with (self.folder / "lock").open("wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._depth += 1
                try:
                    self.reload()
                    yield
                finally:
                    self._depth -= 1

    def releases(self) -> list[Manifest]:
        """The kept releases, last published last."""
        return [entry.read() for entry in listed(target.custom for target in self._targets.values())]

    def next_release(self) -> int:
        """A release number that was never used in this repository."""
        return int(str(self.field("highest_release") or 0)) + 1

    def publish(self, manifest: Manifest) -> list[File]:
        """Sign a manifest -> the new files in the order of publication. Raises ArtefactError; InputError for reordered classes."""
        text = encode(decode(encode(manifest))).decode()
        extractor, path = manifest.extractor, target_path(manifest.release)
        with self._commit() as files:
            if path in self._targets and _entry(self._targets[path]).manifest != text:
                raise ArtefactError(
                    f"release {manifest.release}: signed before with another manifest",
                    consequence="nothing was published",
                )
            if path not in self._targets:  # devices know a class by its place in the list
                require_same_ids(manifest, self.releases())
            custom = to_builtins(Entry(text, self._next_version(Targets.type)))
            target = TargetFile(extractor.bytes, {"sha256": extractor.sha256}, path, {"custom": custom})
            with self.edit_targets() as targets:
                targets.targets = _newest(targets.targets | {path: target})
                highest = max(self.next_release() - 1, manifest.release)
                targets.unrecognized_fields["highest_release"] = highest
            self.do_snapshot()
            self.do_timestamp()
        return files

    def field(self, name: str) -> object:
        """A further field of the signed targets, None if it is not there."""
        return self._current[Targets.type].signed.unrecognized_fields.get(name)

    def set_fields(self, fields: Mapping[str, object]) -> list[File]:
        """Sign further fields of the targets -> the new files in the order of publication."""
        with self._commit() as files:
            with self.edit_targets() as targets:
                targets.unrecognized_fields |= fields
            self.do_snapshot()
            self.do_timestamp()
        return files

    def files(self) -> list[File]:
        """All current metadata in the order of publication."""
        self.reload()
        names = [f"{version}.root.json" for version in range(1, self.root().version + 1)]
        names += [_file_name(role, self._current[role].signed.version) for role in ORDER]
        return [(name, (self._metadata / name).read_bytes()) for name in names]

    def refresh(self) -> list[File]:
        """Sign again what is near its expiry or not validly signed by the current keys, as far as keys are available -> the new files."""
        with self._commit() as files:
            if self._near_expiry(Root.type) and self._can_sign(Root.type):
                self._renew_role(Root.type)
            for role in ORDER:
                stale = self._near_expiry(role) or not self._validly_signed(role)
                if stale and all(map(self._can_sign, ORDER[ORDER.index(role) :])):
                    self._renew(role)
                    break
        return files

    def rotate(self, role: str) -> list[File]:
        """Replace the keys of a role by one new key -> the new files; devices reject the old keys after they have seen the new root.

        The new key is stored in the folder of the old one. The threshold becomes 1.
        """
        with self._commit() as files:
            self._require_root_keys()
            retired = self.root().roles[role].keyids
            folder = self.keys.folder_of(retired[0])
            with self.edit_root() as root:
                for keyid in retired:
                    root.revoke_key(keyid, role)
                root.roles[role].threshold = 1
                root.add_key(self.keys.create(folder).public_key, role)
            first = Targets.type if role == Root.type else role
            self._renew(first if self._can_sign(first) else Timestamp.type)
        return files

    def add_key(self, role: str, threshold: int, folder: Path) -> list[File]:
        """Add a key for a role, stored in `folder`, and require `threshold` signatures -> the new files. Raises InputError."""
        most = len(self.root().roles[role].keyids) + 1
        if not 1 <= threshold <= most:
            raise InputError(f"threshold {threshold} of {role}: expected 1 to {most}")
        self._require_root_keys()
        with self._commit() as files:
            with self.edit_root() as root:
                root.add_key(self.keys.create(folder).public_key, role)
                root.roles[role].threshold = threshold
            if role != Root.type:
                self._renew(role)
        return files

    def take_out(self, role: str, folder: Path) -> list[str]:
        """Move the available keys of a role to `folder` -> their ids. They are needed again to sign, and exist nowhere else."""
        return self.keys.take_out(self.root().roles[role].keyids, folder)

    def key_rows(self) -> list[dict[str, object]]:
        """All keys with their role, threshold, expiry of the metadata they signed, and the folder that holds them ("": not available)."""
        root = self.root()
        return [
            {
                "role": role,
                "key": keyid,
                "threshold": root.roles[role].threshold,
                "expires": f"{self._current[role].signed.expires:%Y-%m-%d}",
                "place": paths.text(self.keys.folder_of(keyid) or ""),
            }
            for role in (Root.type, *ORDER)
            for keyid in root.roles[role].keyids
        ]

    def open(self, role: str) -> Metadata[Any]:
        """A copy of a role's current metadata, or empty metadata (called by python-tuf)."""
        if role in self._current:
            return deepcopy(self._current[role])
        empty = {
            Root.type: Root(consistent_snapshot=True),
            Targets.type: Targets(),
            Snapshot.type: Snapshot(meta={}),
            Timestamp.type: Timestamp(),
        }
        return Metadata(empty[role])

    def close(self, role: str, md: Metadata[Any]) -> None:
        """Number, sign and write a role's new metadata (called by python-tuf)."""
        signed = md.signed
        signed.version = self._next_version(role)
        signed.expires = self._clock() + self._lifetimes[role]
        if role == Timestamp.type:
            signed.snapshot_meta = self.snapshot_info  # python-tuf keeps an equal version without hash
        md.signatures.clear()
        for keyid in self._signing_keys(role, signed):
            md.sign(self.keys.signer(keyid), append=True)
        name, payload = _file_name(role, signed.version), md.to_bytes()
        if len(payload) > MAX_METADATA_BYTES:
            raise ArtefactError(
                f"{name}: {len(payload)} bytes, at most {MAX_METADATA_BYTES}; describe the extractor in longer chunks"
            )
        with reporting(name):
            atomic.write(self._metadata / name, payload)
        self._current[role] = md
        self._written.append((name, payload))

    @property
    def targets_infos(self) -> dict[str, MetaFile]:
        """Version, length and hash of the current targets (used by `do_snapshot`)."""
        return {"targets.json": self._describe(Targets.type)}

    @property
    def snapshot_info(self) -> MetaFile:
        """Version, length and hash of the current snapshot (used by `do_timestamp`)."""
        return self._describe(Snapshot.type)

    @property
    def _targets(self) -> dict[str, TargetFile]:
        targets: dict[str, TargetFile] = self._current[Targets.type].signed.targets
        return targets

    @contextmanager
    def _commit(self) -> Iterator[list[File]]:
        """Collect the files written in this block; after it delete superseded files, after an error return to what is committed."""
        with self.locked():
            self._written = []
            try:
                yield self._written
            except BaseException:
                self.reload()
                raise
            for name, _ in self._written:
                for obsolete in superseded(name):
                    (self._metadata / obsolete).unlink(missing_ok=True)

    def _create(self) -> None:
        """Make keys and first metadata, or those that a crash left out."""
        with self.locked():
            if Root.type not in self._current:
                with self._commit(), self.edit_root() as root:
                    for role in (Root.type, *ORDER):
                        root.add_key(self.keys.create().public_key, role)
            if Timestamp.type not in self._current:
                with self._commit():
                    self._renew(Targets.type)

    def reload(self) -> None:
        """Read what is committed: root, and from timestamp to snapshot to targets. Other files were never committed."""
        current: dict[str, Metadata[Any]] = {}
        if (version := self._next_version(Root.type) - 1) > 0:
            current[Root.type] = self._from_file(Root.type, version)
        if (self._metadata / "timestamp.json").exists():
            timestamp = self._from_file(Timestamp.type, 0)
            snapshot = self._from_file(Snapshot.type, timestamp.signed.snapshot_meta.version)
            targets = self._from_file(Targets.type, snapshot.signed.meta["targets.json"].version)
            current |= {Targets.type: targets, Snapshot.type: snapshot, Timestamp.type: timestamp}
        self._current = current

    def _renew(self, first: str) -> None:
        """Sign new versions of `first` and of every role after it."""
        if first == Targets.type:
            self._renew_role(Targets.type)
        if first != Timestamp.type:
            self.do_snapshot(force=True)
        self.do_timestamp(force=True)

    def _renew_role(self, role: str) -> None:
        with self.edit(role):
            pass

    def _describe(self, role: str) -> MetaFile:
        return MetaFile.from_data(self._current[role].signed.version, self._read(role), ["sha256"])

    def _read(self, role: str) -> bytes:
        return (self._metadata / _file_name(role, self._current[role].signed.version)).read_bytes()

    def _from_file(self, role: str, version: int) -> Metadata[Any]:
        return Metadata.from_file(os.fspath(self._metadata / _file_name(role, version)))

    def _signing_keys(self, role: str, signed: Any) -> list[str]:
        """The available keys of a role; for a new root also those of the previous root, as TUF requires."""
        root = signed if role == Root.type else self._current[Root.type].signed
        keyids = self.keys.require(root.roles[role].keyids, root.roles[role].threshold)
        if role == Root.type and role in self._current:
            before = self._current[role].signed.roles[role]
            keyids = [*{*keyids, *self.keys.require(before.keyids, before.threshold)}]
        return keyids

    def _next_version(self, role: str) -> int:
        """One more than all versions ever written: numbers left by a crash are not used again."""
        if role == Timestamp.type:
            return int(self._current[role].signed.version) + 1 if role in self._current else 1
        names = [path.name for path in self._metadata.glob(f"*.{role}.json")]
        return 1 + max((int(name.partition(".")[0]) for name in names), default=0)

    def _near_expiry(self, role: str) -> bool:
        return self._current[role].signed.expires - self._clock() < self._lifetimes[role] / 3

    def _validly_signed(self, role: str) -> bool:
        metadata = self._current[role]
        try:
            self.root().verify_delegate(role, metadata.signed_bytes, metadata.signatures)
        except UnsignedMetadataError:
            return False
        return True

    def _can_sign(self, role: str) -> bool:
        keys = self.root().roles[role]
        return len(self.keys.available(keys.keyids)) >= keys.threshold

    def _require_root_keys(self) -> None:
        keys = self.root().roles[Root.type]
        self.keys.require(keys.keyids, keys.threshold)


def require_same_ids(manifest: Manifest, kept: Sequence[Manifest]) -> None:
    """Raise InputError if a kept release of the same extractor, whose heads devices reuse, has other class ids."""
    for other in reversed(kept):
        if manifest.extractors & other.extractors and not extends(manifest.classes, other.classes):
            raise _other_ids(manifest.classes, other)


def require_grown(classes: Sequence[str], kept: Sequence[Manifest]) -> None:
    """Raise InputError if `classes` reorder or remove those of the newest release; a list without any of them is another task."""
    if kept and set(classes) & set(kept[-1].classes) and not extends(classes, kept[-1].classes):
        raise _other_ids(classes, kept[-1])


def _other_ids(classes: Sequence[str], kept: Manifest) -> InputError:
    return InputError(
        f"classes {shortened(classes, 10)}: release {kept.release} has {shortened(kept.classes, 10)}, and devices know"
        " a class by its place; expected these in this order, with new ones after them (or another fleet)",
        consequence="nothing was published",
    )


def superseded(name: str) -> list[str]:
    """The file that is not needed after `name` is published: two versions earlier, so that running refreshes still find theirs."""
    version, _, rest = name.partition(".")
    obsolete = version.isdecimal() and int(version) > 2 and "root" not in rest
    return [f"{int(version) - 2}.{rest}"] if obsolete else []


def _file_name(role: str, version: int) -> str:
    return "timestamp.json" if role == Timestamp.type else f"{version}.{role}.json"


def _entry(target: TargetFile) -> Entry:
    return listed([target.custom])[0]


def _newest(targets: dict[str, TargetFile]) -> dict[str, TargetFile]:
    """The newest releases that fit into one message, at least one."""
    last_first = sorted(targets, key=lambda path: _entry(targets[path]).serial, reverse=True)[:KEPT_RELEASES]
    while len(last_first) > 1 and sum(_size_bytes(targets[path]) for path in last_first) > MAX_METADATA_BYTES:
        last_first.pop()
    return {path: targets[path] for path in last_first}


def _size_bytes(target: TargetFile) -> int:
    """The size of a target in targets.json: its manifest with every quotation mark escaped, and up to 1 KiB more."""
    text = _entry(target).manifest
    return len(text) + text.count('"') + 1024
