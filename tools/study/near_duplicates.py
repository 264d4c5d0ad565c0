"""Which changes of a picture the near-duplicate check of the pool takes for the same picture, measured on PACS photos.

python -m tools.study.near_duplicates --data .data        the figures in docs/devices.md, "Capture"
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl.data import datasets
from edge_fl_maker.capture.pools import difference_hash, is_near_duplicate, jpeg

SIDE = 480
Pixels = np.ndarray
Change = Callable[[Pixels, Pixels, np.random.Generator], Pixels]
"""(picture, another picture, rng) -> the changed picture."""


def noise(picture: Pixels, other: Pixels, rng: np.random.Generator) -> Pixels:
    """Add noise of 6 grey levels."""
    return (picture + rng.normal(0, 6, picture.shape)).clip(0, 255).astype(np.uint8)


def brightness(picture: Pixels, other: Pixels, rng: np.random.Generator) -> Pixels:
    """Multiply by 1.2."""
    return (picture * 1.2).clip(0, 255).astype(np.uint8)


def object_of(share: float) -> Change:
    """Paste another picture, with this share of the side, somewhere."""

    def change(picture: Pixels, other: Pixels, rng: np.random.Generator) -> Pixels:
        side = int(share * SIDE)
        top, left = rng.integers(0, SIDE - side, 2)
        changed = picture.copy()
        changed[top : top + side, left : left + side] = scaled(other, side)
        return changed

    return change


CHANGES: dict[str, Change] = {
    "noise of 6 grey levels": noise,
    "brightness times 1.2": brightness,
    "an object of 10 % of the side": object_of(0.1),
    "an object of 20 % of the side": object_of(0.2),
    "an object of 30 % of the side": object_of(0.3),
    "another picture": lambda picture, other, rng: other,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tools.study.near_duplicates", None, __doc__, formatter_class=formatter
    )
    parser.add_argument("--data", type=Path, default=Path(".data"), help="folder of pacs-photo.npz [.data]")
    parser.add_argument("--pictures", type=int, default=400)
    options = parser.parse_args(arguments)
    x = datasets.load("pacs-photo", options.data).samples.x
    rows = np.random.default_rng(0).permutation(len(x))[: options.pictures]
    sys.stdout.write(tables.markdown(table([scaled(x[row].transpose(1, 2, 0)) for row in rows])) + "\n")


def table(photos: Sequence[Pixels]) -> Table:
    """The share of pictures that count as duplicates of themselves after a change."""
    rng, hashes = np.random.default_rng(0), [difference_hash(jpeg(photo)) for photo in photos]
    lines = []
    for name, change in CHANGES.items():
        changed = (
            change(photo, photos[number - 1], rng) for number, photo in enumerate(photos)
        )  # the one before it is the other one
        found = [
            is_near_duplicate(difference_hash(jpeg(picture)), [int(hash, 16)])
            for picture, hash in zip(changed, hashes, strict=True)
        ]
        lines.append([name, f"{np.mean(found):.2f}"])
    return Table(["change", "duplicates"], lines, "Near duplicates", [f"{len(photos)} pictures"])


def scaled(picture: Pixels, side: int = SIDE) -> Pixels:
    """The picture with equal sides."""
    with Image.open(BytesIO(jpeg(picture))) as file:
        return np.asarray(file.resize((side, side), Image.Resampling.BICUBIC))


if __name__ == "__main__":
    main()
