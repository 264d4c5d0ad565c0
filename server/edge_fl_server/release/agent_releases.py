"""Sign releases of the agent's own software: wheels, listed in the signed metadata like the releases of extractors."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace
from packaging.metadata import Metadata
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from edge_fl.blob import describe
from edge_fl.errors import ArtefactError, InputError, brief
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.files.paths import text
from edge_fl.release import agent
from edge_fl.release.agent import AgentRelease, AgentWheel, unpacked_bytes
from edge_fl_server.release.repository import Repository

AGENT = "edge-fl"
KEPT_RELEASES = 3
HIGHEST = "highest_agent"


def listed(repository: Repository) -> list[AgentRelease]:
    """The kept agent releases by number."""
    return agent.listed(repository.field(agent.FIELD) or [])


def sign(repository: Repository, files: Sequence[Path], *, downgrade: bool = False) -> AgentRelease:
    """Sign wheels as the next agent release, on disk alone; the last one if it is the same.

    Raises InputError for other files, without a wheel of edge-fl, or for an older version than the last without `downgrade`.
    """
    payloads = {path.name: _read(path) for path in files}
    wheels = [_described(name, payload) for name, payload in sorted(payloads.items())]
    version = _version(wheels)
    with repository.locked():
        kept = listed(repository)
        last = next((one for one in reversed(kept) if not one.withdrawn), None)
        if last and last.wheels == wheels and last.downgrade == downgrade:
            return last
        if last and Version(version) < Version(last.version) and not downgrade:
            raise InputError(
                f"agent release: version {version}, but {last.version} was released before; expected a newer one, or --downgrade",
                "nothing was signed",
            )
        number = int(str(repository.field(HIGHEST) or 0)) + 1
        release = AgentRelease(number, version, wheels, downgrade)
        with reporting(str(repository.artefacts)):
            repository.artefacts.mkdir(exist_ok=True)
            for wheel in wheels:
                atomic.write(repository.artefacts / wheel.blob.sha256, payloads[wheel.file])
        _store(repository, [*kept, release][-KEPT_RELEASES:], number)
    return release


def withdrawn(repository: Repository, files: Sequence[Path]) -> int:
    """The number of the newest kept agent release with exactly these wheels, if it was withdrawn; 0 if not. Raises InputError."""
    wheels = [
        _described(name, payload) for name, payload in sorted((path.name, _read(path)) for path in files)
    ]
    same = next((one for one in reversed(listed(repository)) if one.wheels == wheels), None)
    return same.number if same and same.withdrawn else 0


def withdraw(repository: Repository, number: int) -> bool:
    """Sign that devices may return from an agent release to an earlier version; whether that is new."""
    with repository.locked():
        kept = listed(repository)
        changed = [replace(one, withdrawn=True) if one.number == number else one for one in kept]
        if changed != kept:
            _store(repository, changed, int(str(repository.field(HIGHEST))))
    return changed != kept


def _store(repository: Repository, releases: Sequence[AgentRelease], highest: int) -> None:
    repository.set_fields({agent.FIELD: [agent.encode(one) for one in releases], HIGHEST: highest})


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{text(path)}: {error.strerror}; expected a wheel", "nothing was signed") from error


def _described(name: str, payload: bytes) -> AgentWheel:
    """A wheel with its requirements, without those of extras."""
    from io import BytesIO

    try:
        project, version, _, _ = parse_wheel_filename(name)
        with zipfile.ZipFile(BytesIO(payload)) as archive:
            (inside,) = (
                one
                for one in archive.namelist()
                if one.endswith(".dist-info/METADATA") and one.count("/") == 1
            )
            unpacked = unpacked_bytes(name, archive.infolist())
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"{damaged} is damaged")
            metadata = Metadata.from_email(archive.read(inside), validate=False)
        requires = [str(line) for line in metadata.requires_dist or [] if "extra" not in str(line.marker)]
        wheel = AgentWheel(name, describe(payload), unpacked, requires, str(metadata.requires_python or ""))
    except (
        ArtefactError,
        InvalidWheelFilename,
        zipfile.BadZipFile,
        ValueError,
        KeyError,
        ExceptionGroup,
    ) as error:
        raise InputError(f"{name}: {brief(error)}; expected a wheel", "nothing was signed") from error
    if Version(str(metadata.version)) != version or not project:
        raise InputError(f"{name}: contains version {metadata.version}", "nothing was signed")
    return wheel


def _version(wheels: Sequence[AgentWheel]) -> str:
    parsed = [parse_wheel_filename(wheel.file) for wheel in wheels]
    versions = {str(version) for name, version, _, _ in parsed if name == AGENT}
    if len(versions) != 1:
        names = ", ".join(wheel.file for wheel in wheels) or "none"
        raise InputError(
            f"agent release: {names}; expected wheels of one version of edge-fl", "nothing was signed"
        )
    return versions.pop()
