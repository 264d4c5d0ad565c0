"""What pip installs on the Pi: the versions that are installed here, pinned and hashed, for linux on aarch64.

Offline, the wheels themselves go onto the card; online, only their hashes do and pip fetches them at the first boot. Either way the
requirements file is complete: `pip install -r`, in its folder, needs no option and accepts no other file.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from devices.flash.edge_fl_wheel import NAME, pack
from edge_fl.errors import DeadlineError, RunError
from edge_fl.files import atomic

PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}
PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_24", "manylinux_2_27", "manylinux_2_28")
DEADLINE_S = 1200


@dataclass(frozen=True)
class Wheelhouse:
    """`files` lie beside `requirements`, by Python version; the same wheel may serve several versions."""

    requirements: dict[str, str]
    files: tuple[Path, ...]

    @property
    def bytes(self) -> int:
        """What they take together."""
        return sum(file.stat().st_size for file in self.files)


def gather(pythons: tuple[str, ...], cache: Path, *, offline: bool) -> Wheelhouse:
    """The wheelhouse for these Pythons; what `cache` holds from before is not fetched again. Raises RunError, DeadlineError."""
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
            [*head, "--only-binary :all:", "--require-hashes", _beside(own), *lines, ""]
        )
        if offline:
            files |= {path.name: path for path in sorted(folder.glob("*.whl"))}
    return Wheelhouse(requirements, tuple(files[name] for name in sorted(files)))


def pins() -> list[str]:
    """`name==version` of all that edge-fl needs without any extra, as installed here."""
    found: dict[str, str] = {}
    todo = [NAME]
    while todo:
        for requirement in metadata.distribution(todo.pop()).requires or ():
            name, extra = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0], "extra ==" in requirement
            name = re.sub(r"[-_.]+", "-", name).lower()
            if extra or name in found:
                continue
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:  # for another platform or Python
                continue
            todo.append(name)
    return sorted(f"{name}=={version}" for name, version in found.items())


def pins_key() -> str:
    """What the wheels of one set of versions are kept under."""
    return hashlib.sha256("\n".join(pins()).encode()).hexdigest()[:12]


def _installer(cache: Path) -> Path:
    """pip itself, which runs from its wheel: the same one everywhere, and none to be set up on the Pi first."""
    version = metadata.version("pip")
    folder = cache / f"pip-{version}"
    if not any(folder.glob("pip-*.whl")):
        _pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), f"pip=={version}")
    return next(folder.glob("pip-*.whl"))


def _download(python: str, folder: Path) -> list[str]:
    """Requirement lines of the wheels in `folder`, which are fetched unless they are complete."""
    done = folder / "complete"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _pip("download", "--dest", str(folder), *_target(python), *pins())
        atomic.write(done, "")
    return [_beside(wheel) for wheel in sorted(folder.glob("*.whl"))]


def _resolve(python: str, folder: Path) -> list[str]:
    """Requirement lines as the package index gives them, without fetching a wheel."""
    known = folder.with_name(f"{folder.name}.txt")
    if not known.exists():
        with tempfile.TemporaryDirectory() as nowhere:
            report = Path(nowhere) / "report.json"
            _pip(
                *("install", "--dry-run", "--ignore-installed", "--quiet", "--target", nowhere),
                *("--report", str(report), *_target(python), *pins()),
            )
            found = [
                (item["metadata"], item["download_info"])
                for item in json.loads(report.read_bytes())["install"]
            ]
        lines = [
            f"{about['name']}=={about['version']} --hash=sha256:{where['archive_info']['hashes']['sha256']}"
            for about, where in found
        ]
        known.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(known, "\n".join(sorted(lines)))
    return known.read_text().splitlines()


def _target(python: str) -> list[str]:
    """pip's options for that Python on linux, aarch64."""
    platforms = [option for name in PLATFORMS for option in ("--platform", f"{name}_aarch64")]
    return ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(
            f"pip {arguments[0]}: not done after {DEADLINE_S} s; nothing was written"
        ) from error
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [
            done.stderr.strip()
        ]
        raise RunError(f"pip {arguments[0]} for linux on aarch64: {' '.join(last)}; nothing was written")


def _beside(wheel: Path) -> str:
    """The requirement line of a wheel that lies in the folder `wheels` beside the requirements file."""
    with wheel.open("rb") as file:
        return f"./wheels/{wheel.name} --hash=sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
