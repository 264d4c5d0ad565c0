"""Requirements that pip installs on the Pi: pinned and hashed, resolved for its Python on Linux, aarch64.

They are the versions installed here, or older ones where these do not exist for the Pi's Python. Whatever --python-version says, pip
evaluates markers such as `python_version < "3.12"`, and with some indexes also Requires-Python, for the Python that it runs with: both
are corrected here.

With `offline` the wheels are put on the card; otherwise only their hashes, and pip downloads them at the first boot. In both cases
`pip install -r` in the requirements file's folder needs no option and accepts no other file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from edge_fl.errors import DeadlineError, RunError
from edge_fl.files import atomic
from edge_fl.files.paths import text
from edge_fl.release.device_wheel import NAME, pack

PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}
PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_24", "manylinux_2_27", "manylinux_2_28")
PI = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "aarch64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "sys_platform": "linux",
}
"""Environment of markers on the Pi, apart from the version of Python."""
DEADLINE_S = 1200
EXTRA = re.compile(r"""extra == ['"](?!heic['"])""")  # heic is put on the device if it is installed here


@dataclass(frozen=True)
class Wheelhouse:
    """Requirements file by Python version, and the wheel files for the folder `wheels` next to it."""

    requirements: dict[str, str]
    files: tuple[Path, ...]


def gather(pythons: tuple[str, ...], cache: Path, *, offline: bool) -> Wheelhouse:
    """Collect the wheels for these Python versions; files in `cache` are not downloaded again. Raises RunError, DeadlineError."""
    name, content = pack()
    (cache / "own").mkdir(parents=True, exist_ok=True)
    own = cache / "own" / name
    if not own.exists() or own.read_bytes() != content:
        atomic.write(own, content)
    installer = _installer(cache)
    requirements, files = {}, {own.name: own, installer.name: installer}
    for python in pythons:
        folder = cache / f"{python}-{pins_key()}"
        lines = _resolve(python, folder)
        if offline:
            lines = _download(python, folder, lines)
        head = ["--no-index"] if offline else []
        requirements[python] = "\n".join(
            [*head, "--only-binary :all:", "--require-hashes", _requirement(own), *lines, ""]
        )
        if offline:
            files |= {path.name: path for path in sorted(folder.glob("*.whl"))}
    return Wheelhouse(requirements, tuple(files[name] for name in sorted(files)))


def pins() -> list[str]:
    """Return `name==version` of all dependencies, without extras other than `heic`, as installed here."""
    versions: dict[str, str] = {}
    todo = [NAME]
    while todo:
        for requirement in metadata.distribution(todo.pop()).requires or ():
            name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
            name = re.sub(r"[-_.]+", "-", name).lower()
            if EXTRA.search(requirement) or name in versions:
                continue
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:  # an extra, or required only on another platform or Python
                continue
            todo.append(name)
    return sorted(f"{name}=={version}" for name, version in versions.items())


def reads_heic() -> bool:
    """Return whether the wheels include a decoder for HEIC pictures."""
    return any(pin.startswith("pillow-heif==") for pin in pins())


def pins_key() -> str:
    """Return the cache key of what is resolved: edge-fl's requirements and the versions installed here."""
    wanted = "\n".join([*(metadata.requires(NAME) or ()), "resolved for the target", *pins()])
    return hashlib.sha256(wanted.encode()).hexdigest()[:12]


def _installer(cache: Path) -> Path:
    """Return pip's own wheel, from which pip runs on the Pi without being installed."""
    version = metadata.version("pip")
    folder = cache / f"pip-{version}"
    if not any(folder.glob("pip-*.whl")):
        _pip("download", "--no-deps", "--only-binary=:all:", "--dest", os.fspath(folder), f"pip=={version}")
    return next(folder.glob("pip-*.whl"))


