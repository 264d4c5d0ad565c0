"""Style and output of figures: one column of a paper wide, colours for colour-blind readers, no display, reproducible bytes."""

import io
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import escape
from matplotlib.figure import Figure

from edge_fl.files import atomic

COLOURS = tuple("#0077bb #dd7711 #332288 #8c8c8c #7a1f00 #bb4400 #111111".split())
"""At least 3:1 on white; far apart from each other to colour-blind readers, too."""
DARK = tuple("#5db4f0 #ffb454 #a99cff #b3b3b3 #e0705a #ffd9c2 #f2f2f2".split())
"""The same series on a dark page."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", ":", "-.")
AREA = "cividis"  # for matrices; perceptually uniform
QUIET = "#555555"
COLUMN = 3.3
"""Width in inches of one column of a paper."""
LEAST_POINTS = 7
"""The smallest font."""
UNCHANGED = "the run's numbers are unchanged"
"""What happens if a figure or report cannot be written."""
NOTE_LETTERS = 66  # of a note in one column

RC: dict[str, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": LEAST_POINTS,
    "ytick.labelsize": LEAST_POINTS,
    "legend.fontsize": LEAST_POINTS,
    "legend.frameon": False,
    "legend.handlelength": 2.6,  # long enough to tell the dashes apart
    "legend.columnspacing": 1.2,
    "legend.borderaxespad": 0.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "savefig.dpi": 300,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "edge-fl",  # without it ids in SVG are random
    "pdf.fonttype": 42,  # TrueType; conferences reject Type 3
}


@contextmanager
def styled() -> Iterator[None]:
    """Apply the style to figures made inside the block."""
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]  # the stubs list every key
        yield


def figure(height: float, width: float = COLUMN) -> Figure:
    """An empty figure of this size in inches, with automatic margins."""
    return Figure(figsize=(width, height), layout="constrained")


def mark(series: int) -> dict[str, Any]:
    """Colour and marker of the n-th series; both change from one to the next, and the first 40 pairs differ."""
    return {"color": COLOURS[series % len(COLOURS)], "marker": MARKERS[series % len(MARKERS)]}


def line(series: int) -> dict[str, Any]:
    """Colour, marker and dashes of the n-th series; all change from one to the next, and the first 40 differ."""
    return {**mark(series), "linestyle": LINES[series % len(LINES)]}


def note(picture: Figure, text: str) -> None:
    """Write below the axes what a figure shows: seeds, clients, the meaning of bands and bars."""
    letters = round(NOTE_LETTERS * picture.get_figwidth() / COLUMN)
    picture.supxlabel("\n".join(textwrap.wrap(text, letters)), fontsize=LEAST_POINTS, color=QUIET)


def css() -> str:
    """The colours of series as properties of a page, in light and dark."""
    light, dark = (
        " ".join(f"--c{place}: {colour};" for place, colour in enumerate(colours))
        for colours in (COLOURS, DARK)
    )
    return f":root {{ {light} }} @media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


def inline(picture: Figure, title: str, salt: str) -> str:
    """The figure as an SVG element for a page, whose style sheet colours text, lines and series.

    `title` is read out instead of the figure; `salt` keeps its ids apart from other figures'.
    """
    held = io.StringIO()
    with styled(), matplotlib.rc_context({"svg.hashsalt": salt}):
        picture.savefig(held, format="svg", metadata={"Date": None}, transparent=True)
    drawn = held.getvalue()
    drawn = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    drawn = re.sub(r' xmlns(:\w+)?="[^"]*"|(?<=<g) id="[^"]*"', "", drawn)
    drawn = drawn.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
    drawn = drawn.replace(">", f"><title>{escape(title)}</title>", 1)
    for place, colour in enumerate(COLOURS):
        drawn = re.sub(f"(stroke|fill): {colour}", rf"\1: var(--c{place})", drawn)
    drawn = re.sub(rf"(stroke|fill): (?:#000000|{QUIET})", r"\1: var(--quiet)", drawn)
    return re.sub(r"stroke: #(?:e5e5e5|cccccc)", "stroke: var(--line)", drawn)


def save(picture: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name`.pdf, `name`.svg and `name`.png. Raises RunError if they cannot be written."""
    paths = []
    for ending, metadata in (
        ("pdf", {"CreationDate": None}),
        ("svg", {"Date": None}),
        ("png", {"Software": None}),
    ):
        held = io.BytesIO()
        with styled():
            picture.savefig(held, format=ending, metadata=metadata)
        paths.append(atomic.save(folder / f"{name}.{ending}", held.getvalue(), UNCHANGED))
    return paths
