"""The one gate through which parts leave a head-only device: what the signed manifest names, of what the code knows, if the owner allows.

`edge_fl.heads.shares` finds the parts; here they are checked against the manifest once more, as they will travel.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_fl import heads
from edge_fl.errors import ArtefactError, EdgeFLError, ProtocolError
from edge_fl.heads import Head, HeadPlan, shares
from edge_fl.heads.head import Array, Extras
from edge_fl.release.manifest import Manifest
from edge_fl.wire import tensors

log = logging.getLogger(__name__)


def parts_for(
    manifest: Manifest, head: Head, z: NDArray[np.float32], y: NDArray[np.int64], extras: Extras
) -> bytes | None:
    """What goes up with the report on `head`, packed; None for nothing. A part that cannot be found costs the upload, not the report."""
    if not manifest.heads.uploads:
        return None
    plan, unit_norm = manifest.heads, manifest.unit_norm
    data = heads.training_set(
        z, y, len(manifest.classes), unit_norm, head.extractor, manifest.round, False, plan, extras
    )
    try:
        parts = shares.shares(data, head)
        return let_out(tensors.pack(parts), plan) if parts else None
    except EdgeFLError as error:
        log.warning("%s; the report goes without it", error)
        return None


def let_out(payload: bytes, plan: HeadPlan) -> bytes:
    """The payload, if every part in it is one that the plan names. Raises ArtefactError: then nothing leaves."""
    shares.require_allowed(tensors.unpack(payload), plan.uploads)
    return payload


def read_extras(files: Mapping[str, Path]) -> dict[str, Mapping[str, Array]]:
    """The extras of an installed release. Raises ArtefactError for a file that is not what its name says."""
    found: dict[str, Mapping[str, Array]] = {}
    for name, path in files.items():
        try:
            parts = tensors.unpack(path.read_bytes())
        except ProtocolError as error:
            raise ArtefactError(f"extra {name!r}: {error}", "manifest") from error
        if parts.keys() != {name}:
            raise ArtefactError(
                f"extra {name!r}: holds {', '.join(parts)}", "manifest", consequence="no head was fitted"
            )
        found[name] = parts[name]
    return found
