"""The canary: run a new extractor on its signed test input, in a child process with limits, before it becomes current.

A signature states who released a model, not that it works. A model that never returns, allocates terabytes or returns NaN or other
features than its manifest promises fails here and harms only the child (`edge_fl_devices.install.canary_child`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from edge_fl import signals
from edge_fl.errors import ArtefactError, ChildError, KilledError
from edge_fl.failures import Failure
from edge_fl.release.manifest import Manifest, encode
from edge_fl_devices.board import imports
from edge_fl_devices.child import KILLS, again_if_killed, environment
from edge_fl_devices.storage.slots import Installed

MEBIBYTE = 1024 * 1024
BEGUN = "begun"
"""First line of the child, before it touches the model; a death by signal before that is one of the board."""
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
            reason = f"{signals.ending(error.code)}, {KILLS} times in a row"
    return CanaryResult(reason == "ok", reason, time.monotonic() - started_s)


class CrashedError(KilledError):
    """A signal ended the canary while the model was loaded or ran; `code` is the return code of the child."""

    def __init__(self, code: int) -> None:
        super().__init__(f"canary: the child {signals.ending(code)}", signals.name(code), UNTESTED)
        self.code = code


def _run(extractor: Path, manifest: Manifest, limits: CanaryLimits) -> str:
    """Return "ok" or what is wrong with the model. Raises CrashedError; ChildError, MemoryError if the child itself cannot run."""
    request = msgspec.json.encode([os.fspath(extractor.resolve()), asdict(limits), encode(manifest).decode()])
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", "edge_fl_devices.install.canary_child"],
            input=request,
            capture_output=True,
            timeout=limits.deadline_s,
            env=environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no result within {limits.deadline_s:g} s"
    except OSError as error:
        raise ChildError(f"canary: no child process ({error.strerror})", UNTESTED) from error
    return _reason(child, limits)


def require(installed: Installed, limits: CanaryLimits = CanaryLimits()) -> None:
    """Raise ArtefactError ("canary_failed") if the canary fails; ChildError, MemoryError as `check`. For `Slots.install(check=...)`."""
    result = check(installed.extractor, installed.manifest, limits)
    if not result.ok:
        raise ArtefactError(
            f"release {installed.manifest.release}: canary failed, {result.reason}",
            Failure.CANARY_FAILED,
            consequence="the old release keeps serving",
        )


def _reason(child: subprocess.CompletedProcess[bytes], limits: CanaryLimits) -> str:
    code, lines = child.returncode, child.stdout.decode(errors="replace").splitlines()
    if code == -signal.SIGXCPU:
        return f"no result within {limits.cpu_s} s of processor time"
    if code == -signal.SIGKILL:
        raise MemoryError(f"canary: out of memory, the system killed the child; {UNTESTED}")
    if code < 0 and lines[:1] == [BEGUN]:
        raise CrashedError(code)
    if code < 0:
        raise KilledError(f"canary: the child {signals.ending(code)}", signals.name(code), UNTESTED)
    if code == 0 and len(lines) > 1:
        return lines[1][:300]
    last = child.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
    raise ChildError(f"canary: the child {signals.ending(code)}, {last[0][:300]}", UNTESTED)
