"""Export the signed repository as static files for a web server, from which devices and auditors can download it.

    FOLDER/metadata/N.root.json, N.targets.json, N.snapshot.json, timestamp.json    the same bytes as over MQTT
    FOLDER/targets/RELEASE/SHA256.extractor.onnx                                    and variants and extras in the same folder

This is the layout that TUF clients expect (consistent snapshots). Keys are never written there. Files are written in the order of
publication, the timestamp last, so that a concurrent reader gets either the old or the new repository.

The repository stores the path of one such folder in its file `website`. Every publication from it updates that folder first: by a run, a
roll-out, or a rollback from the command line without a server.

For consumers that know OpenSSF Model Signing but not TUF, `sign` writes a second signature, targets/RELEASE/model.sig;
devices do not use it.
"""

import os
import shutil
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from edge_fl.errors import ArtefactError, ConfigError, InputError
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.files.paths import text
from edge_fl.release.manifests import paths
from edge_fl_server.release.repository import File, Repository

SIGNATURE = "model.sig"


def export(repository: Repository, folder: Path) -> list[Path]:
    """Update `folder` to the kept releases -> the new files.

    Raises InputError for a folder with other content, ArtefactError if bytes are missing or the disk fails; existing files then stay.
    """
    _require_own_folder(repository, folder)
    wanted = {
        folder / "targets" / path: repository.artefacts / blob.sha256
        for manifest in repository.releases()
        for path, blob in paths(manifest).items()
    }
    missing = [source for source in wanted.values() if not source.is_file()]
    if missing:
        raise ArtefactError(
            f"{missing[0]}: missing, expected the bytes of a kept release (and {len(missing) - 1} more)",
            consequence="nothing was exported",
        )
    files, metadata = repository.files(), folder / "metadata"
    with reporting(text(folder)):
        new = _write(metadata, files[:1])  # marks the folder as an export, also after an interruption
        for place in [place for place in wanted if not place.exists()]:
            _copy(wanted[place], place)
            new.append(place)
        new += _write(metadata, files)
        needed = {metadata / name for current, _ in files for name in (current, _previous(current))}
        for place in (*metadata.iterdir(), *(folder / "targets").glob("*/*")):
            signature = place.name == SIGNATURE and any(kept.parent == place.parent for kept in wanted)
            if place not in needed and place not in wanted and not signature:
                place.unlink()
    return new


def sign(folder: Path, key: Path) -> list[Path]:
    """Sign every release in an exported folder with OpenSSF Model Signing and an EC key -> the signatures.

    A missing key is created (P-256), with its public key in KEY.pub. Raises ConfigError without the extra, InputError for another key
    or a folder without releases.
    """
    try:
        from model_signing import hashing, signing
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"model-signing is not installed ({error.name}); expected edge-fl[signing]"
        ) from error
    releases = sorted(place for place in (folder / "targets").glob("*") if place.is_dir())
    if not releases:
        raise InputError(f"{text(folder)}: no releases; expected a folder of 'edge-fl release export'")
    with reporting(text(key)):
        if not key.exists():
            _create_key(key)
    signed = []
    for release in releases:
        signature = release / SIGNATURE
        hashed = hashing.Config().set_ignored_paths(paths=[signature], ignore_git_paths=False)
        try:
            config = signing.Config().use_elliptic_key_signer(private_key=key).set_hashing_config(hashed)
        except (ValueError, AttributeError) as error:
            raise InputError(
                f"{text(key)}: {error}; expected an EC private key in PEM without a password"
            ) from error
        with reporting(text(signature)):
            config.sign(release, signature)
        signed.append(signature)
    return signed


def _create_key(path: Path) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path.with_name(f"{path.name}.pub"), public)
    atomic.write(path, pem, private=True)


def keep(repository: Repository, folder: Path | None) -> None:
    """Export every publication to `folder` from now on; None: nowhere. Raises ArtefactError if the disk fails."""
    with reporting(str(repository.folder)):
        if folder is None:
            _setting(repository).unlink(missing_ok=True)
        else:
            atomic.write(_setting(repository), os.fspath(folder.absolute()))


def kept_folder(repository: Repository) -> Path | None:
    """The folder to which every publication is exported. Raises ArtefactError if the disk fails."""
    with reporting(str(repository.folder)):
        return Path(_setting(repository).read_text()) if _setting(repository).exists() else None


def _setting(repository: Repository) -> Path:
    return repository.folder / "website"


def _require_own_folder(repository: Repository, folder: Path) -> None:
    """Raise InputError unless the folder is new or an earlier export of this repository: an export deletes files."""
    inside = [place for place in (folder / "metadata", folder / "targets") if place.exists()]
    name, root = repository.files()[0]
    is_repository = folder.resolve() == repository.folder.resolve()
    if is_repository or (inside and not _holds(folder / "metadata" / name, root)):
        problem = (
            "contains the keys"
            if is_repository
            else f"{text(inside[0].name)} in it belongs to something else"
        )
        raise InputError(
            f"{text(folder)}: {problem}; expected a separate folder for this fleet's export",
            consequence="nothing was exported",
        )


def _copy(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as original, atomic.writing(place) as file:
        shutil.copyfileobj(original, file)


def _write(folder: Path, files: list[File]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    new = {folder / name: payload for name, payload in files if not _holds(folder / name, payload)}
    for place, payload in new.items():
        atomic.write(place, payload)
    return list(new)


def _holds(place: Path, payload: bytes) -> bool:
    return place.exists() and place.read_bytes() == payload


def _previous(name: str) -> str:
    """The previous version of a file, for clients that have just read the old timestamp."""
    version, _, rest = name.partition(".")
    return f"{int(version) - 1}.{rest}" if version.isdecimal() else name
