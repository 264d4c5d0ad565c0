"""The canary: run a new extractor on its signed test input, in a child process with limits, before it becomes current.

A signature states who released a model, not that it works. A model that never returns, allocates terabytes or returns NaN or other
features than its manifest promises fails here and harms only the child (`edge_fl_devices.install.canary_child`).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from edge_fl.errors import ArtefactError, ChildError, DeadlineError, KilledError
from edge_fl.failures import Failure
from edge_fl.release import manifests
from edge_fl.release.manifests import Manifest
from edge_fl_devices.board import imports
from edge_fl_devices.child import KILLS, Child, again_if_killed, encode
from edge_fl_devices.storage.slots import InstalledRelease

MEBIBYTE = 1024 * 1024
UNTESTED = "the release is not tested"


@dataclass(frozen=True)
class CanaryLimits:
    """Limits of the child beyond an idle process: address space (plus three times the file's size), processor time, wall time.

    DINOv2-small at 224 pixels (86 MB) takes three times its file, and one second of a desktop processor, about 30 of a Pi Zero 2.
    """

    memory_bytes: int = 256 * MEBIBYTE
    cpu_s: int = 60
    deadline_s: float = 180.0


@dataclass(frozen=True)
class CanaryResult:
    """Result of a canary; `reason` is "ok" or one line, `seconds` the duration with the child's start."""

    ok: bool
    reason: str
    seconds: float


def check(extractor: Path, manifest: Manifest, limits: CanaryLimits = CanaryLimits()) -> CanaryResult:
    """Run the manifest's canary on `extractor` in a child, again if a signal ends it: only a model that always crashes has failed.

    Raises ChildError, MemoryError if the child itself cannot run, which says nothing about the model.
    """
    started_s = time.monotonic()
    with imports.naming("numpy", "onnxruntime"):
        try:
            reason = again_if_killed(lambda: _run(extractor, manifest, limits))
        except CrashedError as error:
            reason = f"{error.message}, {KILLS} times in a row"
    return CanaryResult(reason == "ok", reason, time.monotonic() - started_s)


class CrashedError(KilledError):
    """A signal ended the canary while the model was loaded or ran."""


def _run(extractor: Path, manifest: Manifest, limits: CanaryLimits) -> str:
    """Return "ok" or what is wrong with the model. Raises CrashedError; ChildError, MemoryError if the child itself cannot run."""
    begun: list[int] = []  # before that a death by signal is one of the board
    try:
        child = Child("edge_fl_devices.install.canary_child", "canary", consequence=UNTESTED)
    except OSError as error:
        raise ChildError(f"canary: no child process ({error.strerror})", UNTESTED) from error
    try:
        request = encode((os.fspath(extractor.resolve()), limits, manifests.encode(manifest)))
        return child.request(request, limits.deadline_s, lambda done, of: begun.append(done)).decode()
    except DeadlineError:
        return f"no result within {limits.deadline_s:g} s"
    except KilledError as error:
        if error.signal == "SIGXCPU":
            return f"no result within {limits.cpu_s} s of processor time"
        if begun:
            ending = error.message.removeprefix("canary: the child ")
            raise CrashedError(ending, error.signal, UNTESTED) from error
        raise
    finally:
        child.close()


def require(installed: InstalledRelease, limits: CanaryLimits = CanaryLimits()) -> None:
    """Raise ArtefactError ("canary_failed") if the canary fails; ChildError, MemoryError as `check`. For `Slots.install(check=...)`."""
    result = check(installed.extractor, installed.manifest, limits)
    if not result.ok:
        raise ArtefactError(
            f"release {installed.manifest.release}: canary failed, {result.reason}",
            Failure.CANARY_FAILED,
            consequence="the old release keeps serving",
        )
