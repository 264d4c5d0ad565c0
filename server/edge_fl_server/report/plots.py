"""The papers' figures from numbers: labels by client, accuracy by round, features, class separation, CKA similarity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from edge_fl_server.report import style

MAX_LEGEND = 24  # entries
LARGEST_DOT = 120.0  # points^2


@dataclass(frozen=True)
class Curve:
    """Mean accuracy (0..1) by round or cost with its std (zeros for none), and the accuracy after final personalisation if known."""

    rounds: Sequence[float]
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    after: float | None = None

    @property
    def final(self) -> float | None:
        """`after` where it differs from the last round."""
        if self.after is None or (len(self.mean) and np.isclose(self.mean[-1], self.after)):
            return None
        return self.after


@dataclass(frozen=True)
class Points:
    """Images as points [n, 2]; `group` [n] is the index of each one's class or client in `names`."""

    at: NDArray[np.float32]
    group: NDArray[np.int64]
    names: Sequence[str]


def labels(counts: NDArray[np.int64], clients: Sequence[str], classes: Sequence[str]) -> Figure:
    """A dot per client and class, its area the number of images (RepPer, Figure 3; FedRIR, Figure 2). counts [clients, classes]."""
    with style.styled():
        width = min(max(0.3 * len(clients) + 1.8, 4), 20)
        picture = style.figure(width, min(max(0.26 * len(classes) + 0.9, 2.5), 16))
        axes = picture.subplots()
        client, label = np.nonzero(counts)
        sizes = counts[client, label] / max(counts.max(), 1) * LARGEST_DOT
        axes.scatter(client, label, s=sizes, color=style.COLOURS[0], linewidths=0)
        _name_ticks(axes, "x", clients, "client")
        _name_ticks(axes, "y", classes, "class")
        axes.set_xlim(-0.7, len(clients) - 0.3)
        axes.set_ylim(-0.7, len(classes) - 0.3)
        for share in (1.0, 0.5, 0.1):
            size = max(round(counts.max() * share), 1)
            area = size / max(counts.max(), 1) * LARGEST_DOT
            axes.scatter([], [], s=area, color=style.COLOURS[0], linewidths=0, label=f"{size} images")
        picture.legend(loc="outside upper right", ncols=3)
        return picture


def accuracy(
    curves: Mapping[str, Curve],
    what: str,
    *,
    step: str = "round",
    log: bool = False,
    size: tuple[float, float] | None = None,
    legend: Literal["outside right upper", "outside upper left"] = "outside right upper",
) -> Figure:
    """Mean accuracy in per cent by `step`, a line per method; the band is one std, a diamond the final personalisation."""
    end = max((round for curve in curves.values() for round in curve.rounds), default=0)
    with style.styled():
        picture = style.figure(*(size or (6.4, max(3.4, 0.19 * len(curves)))))
        axes = picture.subplots()
        for series, (name, curve) in enumerate(curves.items()):
            look = style.line(series)
            axes.plot(curve.rounds, curve.mean * 100, label=name, **look)
            if curve.std.any():
                low, high = (curve.mean - curve.std) * 100, (curve.mean + curve.std) * 100
                axes.fill_between(curve.rounds, low, high, color=look["color"], alpha=0.15, linewidth=0)
            if curve.final is not None:
                axes.plot([end], [curve.final * 100], marker="D", color=look["color"], clip_on=False)
        if any(curve.final is not None for curve in curves.values()):
            axes.plot([], [], "D", color="#555555", label="after final personalisation")
        axes.set_xlabel(step)
        axes.set_ylabel(f"{what}, %")
        if log:
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        picture.legend(loc=legend)
        return picture


def histogram(values: Sequence[float], what: str, size: tuple[float, float]) -> Figure:
    """The number of devices by accuracy (0..1), in bins of 5 per cent."""
    with style.styled():
        picture = style.figure(*size)
        axes = picture.subplots()
        axes.hist(np.multiply(values, 100), bins=20, range=(0, 100), rwidth=0.95, color=style.COLOURS[0])
        axes.set_xlabel(f"{what}, %")
        axes.set_ylabel("devices")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        return picture


