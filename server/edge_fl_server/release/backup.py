"""One archive with all that a server must not lose: releases and their keys, the registry, the certificate authority.

No process may change the releases meanwhile, so that the registry never names one that is not there.
"""

import os
import sqlite3
import tarfile
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

from edge_fl.console import units
from edge_fl.errors import InputError
from edge_fl.files.disk import reporting
from edge_fl.files.paths import text
from edge_fl_server.registry.database import FILE
from edge_fl_server.release.repository import Repository

LOCKS = frozenset({"lock", "register.lock"})


def write(file: Path, home: Path, registry: str, identities: Path) -> list[str]:
    """Write the archive -> a line for each part, and for what is not in it. `home`: the folder of all fleets' releases.

    Raises InputError, and ArtefactError for a full disk.
    """
    fleets = sorted({path.parent.parent for path in home.glob("*/metadata/*root.json")})
    if not fleets and not Path(registry).is_file():
        raise InputError(
            f"{text(home)}: no releases, and no registry at {registry}; expected the folders of a server (--home, --database)",
            "nothing was written",
        )
    with reporting(text(file)), tempfile.TemporaryDirectory(dir=file.absolute().parent) as folder:
        copy, partial = Path(folder) / FILE, Path(folder) / "archive"  # a folder that only its owner can read
        with tarfile.open(partial, "w") as archive, ExitStack() as stack:
            for fleet in fleets:
                stack.enter_context(Repository(fleet).locked())
            if "://" in registry:
                server = "not included: the registry is in PostgreSQL; copy it with pg_dump"
            else:
                _copy_registry(registry, copy)
                archive.add(copy, f"server/{FILE}")
                server = f"server: the registry, {units.size(copy.stat().st_size)}"
            releases = f"releases: {_add(archive, home, 'releases')}"
            if (identities / "ca.key").is_file():
                authority = f"identities: {_add(archive, identities, 'identities')}"
            else:
                authority = f"not included: certificates; {text(identities)} has no authority (--identities)"
        partial.chmod(0o600)
        partial.replace(file)
    return [server, releases, authority]


def _copy_registry(registry: str, copy: Path) -> None:
    """A consistent copy of an SQLite file that other processes may write at the same time. Raises InputError."""
    try:
        with closing(sqlite3.connect(registry)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
    except sqlite3.Error as error:
        raise InputError(
            f"registry {registry}: {error}; expected an SQLite file", "nothing was written"
        ) from error


def _add(archive: tarfile.TarFile, folder: Path, name: str) -> str:
    """Add a folder under another name -> its number of files and size."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in LOCKS)
    for path in files:
        archive.add(path, os.fspath(Path(name, path.relative_to(folder))))
    return f"{units.counted(len(files), 'file')}, {units.size(sum(path.stat().st_size for path in files))}"