def _download(python: str, folder: Path, resolved: list[str]) -> list[str]:
    """Return the requirement lines of the wheels in `folder`; download them if incomplete."""
    done = folder / "complete"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pinned = [line.partition(" ")[0] for line in resolved]
        _pip("download", "--no-deps", "--dest", os.fspath(folder), *_target(python), *pinned)
        atomic.write(done, "")
    return [_requirement(wheel) for wheel in sorted(folder.glob("*.whl"))]


def _resolve(python: str, folder: Path) -> list[str]:
    """Return requirement lines resolved by the package index, without downloading wheels."""
    cached = folder.with_name(f"{folder.name}.txt")
    if not cached.exists():
        packages = _packages(python)
        lines = []
        for package in packages:
            about, digests = package["metadata"], package["download_info"]["archive_info"]["hashes"]
            lines.append(f"{about['name']}=={about['version']} --hash=sha256:{digests['sha256']}")
        cached.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(cached, "\n".join(sorted(lines)))
    return cached.read_text().splitlines()


def _packages(python: str) -> list[dict[str, Any]]:
    """Return what pip would install for this Python, as in its report: no version newer than the one installed here, if one is.

    Repeats pip's resolution until nothing is missing and no version is for other Pythons only. Raises RunError, DeadlineError.
    """
    own = set(_needed(metadata.requires(NAME) or (), python, ("", "heic") if reads_heic() else ("",)))
    wanted, limits = set(own), {pin.replace("==", "<=") for pin in pins()}
    while True:
        packages: dict[str, dict[str, Any]] = {
            canonicalize_name(each["metadata"]["name"]): each for each in _report(python, wanted, limits)
        }
        abouts = {name: each["metadata"] for name, each in packages.items()}
        wrong = {
            f"{name}!={about['version']}"
            for name, about in abouts.items()
            if f"{python}.0" not in SpecifierSet(about.get("requires_python", ""))
        }
        used, missing, todo = set[str](), set[str](), list(own)
        while todo:
            requirement = Requirement(line := todo.pop())
            name = canonicalize_name(requirement.name)
            if name not in packages:
                missing.add(line)
            elif line not in used:
                used |= {line, name}
                todo += _needed(abouts[name].get("requires_dist", ()), python, ("", *requirement.extras))
        if not wrong and not missing:
            return [packages[name] for name in sorted(used & packages.keys())]
        wanted, limits = wanted | missing, limits | wrong


def _report(python: str, wanted: Collection[str], limits: Collection[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        report, constraints = Path(scratch) / "report.json", Path(scratch) / "constraints.txt"
        constraints.write_text("\n".join(sorted(limits)))
        _pip(
            *("install", "--dry-run", "--ignore-installed", "--quiet", "--target", scratch),
            *("--report", os.fspath(report), "--constraint", os.fspath(constraints)),
            *_target(python),
            *sorted(wanted),
        )
        packages: list[dict[str, Any]] = json.loads(report.read_bytes())["install"]
        return packages


def _needed(requirements: Iterable[str], python: str, extras: Iterable[str]) -> Iterator[str]:
    """The requirements that hold for this Python on the Pi with these extras, without their markers."""
    environment = {**PI, "python_version": python, "python_full_version": f"{python}.0"}
    for line in requirements:
        requirement = Requirement(line)
        marker, requirement.marker = requirement.marker, None
        if marker is None or any(marker.evaluate({**environment, "extra": extra}) for extra in extras):
            yield str(requirement)


def _target(python: str) -> list[str]:
    """Return pip's options for this Python on Linux, aarch64."""
    platforms = [option for name in PLATFORMS for option in ("--platform", f"{name}_aarch64")]
    return ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(
            f"pip {arguments[0]}: not done after {DEADLINE_S} s", consequence="nothing was written"
        ) from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = " ".join(errors) or done.stderr.strip()
        raise RunError(
            f"pip {arguments[0]} for Linux on aarch64: {reason}", consequence="nothing was written"
        )


def _requirement(wheel: Path) -> str:
    """Return the requirement line of a wheel in the folder `wheels` next to the requirements file."""
    with wheel.open("rb") as file:
        return f"./wheels/{text(wheel.name)} --hash=sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
