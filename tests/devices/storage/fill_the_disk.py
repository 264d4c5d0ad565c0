"""Run by test_slots.py: a process with a file size limit meets a full disk three times, then has space again."""

import resource
import sys
from pathlib import Path

import numpy as np

from edge_fl.blob import describe, split
from edge_fl.errors import ArtefactError
from edge_fl.inputs import InputSpec
from edge_fl.release.manifests import Canary, Manifest
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.storage.slots import Slots, is_intact
from edge_fl_server.release.repository import Repository


def release(number: int) -> tuple[Manifest, bytes]:
    payload = np.random.default_rng(number).bytes(20_000)
    canary = Canary(seed=1, images=1, features=[[0.0]])
    return Manifest(
        number,
        "t",
        "m",
        1,
        describe(payload, 4096),
        4,
        ["a"],
        InputSpec((1, 8, 8)),
        False,
        "none",
        17,
        8,
        canary,
    ), payload


def limit(file_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))


def fetch(slots: Slots, manifest: Manifest, payload: bytes) -> None:
    slots.prepare(manifest)
    for index in slots.sink(manifest.extractor).missing:
        slots.sink(manifest.extractor).add(index, bytes(split(payload, 4096)[index]))


def refused(name: str, slots: Slots, action) -> None:
    try:
        action()
    except ArtefactError as error:
        sys.stdout.write(f"{name} {error.why}\n")
    assert slots.current().manifest.release == 1
    assert is_intact(slots.current())
    assert not list(slots.folder.rglob(".*.part"))


def main(folder: Path) -> None:
    slots = Slots(folder / "slots")
    repository = Repository(folder / "repository")
    manifest, payload = release(1)
    fetch(slots, manifest, payload)
    slots.install(manifest)
    slots.mark_good()
    manifest, payload = release(2)
    limit(3000)
    refused("first", slots, lambda: fetch(slots, manifest, payload))
    assert not list((slots.folder / "chunks").iterdir())
    assert (
        slots.sink(manifest.extractor).missing
        == Slots(slots.folder).sink(manifest.extractor).missing
        == [0, 1, 2, 3, 4]
    )
    limit(10_000)
    refused("third", slots, lambda: fetch(slots, manifest, payload))
    assert (
        slots.sink(manifest.extractor).missing
        == Slots(slots.folder).sink(manifest.extractor).missing
        == [2, 3, 4]
    )
    files = dict(repository.files())
    trust = Trust(folder / "trust", repository.root_bytes)
    limit(100)
    refused("metadata", slots, lambda: trust.refresh(files.__getitem__))
    limit(resource.RLIM_INFINITY)
    fetch(slots, manifest, payload)
    assert slots.install(manifest).manifest.release == 2
    assert trust.refresh(files.__getitem__) == []
    sys.stdout.write("recovered\n")


main(Path(sys.argv[1]))
