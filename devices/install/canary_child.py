"""The far end of the canary, `python -m devices.install.canary_child`: confines itself, runs the signed test input, answers in one line."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import msgspec
import numpy as np

from devices.features.extractor import Extractor
from devices.install.canary import CanaryLimits
from edge_fl.errors import ArtefactError
from edge_fl.release.manifest import Manifest, canary_images, decode


def compare(extractor: Extractor, manifest: Manifest) -> str:
    """The word "ok", or how the features of the canary's images differ from what the manifest promises."""
    found = extractor.run(canary_images(manifest.canary, manifest.input))
    for row, expected in zip(found, manifest.canary.features, strict=True):
        difference = float(np.abs(row[: len(expected)] - np.asarray(expected, np.float32)).max())
        if not difference <= manifest.canary.tolerance:
            return f"features differ by {difference:.3g}, tolerance {manifest.canary.tolerance:g}"
    return "ok"


def _confine(limits: CanaryLimits, file_bytes: int) -> None:
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
    """The child: reads the request from stdin, answers in one line on stdout."""
    where, limits, text = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[str, CanaryLimits, str])
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
