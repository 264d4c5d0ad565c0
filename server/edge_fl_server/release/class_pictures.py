"""Pictures of the server, by class, as data of one client: int8 variants of releases without a run are calibrated on them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edge_fl.data.class_names import class_of
from edge_fl.data.pictures import SUFFIXES, PictureError, decode, depth_of
from edge_fl.data.samples import ClientData, Samples
from edge_fl.errors import DataError
from edge_fl.files.folder import walk
from edge_fl.files.paths import composed, text
from edge_fl.inputs import InputSpec
from edge_fl.seeds import generator

MOST_PER_CLASS = 64
HELD_OUT = 4  # every fourth picture of a class


def pictures(folder: Path, classes: Sequence[str], input: InputSpec, seed: int = 0) -> ClientData:
    """Pictures of FOLDER/CLASS, at most MOST_PER_CLASS each, for training and validation. Raises DataError for fewer than two classes."""
    if not folder.is_dir():
        raise DataError(f"{text(folder)}: no such folder; expected one folder of pictures per class in it")
    by_class: dict[str, list[Path]] = {composed(name): [] for name in classes}
    for path in walk(folder).files:
        name = class_of(path.parent.name)
        if path.parent.parent == folder and path.suffix.lower() in SUFFIXES and name in by_class:
            by_class[name].append(path)
    bits = depth_of([path for files in by_class.values() for path in files]).bits
    rng = generator(seed, "release.pictures")
    images, labels, held_out = [], [], []
    for label, files in enumerate(by_class.values()):
        chosen = rng.permutation(len(files))[:MOST_PER_CLASS]
        for number, index in enumerate(sorted(chosen)):
            try:
                images.append(decode(files[index], input, bits=bits))
            except PictureError:
                continue
            labels.append(label)
            held_out.append(number % HELD_OUT == HELD_OUT - 1)
    if len(set(labels)) < 2 or not any(held_out):
        raise DataError(
            f"{text(folder)}: {len(images)} pictures of {len(set(labels))} of the classes {', '.join(classes)};"
            f" expected at least {HELD_OUT} in each of two folders named after classes, to calibrate int8"
        )
    samples, held = Samples(np.stack(images), np.array(labels, np.int64)), np.array(held_out)
    empty = samples.take(np.empty(0, np.int64))
    return ClientData(samples.take(np.flatnonzero(~held)), samples.take(np.flatnonzero(held)), empty)
