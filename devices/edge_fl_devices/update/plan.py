"""Whether this device can run an agent release, and which of its wheels it needs. Pure."""

from collections.abc import Collection, Iterator, Mapping

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl.release.agent import AgentRelease, AgentWheel
from edge_fl_devices.update.environment import STAYS, Distribution

AGENT = "edge-fl"


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
