"""Bursts: many nearly equal frames of few scenes, drawn from the fruit of the label page's tests."""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from tests.maker.labelling.fruit import CLASSES, fruit

SIZE = (120, 90)
MARGIN = 2


def frames(label: int, scene: int, count: int) -> Iterator[bytes]:
    """JPEG frames of one scene: the camera trembles, the light and the noise change."""
    rng = np.random.default_rng([label, scene, 7])
    with Image.open(BytesIO(fruit(label, scene, SIZE))) as still:
        pixels = np.asarray(still).astype(np.float32)
    top, left = rng.integers(0, MARGIN, 2)
    for _ in range(count):
        top, left = np.clip(np.array([top, left]) + rng.integers(-1, 2, 2), 0, MARGIN)
        frame = pixels[top : top + SIZE[1] - MARGIN, left : left + SIZE[0] - MARGIN]
        frame = frame * rng.uniform(0.9, 1.1) + rng.normal(0, 4, frame.shape)
        buffer = BytesIO()
        Image.fromarray(frame.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=80)
        yield buffer.getvalue()


def write(folder: Path, scenes: int, count: int, first: int = 0) -> None:
    """Write `count` frames of each of `scenes` scenes per class into the folders of the classes."""
    for label, scene in np.ndindex(len(CLASSES), scenes):
        for number, frame in enumerate(frames(label, first + scene, count)):
            path = folder / CLASSES[label] / f"{first + scene}-{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(frame)
