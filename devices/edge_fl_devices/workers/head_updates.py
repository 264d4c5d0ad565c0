"""Head updates: the parts that a head-only device sends with its report, if its signed manifest names them and its owner allows it.

`edge_fl.heads.head_updates` computes the parts; here they are checked against the manifest once more, as they will be sent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_fl import heads
from edge_fl.errors import ArtefactError, EdgeFLError, ProtocolError
from edge_fl.failures import Failure
from edge_fl.heads import Head, HeadPlan, head_updates
from edge_fl.heads.head import Array, Extras
from edge_fl.release.manifests import Manifest
from edge_fl.wire import tensors

log = logging.getLogger(__name__)


def head_update(
    manifest: Manifest, head: Head, z: NDArray[np.float32], y: NDArray[np.int64], extras: Extras
) -> bytes | None:
    """Return the packed parts to send with the report on `head`, if any. On an error the report is sent without them."""
    plan = manifest.heads
    if not plan.uploads or not len(y):
        return None
    data = heads.training_set(
        z, y, len(manifest.classes), manifest.unit_norm, head.extractor, manifest.round, False, plan, extras
    )
    try:
        parts = head_updates.compute(data, head)
        return require_named(tensors.pack(parts), plan) if parts else None
    except EdgeFLError as error:
        log.warning("%s; the report is sent without head update", error.message)
        return None


def require_named(payload: bytes, plan: HeadPlan) -> bytes:
    """Return `payload` if the plan names every part in it. Raises ArtefactError."""
    head_updates.require_allowed(tensors.unpack(payload), plan.uploads)
    return payload


def read_extras(files: Mapping[str, Path]) -> dict[str, Mapping[str, Array]]:
    """Read the extras of an installed release. Raises ArtefactError if a file does not contain the part it is named after."""
    extras: dict[str, Mapping[str, Array]] = {}
    for name, path in files.items():
        try:
            parts = tensors.unpack(path.read_bytes())
        except ProtocolError as error:
            raise ArtefactError(
                f"extra {name!r}: {error.message}", Failure.MANIFEST, consequence="no head was fitted"
            ) from error
        if parts.keys() != {name}:
            raise ArtefactError(
                f"extra {name!r}: contains {', '.join(parts)}",
                Failure.MANIFEST,
                consequence="no head was fitted",
            )
        extras[name] = parts[name]
    return extras
