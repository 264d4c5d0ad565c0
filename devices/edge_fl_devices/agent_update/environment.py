"""Environments of updates: a virtual environment with the changed wheels, and behind them the packages of the installation.

It costs a few MB: what the wheels do not contain comes from FACTORY, which a line in `factory.pth` appends to the import path. Which wheels
these are, and whether a release may be installed, follows from the release and FACTORY alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Collection, Iterator, Mapping
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
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from edge_fl.errors import ArtefactError, RunError, brief
from edge_fl.failures import Failure
from edge_fl.files.disk import reporting
from edge_fl.files.paths import text
from edge_fl.release.agent import AgentRelease, AgentWheel, unpacked_bytes
from edge_fl.untrusted import NOT_JSON
from edge_fl_devices.agent_update.state import COMPLETE

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
AGENT = "edge-fl"


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
            found = unpacked_bytes(text(wheel.name), archive.infolist())
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


def require_allowed(release: AgentRelease, version: str, *, withdrawn: bool) -> None:
    """Raise ArtefactError: "downgrade" for a version older than the running one, unless it is signed as such; "withdrawn".

    withdrawn: the running agent release is signed as withdrawn, so the device may return to any.
    """
    if release.withdrawn and not withdrawn:
        raise ArtefactError(
            f"agent release {release.number}: withdrawn, the request is old", Failure.WITHDRAWN, STAYS
        )
    if not (release.downgrade or withdrawn) and Version(release.version) < Version(version):
        raise ArtefactError(
            f"agent release {release.number}: version {release.version}, {version} runs here;"
            " expected a newer one, or one signed as a downgrade",
            Failure.DOWNGRADE,
            STAYS,
        )


def needed(
    release: AgentRelease, factory: Mapping[str, Distribution], tags: Collection[Tag], python: str
) -> list[AgentWheel]:
    """Return the wheel of edge-fl and those of dependencies that the installation lacks in this version.

    Raises ArtefactError: "wrong_platform" without a wheel of edge-fl for this Python and machine, "unsatisfied" if a package would
    lack a dependency.
    """
    known: dict[str, Distribution] = {canonicalize_name(name): package for name, package in factory.items()}
    chosen: dict[str, tuple[Version, AgentWheel]] = {}
    for wheel in release.wheels:
        try:
            name, version, _, supported = parse_wheel_filename(wheel.file)
            fits = bool(supported & set(tags)) and SpecifierSet(wheel.requires_python).contains(python, True)
        except (InvalidWheelFilename, InvalidVersion, InvalidSpecifier) as error:
            raise ArtefactError(
                f"agent release {release.number}: {error}", Failure.BAD_WHEEL, STAYS
            ) from error
        present = known.get(name)
        if fits and (name == AGENT or present is None or Version(present.version) != version):
            chosen.setdefault(name, (version, wheel))
    if AGENT not in chosen:
        files = ", ".join(wheel.file for wheel in release.wheels)
        raise ArtefactError(
            f"agent release {release.number}: {files}: none for this machine and Python {python}",
            Failure.WRONG_PLATFORM,
            STAYS,
        )
    if flaws := list(_unsatisfied(chosen, known)):
        raise ArtefactError(
            f"agent release {release.number}: {'; '.join(flaws[:3])}", Failure.UNSATISFIED, STAYS
        )
    return [wheel for _, wheel in chosen.values()]


def _unsatisfied(
    chosen: Mapping[str, tuple[Version, AgentWheel]], known: Mapping[str, Distribution]
) -> Iterator[str]:
    """What the new packages require and would not find, and what the others require of the new packages."""
    versions = {name: package.version for name, package in known.items()}
    versions |= {name: str(version) for name, (version, _) in chosen.items()}
    requires = {name: package.requires for name, package in known.items() if name not in chosen}
    requires |= {name: wheel.requires for name, (_, wheel) in chosen.items()}
    for name, lines in requires.items():
        for line in lines:
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue
            wanted = canonicalize_name(requirement.name)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            if name not in chosen and wanted not in chosen:
                continue  # as it was before
            found = versions.get(wanted)
            if found is None or not requirement.specifier.contains(found, True):
                yield f"{name} requires {line}, found {found or 'none'}"
