"""The canary: run a new extractor on its signed test input, in a child process with limits, before it becomes current.

A signature states who released a model, not that it works. A model that never returns, allocates terabytes or returns NaN or other
features than its manifest promises fails here and harms only the child (`edge_fl_devices.install.canary_child`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from edge_fl.errors import ArtefactError, RunError
from edge_fl.release.manifest import Manifest, encode
from edge_fl_devices.child import environment
from edge_fl_devices.storage.slots import Installed

MEBIBYTE = 1024 * 1024


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
    """Run the manifest's canary on `extractor` in a child.

    Raises RunError if the child itself cannot run, which says nothing about the model.
    """
    started_s = time.monotonic()
    request = msgspec.json.encode([str(extractor.resolve()), asdict(limits), encode(manifest).decode()])
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", "edge_fl_devices.install.canary_child"],
            input=request,
            capture_output=True,
            timeout=limits.deadline_s,
            env=environment(),
            check=False,
        )
        reason = _reason(child)
    except subprocess.TimeoutExpired:
        reason = f"no result within {limits.deadline_s:g} s"
    except OSError as error:
        raise RunError(
            f"canary: no child process ({error.strerror})", consequence="the release is not tested"
        ) from error
    return CanaryResult(reason == "ok", reason, time.monotonic() - started_s)


def require(installed: Installed, limits: CanaryLimits = CanaryLimits()) -> None:
    """Raise ArtefactError ("canary_failed") if the canary fails; RunError as `check`. For `Slots.install(check=...)`."""
    result = check(installed.extractor, installed.manifest, limits)
    if not result.ok:
        raise ArtefactError(
            f"release {installed.manifest.release}: canary failed, {result.reason}",
            "canary_failed",
            consequence="the old release keeps serving",
        )


def _reason(child: subprocess.CompletedProcess[bytes]) -> str:
    if child.returncode < 0:
        return f"killed by signal {-child.returncode} (processor time, memory or a crash)"
    if child.returncode == 0 and (answer := child.stdout.decode(errors="replace").strip()):
        return answer[:300]
    last = child.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
    raise RunError(
        f"canary: the child exited with code {child.returncode}, {last[0][:300]}",
        consequence="the release is not tested",
    )
