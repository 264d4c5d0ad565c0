"""The canary: a new extractor meets its signed test input in a child process with little memory, little time and nothing to break.

A signature says who released a model, not that it is well: one that never returns, asks for terabytes, gives NaN or other features
than its manifest promises is found here, before it becomes current, and only the child suffers.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np

from devices.features import Extractor
from edge_fl.errors import ArtefactError, RunError
from edge_fl.release.artefact import Installed
from edge_fl.release.manifest import Manifest, canary_images, decode, encode

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class Limits:
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


def check(extractor: Path, manifest: Manifest, limits: Limits = Limits()) -> Verdict:
    """Runs the manifest's canary on `extractor` in a child. Whatever the model does, the answer is a verdict.

    Raises RunError when the child itself cannot run, which says nothing about the model.
    """
    started_s = time.monotonic()
    order = msgspec.json.encode([str(extractor.resolve()), asdict(limits), encode(manifest).decode()])
    package_root = Path(__file__).resolve().parents[1]
    try:
        child = subprocess.run(
            [sys.executable, "-m", "devices.canary"],
            input=order,
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


def require(installed: Installed, limits: Limits = Limits()) -> None:
    """For `Slots.install(..., check=require)`. Raises ArtefactError ("canary_failed"); RunError as `check`."""
    verdict = check(installed.extractor, installed.manifest, limits)
    if not verdict.ok:
        release = installed.manifest.release
        raise ArtefactError(
            f"release {release}: canary failed, {verdict.why}; the old release keeps serving", "canary_failed"
        )


def compare(extractor: Extractor, manifest: Manifest) -> str:
    """The word "ok", or how the features of the canary's images differ from what the manifest promises."""
    found = extractor.run(canary_images(manifest.canary, manifest.input))
    for row, expected in zip(found, manifest.canary.features, strict=True):
        difference = float(np.abs(row[: len(expected)] - np.asarray(expected, np.float32)).max())
        if not difference <= manifest.canary.tolerance:
            return f"features differ by {difference:.3g}, tolerance {manifest.canary.tolerance:g}"
    return "ok"


def _reason(child: subprocess.CompletedProcess[bytes]) -> str:
    if child.returncode < 0:
        return f"killed by signal {-child.returncode} (processor time, memory or a crash)"
    if child.returncode == 0 and (answer := child.stdout.decode(errors="replace").strip()):
        return answer[:300]
    last = child.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
    raise RunError(
        f"canary: the child ended with {child.returncode}, {last[0][:300]}; the release is not judged"
    )


def _confine(limits: Limits, file_bytes: int) -> None:
    """From here on: no more memory than allowed, no processor time beyond it, no file, no core dump."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    address_space_bytes = pages * resource.getpagesize() + limits.memory_bytes + 3 * file_bytes
    for kind, amount in (
        (resource.RLIMIT_AS, address_space_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (amount, amount))


def main() -> None:
    """The child: reads the order from stdin, answers in one line on stdout."""
    where, limits, text = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[str, Limits, str])
    path, manifest = Path(where), decode(text)
    _confine(limits, path.stat().st_size)
    try:
        answer = compare(Extractor(path, manifest), manifest)
    except ArtefactError as error:
        answer = str(error)
    except Exception as error:  # whatever else a model can do to the process that runs it
        answer = f"{type(error).__name__}: {error}"
    sys.stdout.write(" ".join(answer.split()) + "\n")


if __name__ == "__main__":
    main()
