"""Style and output of figures: colours for colour-blind readers, no display, reproducible bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from edge_fl.errors import RunError
from edge_fl.files import atomic

COLOURS = tuple("#3f90da #ffa90e #bd1f01 #94a4a2 #832db6 #a96b59 #e76300 #b9ac70 #717581 #92dadd".split())
"""M. A. Petroff, "Accessible Color Sequences for Data Visualization" (2021)."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", ":", "-.")
AREA = "cividis"  # for matrices; perceptually uniform

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
    "svg.hashsalt": "edge-fl",  # without it ids in SVG are random
}


@contextmanager
def styled() -> Iterator[None]:
    """Apply the style to figures made inside the block."""
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]  # the stubs list every key
        yield


def figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, with automatic margins."""
    return Figure(figsize=(width, height), layout="constrained")


def mark(series: int) -> dict[str, Any]:
    """Colour and marker of the n-th series; both change from one to the next, and the first 40 pairs differ."""
    return {"color": COLOURS[series % len(COLOURS)], "marker": MARKERS[series % len(MARKERS)]}


def line(series: int) -> dict[str, Any]:
    """Colour and dashes of the n-th series; both change from one to the next, and the first 40 pairs differ."""
    turn = series + series // (2 * len(COLOURS))
    return {"color": COLOURS[series % len(COLOURS)], "linestyle": LINES[turn % len(LINES)]}


def inline(picture: Figure, salt: str) -> str:
    """The figure as an SVG element for a page, whose style sheet colours text and lines; `salt` keeps its ids apart from other figures'."""
    held = io.StringIO()
    with styled(), matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        picture.savefig(held, format="svg", metadata={"Date": None}, transparent=True)
    drawn = held.getvalue()
    drawn = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    drawn = re.sub(r' xmlns(:\w+)?="[^"]*"|(?<=<g) id="[^"]*"', "", drawn)
    return re.sub(r"stroke: #(?:000000|e5e5e5|cccccc)", "stroke: var(--line)", drawn)


def save(picture: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name`.svg and `name`.png. Raises RunError if they cannot be written."""
    paths = []
    for ending, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
        held = io.BytesIO()
        with styled():
            picture.savefig(held, format=ending, metadata=metadata)
        paths.append(write(folder / f"{name}.{ending}", held.getvalue()))
    return paths


def write(path: Path, content: bytes | str) -> Path:
    """Write a figure or a report and return its path. Raises RunError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, content)
    except OSError as error:
        text = f"{path}: cannot be written ({error.strerror})"
        raise RunError(text, consequence="the run's numbers are unchanged") from error
    return path
