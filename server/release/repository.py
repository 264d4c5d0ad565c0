"""The signing side of releases: a TUF repository (python-tuf) whose metadata says which manifests a device may believe.

    FOLDER/keys/KEYID.pem          private keys, readable by their owner alone; nothing else needs to be kept secret
    FOLDER/metadata/N.root.json    which keys sign what (1 year)
    FOLDER/metadata/N.targets.json the releases: one target RELEASE/extractor.onnx each, with its manifest (30 days)
    FOLDER/metadata/N.snapshot.json, timestamp.json    which targets are current (7 days)
    FOLDER/artefacts/SHA256        the bytes of what is released, put there by whoever publishes

Files are written, and have to be published, in this order, timestamp.json last: it is the commit point. A manifest travels as JSON text
inside `custom`, because the canonical JSON that TUF signs has no floating point numbers. Publishing an older manifest again gives it a
higher metadata version, which is how a rollback looks to a device; lower versions are refused there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins
from tuf.api.metadata import Metadata, MetaFile, Root, Signed, Snapshot, TargetFile, Targets, Timestamp

from edge_fl.errors import ArtefactError, InputError
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.release.manifest import Entry, Manifest, decode, encode, listed, target_path
from server.release.keys import Keys

KEPT_RELEASES = 3
MAX_METADATA_BYTES = 256 * 1024  # one message on the wire
ORDER = (Targets.type, Snapshot.type, Timestamp.type)

File = tuple[str, bytes]


@dataclass(frozen=True)
class Lifetimes:
    """How long each role's metadata is believed; `refresh` signs again when a third of it is left."""

    root_days: float = 365
    targets_days: float = 30
    snapshot_days: float = 7
    timestamp_days: float = 7

    def of(self, role: str) -> timedelta:
        """The life of one role's metadata."""
        return timedelta(days=getattr(self, f"{role}_days"))


class KeyRow(Struct, frozen=True):
    """One key of one role; `place` is the folder that holds it, "" when it is not at hand."""

    role: str
    key: str
    threshold: int
    expires: str
    place: str


def now() -> datetime:
    """The wall clock, in UTC to the second, as TUF writes it."""
    return datetime.now(UTC).replace(microsecond=0)


