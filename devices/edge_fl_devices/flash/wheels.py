"""Requirements that pip installs on the Pi: the versions installed here, pinned and hashed, for Linux on aarch64.

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
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from edge_fl.errors import DeadlineError, RunError
from edge_fl.files import atomic
from edge_fl.files.paths import text
from edge_fl_devices.flash.edge_fl_wheel import NAME, pack

PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}
PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_24", "manylinux_2_27", "manylinux_2_28")
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
        lines = _download(python, folder) if offline else _resolve(python, folder)
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
    """Return the cache key of this set of versions."""
    return hashlib.sha256("\n".join(pins()).encode()).hexdigest()[:12]


def _installer(cache: Path) -> Path:
    """Return pip's own wheel, from which pip runs on the Pi without being installed."""
    version = metadata.version("pip")
    folder = cache / f"pip-{version}"
    if not any(folder.glob("pip-*.whl")):
        _pip("download", "--no-deps", "--only-binary=:all:", "--dest", os.fspath(folder), f"pip=={version}")
    return next(folder.glob("pip-*.whl"))


def _download(python: str, folder: Path) -> list[str]:
    """Return the requirement lines of the wheels in `folder`; download them if incomplete."""
    done = folder / "complete"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _pip("download", "--dest", os.fspath(folder), *_target(python), *pins())
        atomic.write(done, "")
    return [_requirement(wheel) for wheel in sorted(folder.glob("*.whl"))]


def _resolve(python: str, folder: Path) -> list[str]:
    """Return requirement lines resolved by the package index, without downloading wheels."""
    cached = folder.with_name(f"{folder.name}.txt")
    if not cached.exists():
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch) / "report.json"
            _pip(
                *("install", "--dry-run", "--ignore-installed", "--quiet", "--target", scratch),
                *("--report", os.fspath(report), *_target(python), *pins()),
            )
            packages = json.loads(report.read_bytes())["install"]
        lines = []
        for package in packages:
            about, digests = package["metadata"], package["download_info"]["archive_info"]["hashes"]
            lines.append(f"{about['name']}=={about['version']} --hash=sha256:{digests['sha256']}")
        cached.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(cached, "\n".join(sorted(lines)))
    return cached.read_text().splitlines()


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
