"""Which pictures count as near duplicates of each other: of clean data none should, of a burst all frames.

python -m tools.study.groups --data .data        the figures in docs/devices.md, "Scenes"
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl.data import datasets, grouping
from edge_fl.data.samples import Array
from edge_fl.modalities import pictures

SETS = ("fashion-mnist", "mnist", "pacs-photo", "pacs-art_painting", "pacs-cartoon", "pacs-sketch")
SHIFT = 0.01
"""Share of the side, and at least one pixel."""
Change = Callable[[Array, np.random.Generator], Array]


def noise(x: Array, rng: np.random.Generator) -> Array:
    """Add noise of 6 grey levels."""
    return (x + rng.normal(0, 6, x.shape)).clip(0, 255).astype(np.uint8)


def brightness(x: Array, rng: np.random.Generator) -> Array:
    """Multiply by 1.2."""
    return (x * np.float32(1.2)).clip(0, 255).astype(np.uint8)


def jpeg(x: Array, rng: np.random.Generator) -> Array:
    """Encode with quality 60."""
    files = (pictures.jpeg(image[0] if len(image) == 1 else image.transpose(1, 2, 0), 60) for image in x)
    return np.stack([pictures.decode(BytesIO(file), None) for file in files])


def shift(x: Array, rng: np.random.Generator) -> Array:
    """Move right and down."""
    step = max(1, round(SHIFT * x.shape[3]))
    edges = ((0, 0), (0, 0), (step, 0), (step, 0))
    return np.pad(x, edges, mode="edge")[:, :, : x.shape[2], : x.shape[3]]


def burst(x: Array, rng: np.random.Generator, frames: int = 30) -> Array:
    """Frames of each picture, cut out of it where a trembling hand points, with noise and other light."""
    side = x.shape[3]
    reach = max(1, round(0.02 * side))
    found = []
    for image in x:
        place = rng.integers(0, 2 * reach + 1, 2)
        for _ in range(frames):
            place = np.clip(place + rng.integers(-1, 2, 2), 0, 2 * reach)
            frame = image[:, place[0] : place[0] + side - 2 * reach, place[1] : place[1] + side - 2 * reach]
            light = frame * rng.uniform(0.9, 1.1) + rng.normal(0, 4, frame.shape)
            found.append(light.clip(0, 255).astype(np.uint8))
    return np.stack(found)


CHANGES: dict[str, Change] = {
    "noise of 6 grey levels": noise,
    "brightness times 1.2": brightness,
    "JPEG of quality 60": jpeg,
    "shift by 1 % or a pixel": shift,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.study.groups", None, __doc__, formatter_class=formatter)
    parser.add_argument("--data", type=Path, default=Path(".data"), help="folder of the data sets [.data]")
    parser.add_argument("--pictures", type=int, default=10_000)
    options = parser.parse_args(arguments)
    every = {name: datasets.load(name, options.data).samples.x for name in SETS}
    sys.stdout.write(tables.markdown(table(every, options.pictures)) + "\n")


def table(every: dict[str, Array], most: int, copies: int = 300, scenes: int = 40) -> Table:
    """Shares of up to `most` clean pictures in a group, of changed copies in that of their picture, of frames in the largest of a scene."""
    lines = []
    for name, x in every.items():
        rng = np.random.default_rng(0)
        x = x[rng.permutation(len(x))[:most]]
        given = _numbers(x)
        grouped = 1 - np.sum(np.bincount(given) == 1) / len(x)
        few = x[:copies]
        shares = [_together(few, change(few, rng)) for change in CHANGES.values()]
        lines.append(
            [
                name,
                str(len(x)),
                f"{grouped:.4f}",
                *map("{:.2f}".format, shares),
                f"{_of_bursts(x[:scenes], rng):.2f}",
            ]
        )
    columns = ["data", "pictures", "grouped", *CHANGES, "frames of a burst"]
    return Table(columns, lines, "Near duplicates", [])


def _numbers(x: Array) -> grouping.Groups:
    sides = np.full(len(x), min(x.shape[2:]))
    return grouping.numbers(
        grouping.near_duplicates(pictures.thumbnails(x), grouping.nearness(sides)), len(x)
    )


def _together(x: Array, changed: Array) -> float:
    """The share of pictures whose changed copy alone would be grouped with them."""
    pairs = (_numbers(np.stack(pair)) for pair in zip(x, changed, strict=True))
    return float(np.mean([first == second for first, second in pairs]))


def _of_bursts(x: Array, rng: np.random.Generator) -> float:
    """The share of frames that are in the largest group of their scene."""
    scenes = _numbers(burst(x, rng)).reshape(len(x), -1)
    return float(np.mean([np.bincount(frames).max() / len(frames) for frames in scenes]))


if __name__ == "__main__":
    main()
