"""The study's images: 6,000 of each dataset (PACS: all), reduced to 14x14 or 16x16 pixels by averaging blocks; a run takes seconds."""

from pathlib import Path

import numpy as np

from edge_fl.data import datasets
from edge_fl.data.samples import Array, Dataset
from edge_fl.files import npz
from edge_fl.seeds import generator

KEPT = 6000
BLOCKS = {"mnist": 2, "fashion-mnist": 2, "cifar10": 2, "pacs": 6}
"""Side of the block of pixels that becomes one pixel; digits stay as they are."""


def reduced(source: Path, target: Path, names: tuple[str, ...]) -> None:
    """Write the reduced datasets to the folder `target`, unless they are there. Raises DataError if `source` lacks one."""
    for name in names:
        if name == "digits" or list(target.glob(f"{name}*.npz")):
            continue
        dataset = datasets.load(name, source)
        target.mkdir(parents=True, exist_ok=True)
        if dataset.domains is None:
            rows = generator(0, "study").permutation(len(dataset.samples))[:KEPT]
            npz.write(target / f"{name}.npz", _arrays(dataset, rows))
            continue
        for number, domain in enumerate(dataset.domain_names):
            npz.write(
                target / f"{name}-{domain}.npz", _arrays(dataset, np.flatnonzero(dataset.domains == number))
            )


def _arrays(dataset: Dataset, rows: Array) -> dict[str, Array]:
    x, side = dataset.samples.x[rows], BLOCKS[dataset.name]
    n, channels, height, width = x.shape
    blocks = x.reshape(n, channels, height // side, side, width // side, side)
    return {"x": np.rint(blocks.mean((3, 5))).astype(np.uint8), "y": dataset.samples.y[rows]}
