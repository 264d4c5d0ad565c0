"""Tiny releases: a few kilobytes in chunks of 1 KiB, so that a download has several chunks to lose."""

from collections.abc import Callable

import numpy as np
import pytest

from edge_fl.blob import describe, split
from edge_fl.inputs import InputSpec
from edge_fl.release.manifests import Canary, Manifest, blobs
from edge_fl_devices.storage.slots import Slots

Payloads = dict[str, bytes]
MakeRelease = Callable[..., tuple[Manifest, Payloads]]


@pytest.fixture
def make_release() -> MakeRelease:
    """Makes release `number`: its manifest and {sha256: payload}; the bytes follow from `seed`, which is the number unless given."""

    def make(number: int, kilobytes: float = 3.5, seed: int | None = None) -> tuple[Manifest, Payloads]:
        rng = np.random.default_rng(number if seed is None else seed)
        extractor, head = rng.bytes(int(kilobytes * 1024)), rng.bytes(100)
        manifest = Manifest(
            release=number,
            run_id="digits-1",
            method="repper",
            round=number,
            extractor=describe(extractor, 1024),
            feature_dim=4,
            classes=["zero", "one"],
            input=InputSpec((1, 8, 8)),
            unit_norm=False,
            batch_norm="none",
            opset=17,
            ir=8,
            canary=Canary(seed=number, images=2, features=[[0.25], [-1.5]]),
            extras={"global_head": describe(head, 1024)},
        )
        return manifest, {manifest.extractor.sha256: extractor, manifest.extras["global_head"].sha256: head}

    return make


@pytest.fixture
def fetch() -> Callable[[Slots, Manifest, Payloads], int]:
    """Adds every chunk that is missing; returns how many that were."""

    def fetch(slots: Slots, manifest: Manifest, payloads: Payloads) -> int:
        slots.prepare(manifest)
        count = 0
        for blob in blobs(manifest):
            chunks = split(payloads[blob.sha256], blob.chunk_bytes)
            for index in slots.sink(blob).missing:
                slots.sink(blob).add(index, bytes(chunks[index]))
                count += 1
        return count

    return fetch