def embedding(panels: Mapping[str, Points]) -> Figure:
    """A panel per entry, its points coloured and marked by group (t-SNE: RepPer, Figure 4; FedRIR, Figures 3 and 5; DualFed, Figure 4)."""
    with style.styled():
        wide = min(max(int(np.ceil(np.sqrt(1.6 * len(panels)))), 2), len(panels))
        high = -(-len(panels) // wide)
        picture = style.figure(2.9 * wide + 1.2, 2.9 * high + 0.2)
        grid = picture.subplots(high, wide, squeeze=False).flat
        for (title, points), axes in zip(panels.items(), grid, strict=False):
            for series, name in enumerate(points.names):
                some = points.at[points.group == series]
                axes.scatter(*some.T, s=13, linewidths=0, alpha=0.9, label=name, **style.mark(series))
            axes.set_title(title)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set(visible=True, color="#CCCCCC")
        for axes in grid:  # unused panels
            axes.set_axis_off()
        _name_groups(picture, list(panels.values()))
        return picture


def separation(values: Mapping[str, tuple[float, float]], what: str) -> Figure:
    """A dot per method or client: class separation R^2 with its std (DualFed, Figure 5)."""
    with style.styled():
        picture = style.figure(5.2, 0.27 * len(values) + 0.9)
        axes = picture.subplots()
        middle = np.array([value for value, _ in values.values()])
        around = np.array([std for _, std in values.values()])
        rows = np.arange(len(values))
        axes.errorbar(middle, rows, xerr=around, fmt="o", color=style.COLOURS[0], elinewidth=1.2)
        axes.set_yticks(rows, list(values))
        axes.set_ylim(len(values) - 0.5, -0.5)
        axes.set_xlabel("class separation $R^2$ of features (1: classes are points)")
        axes.set_ylabel(what)
        return picture


def similarity(matrix: NDArray[np.float64], names: Sequence[str], what: str) -> Figure:
    """CKA similarity of every two networks on the same images (DualFed, Figure 6). matrix [n, n], 0..1."""
    with style.styled():
        side = min(max(0.36 * len(names) + 1.6, 3), 12)
        picture = style.figure(side + 0.7 + 0.07 * max(map(len, names)), side)
        axes = picture.subplots()
        image = axes.imshow(matrix, vmin=0, vmax=1, cmap=style.AREA)
        axes.grid(visible=False)
        places = range(len(names))
        axes.set_xticks(places, names, rotation=90)
        axes.set_yticks(places, names)
        axes.set_xlabel(what)
        if len(names) <= 16:
            for row, column in np.ndindex(matrix.shape):
                ink = "black" if matrix[row, column] > 0.55 else "white"
                text = f"{matrix[row, column]:.2f}".removeprefix("0")
                axes.text(column, row, text, ha="center", va="center", fontsize=7, color=ink)
        picture.colorbar(image, label="linear CKA", shrink=0.8)
        return picture


def _name_ticks(axes: Axes, which: str, names: Sequence[str], what: str) -> None:
    """Every name up to 30, else every tenth index."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    every = 1 if len(names) <= 30 else 10
    axis.set_ticks(range(0, len(names), every), list(names[::every]))
    if which == "x" and len(names) > 8:
        axis.set_tick_params(rotation=90)
    axis.set_label_text(what)


def _name_groups(picture: Figure, panels: Sequence[Points]) -> None:
    """One legend for all panels if they share their groups, else one each; none for more than `MAX_LEGEND` entries."""
    same = len({tuple(points.names) for points in panels}) == 1
    for axes, points in zip(picture.axes, panels, strict=False):
        if len(points.names) <= MAX_LEGEND and not same:
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), markerscale=1.4)
    if same and len(panels[0].names) <= MAX_LEGEND:
        handles, labels = picture.axes[0].get_legend_handles_labels()
        picture.legend(handles, labels, loc="outside right upper", markerscale=1.4)
