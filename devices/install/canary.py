"""The canary: a new extractor meets its signed test input in a child process with little memory, little time and nothing to break.

A signature says who released a model, not that it is well: one that never returns, asks for terabytes, gives NaN or other features
than its manifest promises is found here, before it becomes current, and only the child suffers (`devices.install.canary_child`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from devices.storage.slots import Installed
from edge_fl.errors import ArtefactError, RunError
from edge_fl.release.manifest import Manifest, encode

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class CanaryLimits:
    """What the child may use beyond an idle process: address space (plus three times the file), processor time, wall time."""

    memory_bytes: int = 256 * MEBIBYTE
    cpu_s: int = 30
    deadline_s: float = 90.0


@dataclass(frozen=True)
class Verdict:
    """`why` is "ok" or the reason in one line; `seconds` is the child's life, start included."""

    ok: bool
    why: str
    seconds: float


def check(extractor: Path, manifest: Manifest, limits: CanaryLimits = CanaryLimits()) -> Verdict:
    """Runs the manifest's canary on `extractor` in a child. Whatever the model does, the answer is a verdict.

    Raises RunError when the child itself cannot run, which says nothing about the model.
    """
    started_s = time.monotonic()
    request = msgspec.json.encode([str(extractor.resolve()), asdict(limits), encode(manifest).decode()])
    package_root = Path(__file__).resolve().parents[1]
    try:
        child = subprocess.run(
            [sys.executable, "-m", "devices.install.canary_child"],
            input=request,
            capture_output=True,
            timeout=limits.deadline_s,
            cwd=package_root,
            check=False,
        )
        why = _reason(child)
    except subprocess.TimeoutExpired:
        why = f"no answer within {limits.deadline_s:g} s"
    except OSError as error:
        raise RunError(f"canary: no child process ({error.strerror}); the release is not judged") from error
    return Verdict(why == "ok", why, time.monotonic() - started_s)


def require(installed: Installed, limits: CanaryLimits = CanaryLimits()) -> None:
    """For `Slots.install(..., check=require)`. Raises ArtefactError ("canary_failed"); RunError as `check`."""
    verdict = check(installed.extractor, installed.manifest, limits)
    if not verdict.ok:
        release = installed.manifest.release
        raise ArtefactError(
            f"release {release}: canary failed, {verdict.why}",
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
        f"canary: the child ended with {child.returncode}, {last[0][:300]}; the release is not judged"
    )
