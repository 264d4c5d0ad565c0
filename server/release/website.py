"""The signed repository as static files, so that any web server can hand it to devices and auditors: no new trust, another way.

    FOLDER/metadata/N.root.json, N.targets.json, N.snapshot.json, timestamp.json    what a device gets over MQTT, byte for byte
    FOLDER/targets/RELEASE/SHA256.extractor.onnx                                    and the variants and extras beside it

It is the layout that TUF clients expect (consistent snapshots). No key is ever written there. Files come in the order in which they are
published, the timestamp last, so that whoever reads in between finds the repository as it was before or as it is after.

The repository remembers one such folder, in its file `website`. Whoever publishes from it brings that folder up to date first, be it a run,
a roll-out, or a roll-back that a person types with no server there.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from edge_fl.errors import ArtefactError, InputError
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.release.manifest import paths
from server.release.repository import File, Repository


def export(repository: Repository, folder: Path) -> list[Path]:
    """Brings `folder` up to date with the kept releases -> the files that are new.

    Raises InputError for a folder of something else, ArtefactError when bytes are gone or the disk fails; what was there then stands.
    """
    _require_ours(repository, folder)
    wanted = {
        folder / "targets" / path: repository.artefacts / blob.sha256
        for manifest in repository.releases()
        for path, blob in paths(manifest).items()
    }
    lacking = [source for source in wanted.values() if not source.is_file()]
    if lacking:
        raise ArtefactError(
            f"{lacking[0]}: gone, expected the bytes of a kept release (and {len(lacking) - 1} more)",
            consequence="nothing was exported",
        )
    files, metadata = repository.files(), folder / "metadata"
    with reporting(str(folder)):
        new = _write(metadata, files[:1])  # the first root says that the folder is ours, also after a cut
        for place in [place for place in wanted if not place.exists()]:
            _copy(wanted[place], place)
            new.append(place)
        new += _write(metadata, files)
        needed = {metadata / name for old in files for name in (old[0], _one_back(old[0]))}
        for place in (*metadata.iterdir(), *(folder / "targets").glob("*/*")):
            if place not in needed and place not in wanted:
                place.unlink()
    return new


def keep(repository: Repository, folder: Path | None) -> None:
    """From now on whatever is published goes to `folder` too; None: to none. Raises ArtefactError when the disk fails."""
    with reporting(str(repository.folder)):
        if folder is None:
            _place(repository).unlink(missing_ok=True)
        else:
            atomic.write(_place(repository), str(folder.absolute()))


def kept(repository: Repository) -> Path | None:
    """The folder that is to have whatever is published. Raises ArtefactError when the disk fails."""
    with reporting(str(repository.folder)):
        return Path(_place(repository).read_text()) if _place(repository).exists() else None


def _place(repository: Repository) -> Path:
    return repository.folder / "website"


def _require_ours(repository: Repository, folder: Path) -> None:
    """What an export does not need any more it removes: only where an export of this repository was made before."""
    inside = [place for place in (folder / "metadata", folder / "targets") if place.exists()]
    name, root = repository.files()[0]
    at_home = folder.resolve() == repository.folder.resolve()
    if at_home or (inside and not _holds(folder / "metadata" / name, root)):
        raise InputError(
            f"{folder}: {'holds the keys' if at_home else f'{inside[0].name} in it is of something else'}; expected a folder of its own for"
            " this fleet's export; nothing was exported"
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


def _one_back(name: str) -> str:
    """The file before, for somebody who has just read the old timestamp."""
    version, _, rest = name.partition(".")
    return f"{int(version) - 1}.{rest}" if version.isdecimal() else name
