"""Environments of updates: a virtual environment with the changed wheels, and behind them the packages of the installation.

It costs a few MB: what the wheels do not contain comes from FACTORY, which a line in `factory.pth` appends to the import path.
"""

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, cast
from venv import EnvBuilder
from zipfile import BadZipFile, ZipFile

import msgspec
from installer import install
from installer.destinations import SchemeDictionaryDestination
from installer.exceptions import InstallerError
from installer.records import RecordEntry
from installer.sources import WheelFile
from installer.utils import Scheme
from msgspec import Struct

from edge_fl.errors import ArtefactError, RunError, brief
from edge_fl.failures import Failure
from edge_fl.files.disk import reporting
from edge_fl.files.paths import text
from edge_fl.release import wheels as wheel_sizes
from edge_fl.untrusted import NOT_JSON
from edge_fl_devices.update.state import COMPLETE

WHEELS = "wheels"
STAYS = "the running agent stays"
GENERATED_BYTES = 1 << 20  # scripts and RECORD, which are written anew
LIST_S = 60.0
LIST = """
import importlib.metadata, json
known = {}
for one in importlib.metadata.distributions():
    known.setdefault(one.name, [one.version, one.requires or []])
print(json.dumps(known))
"""


class Distribution(Struct, frozen=True, array_like=True):
    """An installed package: its version, and what it requires."""

    version: str
    requires: list[str] = []


def python(environment: Path) -> Path:
    """The Python of an environment."""
    return environment / "bin" / "python"


def distributions(environment: Path) -> dict[str, Distribution]:
    """Return the packages that an environment imports, by name. Raises RunError."""
    command = [os.fspath(python(environment)), "-I", "-c", LIST]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIST_S, check=True)
        return msgspec.json.decode(done.stdout, type=dict[str, Distribution])
    except (OSError, subprocess.SubprocessError, *NOT_JSON) as error:
        raise RunError(f"{text(environment)}: {brief(error)}", "the running agent stays") from error


def is_complete(environment: Path) -> bool:
    """Return whether an environment was built to its end."""
    return (environment / COMPLETE).exists()


def build(environment: Path, factory: Path, wheels: Mapping[Path, int]) -> None:
    """Install `wheels`, which lie in the environment's folder `wheels`. Its mark comes last, after everything is on the disk.

    wheels: with the most bytes that each may unpack to.

    Raises ArtefactError ("enospc", "bad_wheel").
    """
    with reporting(f"environment {text(environment.name)}"):
        for path in environment.iterdir():
            if path.name != WHEELS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        EnvBuilder(symlinks=True).create(environment)
        paths = _paths(environment)
        line = f"import site; site.addsitedir({_paths(factory)['purelib']!r})\n"
        (Path(paths["purelib"]) / "factory.pth").write_text(line)
        for wheel, most_bytes in wheels.items():
            _install(wheel, most_bytes, environment, paths)
        os.sync()
        (environment / COMPLETE).touch()
        os.sync()


class _Destination(SchemeDictionaryDestination):
    """Folders that take at most `left` bytes of a wheel's files."""

    left = 0

    def write_to_fs(self, scheme: Scheme, path: str, stream: BinaryIO, is_executable: bool) -> RecordEntry:
        """Write a file. Raises ArtefactError if it is too large."""
        limited = _Limited(stream, self.left)
        written = super().write_to_fs(scheme, path, cast(BinaryIO, limited), is_executable)
        self.left = limited.left
        return written


class _Limited:
    """A stream that ends with ArtefactError after `left` bytes."""

    def __init__(self, stream: BinaryIO, left: int) -> None:
        self._stream, self.left = stream, left

    def read(self, size: int = -1) -> bytes:
        content = self._stream.read(self.left + 1 if size < 0 else min(size, self.left + 1))
        if len(content) > self.left:
            raise ArtefactError("more than its declared size is unpacked", Failure.BAD_WHEEL, STAYS)
        self.left -= len(content)
        return content


def _install(wheel: Path, most_bytes: int, environment: Path, paths: dict[str, str]) -> None:
    destination = _Destination(
        paths, os.fspath(python(environment)), "posix", bytecode_optimization_levels=(0,)
    )
    destination.left = most_bytes + GENERATED_BYTES
    try:
        with ZipFile(wheel) as archive:
            found = wheel_sizes.unpacked_bytes(text(wheel.name), archive.infolist())
        if found > most_bytes:
            raise ArtefactError(
                f"{text(wheel.name)}: unpacks to {found} bytes, the signed metadata say {most_bytes}",
                Failure.BAD_WHEEL,
                STAYS,
            )
        with WheelFile.open(wheel) as source:
            source.validate_record()
            install(source, destination, {"INSTALLER": b"edge-fl\n"})
    except (InstallerError, BadZipFile, ValueError, KeyError) as error:
        raise ArtefactError(f"{text(wheel.name)}: {brief(error)}", Failure.BAD_WHEEL, STAYS) from error


def _paths(environment: Path) -> dict[str, str]:
    """The folders of a virtual environment by the names of wheels' schemes."""
    base = {"base": os.fspath(environment), "platbase": os.fspath(environment)}
    paths = sysconfig.get_paths("venv", base)
    return {name: paths[name] for name in ("purelib", "platlib", "scripts", "data")} | {
        "headers": paths["include"]
    }
