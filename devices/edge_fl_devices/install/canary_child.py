"""The child process of the canary (`python -m`): limits itself, runs the signed test input, answers with one line."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from edge_fl import process_limits
from edge_fl.errors import ArtefactError
from edge_fl.release import manifests
from edge_fl.release.manifests import Manifest, canary_input
from edge_fl_devices.child import decode, progress, serve
from edge_fl_devices.features.extractor import Extractor
from edge_fl_devices.install.canary import CanaryLimits


def compare(extractor: Extractor, manifest: Manifest) -> str:
    """Return "ok", or how the features of the test samples differ from the manifest's."""
    features = extractor.run(canary_input(manifest.canary, manifest.input))
    for row, expected in zip(features, manifest.canary.features, strict=True):
        difference = float(np.abs(row[: len(expected)] - np.asarray(expected, np.float32)).max())
        if not difference <= manifest.canary.tolerance:
            return f"features differ by {difference:.3g}, tolerance {manifest.canary.tolerance:g}"
    return "ok"


def _respond(request: bytes) -> bytes:
    where, limits, text = decode(request, tuple[str, CanaryLimits, bytes])
    path, manifest = Path(where), manifests.decode(text)
    process_limits.limit_child(limits.memory_bytes + 3 * path.stat().st_size, limits.cpu_s)
    progress(1, 2)  # from now on the model is to blame
    try:
        result = compare(Extractor(path, manifest, threads=1), manifest)
    except ArtefactError as error:
        result = error.message
    except Exception as error:  # a model can raise anything
        result = f"{type(error).__name__}: {error}"
    return " ".join(result.split())[:300].encode()


if __name__ == "__main__":
    sys.exit(serve("canary", _respond))
