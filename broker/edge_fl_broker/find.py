"""Find a mosquitto program: on the path, in the usual install folders, or unpacked from a Debian package into a cache without root.

The caller may pass over programs that it cannot use.

For unpacking, the package and its missing libraries are fetched with apt-get, opened with dpkg, and found by the loader through
LD_LIBRARY_PATH. If that fails too, one error explains how to install mosquitto.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edge_fl.cli import cache_folder
from edge_fl.errors import ConnectError
from edge_fl.files.paths import text

FOLDERS = (
    "/usr/sbin",
    "/usr/local/sbin",
    "/opt/homebrew/sbin",
    "/opt/homebrew/opt/mosquitto/sbin",
    "/usr/local/opt/mosquitto/sbin",
    "/home/linuxbrew/.linuxbrew/sbin",
)
PLUGIN_FOLDERS = ("/usr/lib", "/usr/lib/*-linux-gnu*", "/usr/local/lib", "/opt/homebrew/lib")
INSTALL = (
    "no mosquitto found; install it with 'sudo apt install mosquitto', 'brew install mosquitto' or"
    " 'docker run -p 1883:1883 eclipse-mosquitto:2 mosquitto -c /mosquitto-no-auth.conf'"
)
COMMAND_S = 60.0
MAX_PACKAGES = 40


@dataclass(frozen=True)
class Program:
    """A working mosquitto, its version, and additional environment variables."""

    path: Path
    version: tuple[int, int, int]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def acl_plugin(self) -> Path | None:
        """Plugin that reads an access list; since 2.1 it replaces the option acl_file."""
        if self.version < (2, 1, 0):
            return None
        bundled = self.path.parents[1] / "lib" if len(self.path.parents) > 1 else self.path.parent
        folders = [
            bundled,
            *(folder for pattern in PLUGIN_FOLDERS for folder in Path("/").glob(pattern.lstrip("/"))),
        ]
        plugins = (folder / "mosquitto_acl_file.so" for folder in folders)
        return next((plugin for plugin in plugins if plugin.is_file()), None)


def find(
    cache: Path | None = None,
    *,
    unusable: Callable[[Program], str] = lambda program: "",
    notify: Callable[[str], None] = lambda line: None,
) -> Program:
    """Find a mosquitto anywhere. Raises ConnectError with install instructions if there is none.

    `unusable` returns why a program cannot be used, or "". `notify` receives a line about each that is passed over for this.
    """
    passed_over = []
    for path in _installed():
        if version := _version(path, {}):
            program = Program(path, version)
            if not (reason := unusable(program)):
                return program
            passed_over.append(f"{path} was passed over: {reason}")
            notify(passed_over[-1])
    try:
        return unpack(cache or cache_folder())
    except ConnectError as error:
        if not passed_over:
            raise
        raise ConnectError(
            f"no usable mosquitto: {'; '.join(passed_over)}; a snap reads folders below the home folder only (--dir, --identities);"
            f" otherwise install another: {INSTALL.partition('; ')[2]}"
        ) from error


def unpack(cache: Path) -> Program:
    """Return the mosquitto in `cache`, fetching it as a Debian package if necessary. Raises ConnectError."""
    root = cache / "mosquitto"
    if program := _unpacked(root):
        return program
    if not all(map(shutil.which, ("apt-get", "apt-cache", "dpkg", "ldd"))):
        raise ConnectError(INSTALL)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="mosquitto-") as part:
        try:
            _fetch(Path(part))
        except (OSError, subprocess.SubprocessError) as error:
            raise ConnectError(
                f"{INSTALL} (its package could not be unpacked into {text(cache)}: {_error_text(error)})"
            ) from error
        if not _unpacked(Path(part)):
            raise ConnectError(f"{INSTALL} (its package does not run from {text(cache)})")
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(part, root, symlinks=True)
    program = _unpacked(root)
    assert program  # it was started above
    return program


def missing_libraries(ldd: str) -> list[str]:
    """Libraries that the loader did not find, from ldd's output: ``["libdlt.so.2"]``."""
    return re.findall(r"^\s*(\S+) => not found", ldd, re.MULTILINE)


def dependencies(apt_cache: str) -> list[str]:
    """Library packages in the output of ``apt-cache depends``, without duplicates."""
    return list(
        dict.fromkeys(re.findall(r"^[ |]*(?:Pre)?Depends: (lib[a-z0-9+.-]+)$", apt_cache, re.MULTILINE))
    )


def _installed() -> Iterator[Path]:
    """Each mosquitto once, although /sbin is a link to /usr/sbin on most systems."""
    seen = set[Path]()
    for folder in dict.fromkeys((*os.get_exec_path(), *FOLDERS)):
        if (program := shutil.which("mosquitto", path=folder)) and (
            real := Path(program).resolve()
        ) not in seen:
            seen.add(real)
            yield Path(program)


def _version(path: Path, environment: Mapping[str, str]) -> tuple[int, int, int] | None:
    try:
        # -h, because not every version supports --version; its exit status varies
        answer = _run([os.fspath(path), "-h"], environment=environment, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"mosquitto version (\d+)\.(\d+)\.(\d+)", answer)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _unpacked(root: Path) -> Program | None:
    path = root / "usr/sbin/mosquitto"
    environment = {"LD_LIBRARY_PATH": _library_path(root)}
    version = _version(path, environment) if path.is_file() else None
    return Program(path, version, environment) if version else None


def _fetch(root: Path) -> None:
    """Unpack mosquitto below `root`, then its dependencies level by level until no library is missing."""
    level, seen = ["mosquitto"], set[str]()
    while level and len(seen) < MAX_PACKAGES:
        for package in level:
            _fetch_one(package, root)
        seen.update(level)
        if not _missing(root):
            return
        needed = dependencies("".join(_run(["apt-cache", "depends", package]) for package in level))
        level = [package for package in needed if package not in seen and not _has(package)]


def _fetch_one(package: str, root: Path) -> None:
    with tempfile.TemporaryDirectory(dir=root) as folder:
        _run(["apt-get", "download", package], folder=Path(folder))
        for archive in Path(folder).glob("*.deb"):
            _run(["dpkg", "-x", os.fspath(archive), os.fspath(root)])


def _missing(root: Path) -> list[str]:
    environment = {"LD_LIBRARY_PATH": _library_path(root)}
    return missing_libraries(
        _run(["ldd", os.fspath(root / "usr/sbin/mosquitto")], environment=environment, check=False)
    )


def _has(package: str) -> bool:
    return "install ok installed" in _run(["dpkg-query", "-W", "-f", "${Status}", package], check=False)


def _library_path(root: Path) -> str:
    return ":".join(sorted({os.fspath(library.parent) for library in root.rglob("*.so*")}))


def _run(
    command: list[str],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
) -> str:
    """Run a command and return its output, in English."""
    variables = {**os.environ, "LC_ALL": "C", **(environment or {})}
    done = subprocess.run(
        command, cwd=folder, env=variables, check=check, capture_output=True, text=True, timeout=COMMAND_S
    )
    return done.stdout + done.stderr


def _error_text(error: Exception) -> str:
    lines = (getattr(error, "stderr", "") or "").strip().splitlines()
    return lines[-1] if lines else str(error)
