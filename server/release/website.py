"""The signed repository as static files, so that any web server can hand it to devices and auditors: no new trust, another way.

    FOLDER/metadata/N.root.json, N.targets.json, N.snapshot.json, timestamp.json    what a device gets over MQTT, byte for byte
    FOLDER/targets/RELEASE/SHA256.extractor.onnx                                    and the variants and extras beside it

It is the layout that TUF clients expect (consistent snapshots). No key is ever written there. Files come in the order in which they are
published, the timestamp last, so that whoever reads in between finds the repository as it was before or as it is after.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from edge_fl import atomic
from edge_fl.errors import ArtefactError
from edge_fl.release.disk import reporting
from edge_fl.release.manifest import paths
from edge_fl.release.repository import Repository


def export(repository: Repository, folder: Path) -> list[Path]:
    """Brings `folder` up to date with the kept releases -> the files that are new. Raises ArtefactError, and then the old ones stand."""
    wanted = {
        folder / "targets" / path: repository.artefacts / blob.sha256
        for manifest in repository.releases()
        for path, blob in paths(manifest).items()
    }
    lacking = [source for source in wanted.values() if not source.is_file()]
    if lacking:
        raise ArtefactError(
            f"{lacking[0]}: gone, expected the bytes of a kept release (and {len(lacking) - 1} more); nothing was exported"
        )
    with reporting(str(folder)):
        new = [place for place in wanted if not place.exists()]
        for place in new:
            _copy(wanted[place], place)
        new += _write_metadata(repository, folder / "metadata")
        for place in (folder / "targets").glob("*/*"):
            if place not in wanted:
                place.unlink()
    return new


def _copy(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as original, atomic.writing(place) as file:
        shutil.copyfileobj(original, file)


def _write_metadata(repository: Repository, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = repository.files()
    new = [folder / name for name, payload in files if not _holds(folder / name, payload)]
    for name, payload in files:
        if folder / name in new:
            atomic.write(folder / name, payload)
    needed = {name for name, _ in files} | {_one_back(name) for name, _ in files}
    for place in folder.glob("*.json"):
        if place.name not in needed:
            place.unlink()
    return new


def _holds(place: Path, payload: bytes) -> bool:
    return place.exists() and place.read_bytes() == payload


def _one_back(name: str) -> str:
    """The file before, for somebody who has just read the old timestamp."""
    version, _, rest = name.partition(".")
    return f"{int(version) - 1}.{rest}" if version.isdecimal() else name
