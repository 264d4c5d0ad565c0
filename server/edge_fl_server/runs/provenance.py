"""Provenance of a run: versions of Python and of the libraries that affect its numbers, the machine, and the commit of this code."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec import Struct

import edge_fl

LIBRARIES = (
    "numpy",
    "scikit-learn",
    "torch",
    "torchvision",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "msgspec",
    "paho-mqtt",
    "safetensors",
)
GIT_DEADLINE_S = 10.0


class Commit(Struct, frozen=True):
    """The commit that was checked out; `dirty` when tracked files differed from it."""

    sha: str
    dirty: bool


class Provenance(Struct, frozen=True):
    """Versions by library ("" when not installed), the machine, and the commit, None when this is no checkout."""

    edge_fl: str
    python: str
    machine: str
    libraries: dict[str, str]
    commit: Commit | None


def provenance() -> Provenance:
    """The provenance of this process. Imports none of the libraries."""
    return Provenance(
        edge_fl.__version__,
        platform.python_version(),
        platform.platform(),
        {name: _version(name) for name in LIBRARIES},
        commit(Path(edge_fl.__file__).parent),
    )


def commit(package: Path) -> Commit | None:
    """The commit a package's folder is checked out from; None outside a checkout, or without git."""
    try:
        # Untracked: an environment inside somebody else's checkout.
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        sha = _git(package, "rev-parse", "HEAD").strip()
        return Commit(sha, bool(_git(package, "status", "--porcelain", "--untracked-files=no")))
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", os.fspath(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_DEADLINE_S)
    return done.stdout


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
