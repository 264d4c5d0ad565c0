"""How pictures look and how they are saved: colours that colour-blind readers tell apart, no display, the same bytes every time."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from edge_fl.errors import RunError
from edge_fl.files import atomic

COLOURS = tuple("#3f90da #ffa90e #bd1f01 #94a4a2 #832db6 #a96b59 #e76300 #b9ac70 #717581 #92dadd".split())
"""M. A. Petroff, "Accessible Color Sequences for Data Visualization" (2021): ten that colour-blind readers tell apart."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", ":", "-.")
AREA = "cividis"  # for matrices; its lightness grows evenly

RC: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "savefig.dpi": 150,
    "svg.hashsalt": "edge-fl",  # or every file would name its parts by chance
}


@contextmanager
def styled() -> Iterator[None]:
    """Figures made in here look alike; nothing outside is changed."""
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]  # the stubs list every key
        yield


def figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, which arranges its own margins."""
    return Figure(figsize=(width, height), layout="constrained")


def mark(series: int) -> dict[str, Any]:
    """Colour and marker of the n-th series; both change from one to the next, and the first 40 pairs differ."""
    return {"color": COLOURS[series % len(COLOURS)], "marker": MARKERS[series % len(MARKERS)]}


def line(series: int) -> dict[str, Any]:
    """Colour and dashes of the n-th series; both change from one to the next, and the first 40 pairs differ."""
    turn = series + series // (2 * len(COLOURS))
    return {"color": COLOURS[series % len(COLOURS)], "linestyle": LINES[turn % len(LINES)]}


def save(picture: Figure, folder: Path, name: str) -> list[Path]:
    """Writes `name`.svg and `name`.png. Raises RunError when the disk does not take them."""
    paths = []
    for ending, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
        held = io.BytesIO()
        with styled():
            picture.savefig(held, format=ending, metadata=metadata)
        path = folder / f"{name}.{ending}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            atomic.write(path, held.getvalue())
        except OSError as error:
            raise RunError(
                f"{path}: cannot be written ({error.strerror}); the numbers are untouched"
            ) from error
        paths.append(path)
    return paths
