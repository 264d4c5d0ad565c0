"""Run by test_slots.py: install release 3 over 2 and 1 in children that die before their n-th change to the disk.

After each death the folder must contain a whole current release, 2 or 3, and a whole older previous one, and a new process must be able
to finish. Prints the number of deaths.
"""

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np

from edge_fl.blob import describe, split
from edge_fl.inputs import InputSpec
from edge_fl.release.manifests import Canary, Manifest, blobs
from edge_fl_devices.storage.slots import Slots, is_intact

CHANGES = ("replace", "unlink", "mkdir", "fsync", "open")


# a kill loses nothing that was written, so the fsync itself may be skipped
os.fsync = lambda descriptor: None


def release(number: int) -> tuple[Manifest, dict[str, bytes]]:
    payloads = [np.random.default_rng([number, part]).bytes(size) for part, size in enumerate((3000, 100))]
    extractor, extra = (describe(payload, 1024) for payload in payloads)
    canary = Canary(seed=1, images=1, features=[[0.0]])
    spec = InputSpec((1, 8, 8))
    manifest = Manifest(
        number,
        "t",
        "fedavg",
        1,
        extractor,
        4,
        ["a"],
        spec,
        False,
        "none",
        17,
        8,
        canary,
        extras={"head": extra},
    )
    return manifest, {extractor.sha256: payloads[0], extra.sha256: payloads[1]}


def install(slots: Slots, number: int) -> None:
    manifest, payloads = release(number)
    slots.boot()
    slots.prepare(manifest)
    for blob in blobs(manifest):
        for index in slots.sink(blob).missing:
            slots.sink(blob).add(index, bytes(split(payloads[blob.sha256], blob.chunk_bytes)[index]))
    slots.install(manifest)
    slots.mark_good()


def die_before(step: int) -> None:
    """Let the process kill itself before its `step`-th change."""
    counter = itertools.count()

    def deadly(call):
        def wrapper(*args, **kwargs):
            if next(counter) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapper

    for name in CHANGES:
        setattr(os, name, deadly(getattr(os, name)))


def survives(folder: Path, step: int) -> bool:
    """Whether the child finished before `step`; checks what a killed one left."""
    child = os.fork()
    if child == 0:
        die_before(step)
        install(Slots(folder), 3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return True
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"step {step}: {status}"
    left = Slots(folder)
    assert is_intact(left.current()), f"step {step}: no whole release after the kill"
    assert (serving := left.current().manifest.release) in (2, 3), f"step {step}: serves {serving}"
    if behind := left.previous():
        assert is_intact(behind) and behind.manifest.release < serving, f"step {step}: no previous release"
    install(Slots(folder), 3)
    after = Slots(folder)
    assert is_intact(after.current()) and after.current().manifest.release == 3, f"step {step}"
    assert is_intact(after.previous()) and after.previous().manifest.release == 2, f"step {step}"
    assert not list(folder.rglob(".*.part")) and not list((folder / "chunks").iterdir()), (
        f"step {step}: leftovers"
    )
    return False


def main(root: Path) -> None:
    first = root / "first"
    first.mkdir()
    install(Slots(first), 1)
    install(Slots(first), 2)
    for step in itertools.count():
        shutil.copytree(first, root / str(step))
        if survives(root / str(step), step):
            sys.stdout.write(f"{step}\n")
            return


main(Path(sys.argv[1]))
