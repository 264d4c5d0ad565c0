"""The child process of the canary (`python -m`): limits itself, runs the signed test input, prints one line."""

from __future__ import annotations

import math
import resource
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from edge_fl.errors import ArtefactError
from edge_fl.release.manifest import Manifest, canary_images, decode
from edge_fl_devices.features.extractor import Extractor
from edge_fl_devices.install.canary import BEGUN, CanaryLimits


def compare(extractor: Extractor, manifest: Manifest) -> str:
    """Return "ok", or how the features of the test images differ from the manifest's."""
    features = extractor.run(canary_images(manifest.canary, manifest.input))
    for row, expected in zip(features, manifest.canary.features, strict=True):
        difference = float(np.abs(row[: len(expected)] - np.asarray(expected, np.float32)).max())
        if not difference <= manifest.canary.tolerance:
            return f"features differ by {difference:.3g}, tolerance {manifest.canary.tolerance:g}"
    return "ok"


def _limit_process(limits: CanaryLimits, file_bytes: int) -> None:
    """Limit address space and processor time, from now on; forbid files and core dumps."""
    used_s = math.ceil(time.process_time())  # by the imports
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    address_space_bytes = pages * resource.getpagesize() + limits.memory_bytes + 3 * file_bytes
    for kind, amount in (
        (resource.RLIMIT_AS, address_space_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (amount, amount))
    cpu_s = used_s + limits.cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # SIGXCPU first: SIGKILL means out of memory


def main() -> None:
    """Read the request from stdin; print BEGUN, and the result as one line."""
    where, limits, text = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[str, CanaryLimits, str])
    path, manifest = Path(where), decode(text)
    _limit_process(limits, path.stat().st_size)
    sys.stdout.write(f"{BEGUN}\n")
    sys.stdout.flush()
    try:
        result = compare(Extractor(path, manifest, threads=1), manifest)
    except ArtefactError as error:
        result = error.message
    except Exception as error:  # a model can raise anything
        result = f"{type(error).__name__}: {error}"
    sys.stdout.write(" ".join(result.split()) + "\n")


if __name__ == "__main__":
    main()
