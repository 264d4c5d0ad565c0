"""The child process of the canary (`python -m`): limits itself, runs the signed test input, prints one line."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np

from edge_fl import process_limits
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


def main() -> None:
    """Read the request from stdin; print BEGUN, and the result as one line."""
    where, limits, text = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[str, CanaryLimits, str])
    path, manifest = Path(where), decode(text)
    process_limits.limit(limits.memory_bytes + 3 * path.stat().st_size, limits.cpu_s, files=False)
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