class Repository:
    """Keys and metadata below one folder, made on first use; keys that were taken out are looked for `elsewhere` too.

    Raises InputError when a key that is needed is not there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        lifetimes: Lifetimes = Lifetimes(),
        clock: Callable[[], datetime] = now,
        elsewhere: Sequence[Path] = (),
    ) -> None:
        self.folder = folder
        self._metadata = folder / "metadata"
        self._lifetimes = lifetimes
        self._clock = clock
        with reporting(str(folder)):
            self.keys = Keys(folder / "keys", elsewhere)
            self._metadata.mkdir(exist_ok=True)
            self._root = self._open_root()
            self._signed = self._open_roles()

    @property
    def artefacts(self) -> Path:
        """The folder of released bytes, each file named by its sha256."""
        return self.folder / "artefacts"

    @property
    def root_bytes(self) -> bytes:
        """The newest root: what a device ships with."""
        return (self._metadata / f"{self._root.version}.root.json").read_bytes()

    def releases(self) -> list[Manifest]:
        """The releases that devices may run, last published last."""
        targets = self._signed[Targets.type].targets
        return [entry.read() for entry in listed(target.custom for target in targets.values())]

    def next_release(self) -> int:
        """A release number that was never used here."""
        return int(self._signed[Targets.type].unrecognized_fields.get("highest_release", 0)) + 1

    def publish(self, manifest: Manifest) -> list[File]:
        """Signs the manifest in, beside the last two; the new files in the order to publish them. Raises ArtefactError."""
        text = encode(decode(encode(manifest))).decode()
        signed = deepcopy(self._signed)
        role, extractor, path = signed[Targets.type], manifest.extractor, target_path(manifest.release)
        if path in role.targets and _entry(role.targets[path]).manifest != text:
            raise ArtefactError(
                f"release {manifest.release}: signed before with another manifest",
                consequence="nothing was published",
            )
        custom = to_builtins(Entry(text, self._next_version(Targets.type)))
        target = TargetFile(extractor.bytes, {"sha256": extractor.sha256}, path, {"custom": custom})
        role.targets = _newest(role.targets | {path: target})
        role.unrecognized_fields["highest_release"] = max(self.next_release() - 1, manifest.release)
        return self._renew(Targets.type, signed)

    def files(self) -> list[File]:
        """All current metadata, in the order to publish it."""
        names = [f"{version}.root.json" for version in range(1, self._root.version + 1)]
        names += [_file_name(role, self._signed[role].version) for role in ORDER]
        return [(name, (self._metadata / name).read_bytes()) for name in names]

    def refresh(self) -> list[File]:
        """Signs again what is near its expiry, or was left with a retired key's signature, as far as the keys are here.

        The new files come in the order to publish them.
        """
        files = [self._renew_root()] if self._near_expiry(self._root) and self._can_sign(Root.type) else []
        for role in ORDER:
            stale = self._near_expiry(self._signed[role]) or not self._signed_as_root_says(role)
            if stale and all(map(self._can_sign, ORDER[ORDER.index(role) :])):
                return files + self._renew(role, deepcopy(self._signed))
        return files

    def rotate(self, role: str) -> list[File]:
        """A new key for "root", "targets", "snapshot" or "timestamp"; the old one is worthless as soon as devices see the new root.

        The new key is put where the old one was. A role of several keys has one again, and a threshold of 1.
        """
        retired = list(self._root.roles[role].keyids)
        folder = self.keys.place(retired[0])
        self._require_signers(Root.type)
        for keyid in retired:
            self._root.revoke_key(keyid, role)
        self._root.roles[role].threshold = 1
        self._root.add_key(self.keys.new(folder).public_key, role)
        files = [self._renew_root(retired if role == Root.type else [])]
        first = Targets.type if role == Root.type else role
        return files + self._renew(first if self._can_sign(first) else Timestamp.type, deepcopy(self._signed))

    def add_key(self, role: str, threshold: int, folder: Path) -> list[File]:
        """One more key for a role, in `folder`; from now on `threshold` of its keys must sign. Raises InputError."""
        if not 1 <= threshold <= len(self._root.roles[role].keyids) + 1:
            raise InputError(
                f"threshold {threshold} of {role}: expected 1 to {len(self._root.roles[role].keyids) + 1}"
            )
        self._require_signers(Root.type)
        self._root.add_key(self.keys.new(folder).public_key, role)
        self._root.roles[role].threshold = threshold
        files = [self._renew_root()]
        return files if role == Root.type else files + self._renew(role, deepcopy(self._signed))

    def take_out(self, role: str, folder: Path) -> list[str]:
        """Moves a role's keys that are here into `folder` -> their ids. They are needed again to sign, and nowhere else kept."""
        return self.keys.take_out(self._root.roles[role].keyids, folder)

    def key_rows(self) -> list[KeyRow]:
        """Which key signs what, how many are asked for, until when what it signed is believed, and where the key is."""
        signed = {Root.type: self._root, **self._signed}
        return [
            KeyRow(
                role,
                keyid,
                self._root.roles[role].threshold,
                f"{signed[role].expires:%Y-%m-%d}",
                str(self.keys.place(keyid) or ""),
            )
            for role in (Root.type, *ORDER)
            for keyid in self._root.roles[role].keyids
        ]

    def _open_root(self) -> Root:
        versions = [int(path.name.partition(".")[0]) for path in self._metadata.glob("*.root.json")]
        if versions:
            return Metadata[Root].from_file(str(self._metadata / f"{max(versions)}.root.json")).signed
        root = Root(
            version=1, expires=self._clock() + self._lifetimes.of(Root.type), consistent_snapshot=True
        )
        for role in (Root.type, *ORDER):
            root.add_key(self.keys.new().public_key, role)
        self._write(Root.type, root)
        return root

    def _open_roles(self) -> dict[str, Any]:
        """Follows timestamp to snapshot to targets: files beyond them were never committed."""
        if not (self._metadata / "timestamp.json").exists():
            self._signed = {Targets.type: Targets(), Snapshot.type: Snapshot(), Timestamp.type: Timestamp()}
            self._renew(Targets.type, self._signed)
            return self._signed
        timestamp = self._read(Timestamp.type, 0)
        snapshot = self._read(Snapshot.type, timestamp.snapshot_meta.version)
        targets = self._read(Targets.type, snapshot.meta["targets.json"].version)
        return {Targets.type: targets, Snapshot.type: snapshot, Timestamp.type: timestamp}

    def _renew(self, first: str, signed: dict[str, Any]) -> list[File]:
        """New versions of `first` and of every role after it, from the contents in `signed`, which is then what is current."""
        files: list[File] = []
        for role in ORDER[ORDER.index(first) :]:
            content = signed[role]
            content.version = self._next_version(role)
            content.expires = self._clock() + self._lifetimes.of(role)
            if role == Snapshot.type:
                content.meta["targets.json"] = self._describe(Targets.type, signed, files)
            elif role == Timestamp.type:
                content.snapshot_meta = self._describe(Snapshot.type, signed, files)
            files.append(self._write(role, content))
        self._signed = signed
        for name, _ in files:
            for obsolete in superseded(name):
                (self._metadata / obsolete).unlink(missing_ok=True)
        return files

    def _describe(self, role: str, signed: dict[str, Any], files: list[File]) -> MetaFile:
        """Version, length and hash of a role's file: of the new one when there is one."""
        name = _file_name(role, signed[role].version)
        payload = dict(files).get(name) or (self._metadata / name).read_bytes()
        return MetaFile.from_data(signed[role].version, payload, ["sha256"])

    def _renew_root(self, retired: list[str] | None = None) -> File:
        """The next root, signed by the keys it names and by those it retires."""
        self._root.version += 1
        self._root.expires = self._clock() + self._lifetimes.of(Root.type)
        return self._write(Root.type, self._root, retired or [])

    def _write(self, role: str, signed: Any, retired: list[str] | None = None) -> File:
        metadata = Metadata(signed)
        named = self._keyids(role, signed)
        for keyid in [*self.keys.at_hand(named, self._threshold(role, signed)), *(retired or [])]:
            metadata.sign(self.keys.signer(keyid), append=True)
        name, payload = _file_name(role, signed.version), metadata.to_bytes()
        if len(payload) > MAX_METADATA_BYTES:
            raise ArtefactError(
                f"{name}: {len(payload)} bytes, at most {MAX_METADATA_BYTES}; describe the extractor in longer chunks"
            )
        with reporting(name):
            atomic.write(self._metadata / name, payload)
        return name, payload

    def _keyids(self, role: str, signed: Signed) -> list[str]:
        root = signed if isinstance(signed, Root) else self._root
        return list(root.roles[role].keyids)

    def _read(self, role: str, version: int) -> Any:
        return Metadata.from_file(str(self._metadata / _file_name(role, version))).signed

    def _next_version(self, role: str) -> int:
        """One above every version that was ever written: a number that a crash left behind is not used again."""
        if role == Timestamp.type:
            exists = (self._metadata / "timestamp.json").exists()
            return int(self._signed[role].version) + 1 if exists else 1
        return 1 + max(
            (int(path.name.partition(".")[0]) for path in self._metadata.glob(f"*.{role}.json")), default=0
        )

    def _near_expiry(self, signed: Signed) -> bool:
        return signed.expires - self._clock() < self._lifetimes.of(signed.type) / 3

    def _signed_as_root_says(self, role: str) -> bool:
        path = self._metadata / _file_name(role, self._signed[role].version)
        signatures = Metadata[Any].from_file(str(path)).signatures.keys()
        return len(signatures & set(self._root.roles[role].keyids)) >= self._root.roles[role].threshold

    def _threshold(self, role: str, signed: Signed) -> int:
        root = signed if isinstance(signed, Root) else self._root
        return int(root.roles[role].threshold)

    def _can_sign(self, role: str) -> bool:
        return len(self.keys.held(self._root.roles[role].keyids)) >= self._root.roles[role].threshold

    def _require_signers(self, role: str) -> None:
        self.keys.at_hand(self._root.roles[role].keyids, self._root.roles[role].threshold)


def superseded(name: str) -> list[str]:
    """The file that nobody needs once `name` is published: two versions back, so that a refresh under way still finds its own."""
    version, _, rest = name.partition(".")
    return (
        [f"{int(version) - 2}.{rest}"]
        if version.isdecimal() and int(version) > 2 and "root" not in rest
        else []
    )


def _file_name(role: str, version: int) -> str:
    return "timestamp.json" if role == Timestamp.type else f"{version}.{role}.json"


def _entry(target: TargetFile) -> Entry:
    return listed([target.custom])[0]


def _newest(targets: dict[str, TargetFile]) -> dict[str, TargetFile]:
    """The last releases that fit one message, never fewer than the newest."""
    last_first = sorted(targets, key=lambda path: _entry(targets[path]).serial, reverse=True)[:KEPT_RELEASES]
    while len(last_first) > 1 and sum(_size_bytes(targets[path]) for path in last_first) > MAX_METADATA_BYTES:
        last_first.pop()
    return {path: targets[path] for path in last_first}


def _size_bytes(target: TargetFile) -> int:
    """What a target takes up in targets.json: its manifest with every quotation mark escaped, and a little beside it."""
    text = _entry(target).manifest
    return len(text) + text.count('"') + 1024
