"""Figures from numbers: accuracy by round or cost, final accuracy, clients; and the papers' labels, features, separation, CKA similarity.

Each says in itself what its bands and bars are, and over how many seeds and clients (`note`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray

from edge_fl_lab.report import style
from edge_fl_server.runs.summaries import too_few

PANEL = 7
"""Curves in one panel: each has a colour of its own."""
MAX_LEGEND = 24  # entries
MAX_DOTS = 60  # clients that are drawn one by one
LARGEST_DOT = 120.0  # points^2
FADED = 0.35
INK = "#1b1b1b"  # on bright cells, in dark pages too
ROW = 0.22  # inches


MEGABYTE = 1e6
BOX = "Dot: a client; box: quartiles; line in it: median; whiskers: all clients"


@dataclass(frozen=True)
class Drawn:
    """A figure by name with its title, which is read out instead of it, and a caption of one sentence."""

    name: str
    figure: Figure
    title: str
    caption: str


@dataclass(frozen=True)
class Curve:
    """Mean accuracy (0..1) by round or cost with its std (zeros for none), and the accuracy after final personalisation if known.

    `clients` has the n of each point; those over too few are drawn faded. Without `rounds` it is `after` alone.
    """

    rounds: Sequence[float]
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    after: float | None = None
    clients: Sequence[int] = ()

    @property
    def final(self) -> float | None:
        """`after` where it differs from the last round."""
        if self.after is None or (len(self.mean) and np.isclose(self.mean[-1], self.after)):
            return None
        return self.after

    @property
    def faded(self) -> NDArray[np.bool_]:
        """Whether each point is over too few clients."""
        few = too_few(dict(enumerate(self.clients)))
        return np.array([place in few for place in range(len(self.mean))], bool)


@dataclass(frozen=True)
class Mark:
    """A method's final accuracy (0..1), its reach to each side (NaN: unknown), and its cost if it has one."""

    mean: float
    reach: float
    cost: float = 0.0


@dataclass(frozen=True)
class Points:
    """Samples as points [n, 2]; `group` [n] is the index of each one's class or client in `names`."""

    at: NDArray[np.float32]
    group: NDArray[np.int64]
    names: Sequence[str]


@style.styled()
def accuracy(
    curves: Mapping[str, Curve],
    what: str,
    note: str,
    *,
    step: str = "round",
    log: bool = False,
    order: Sequence[str] = (),
) -> Figure:
    """Mean accuracy in per cent by `step`, a line per curve, at most PANEL in a panel; a diamond is the final personalisation.

    A curve's look is that of its place in `order`, so that it is the same in every figure; without it, of its place in `curves`.
    """
    names = list(order or curves)
    end = max((place for curve in curves.values() for place in curve.rounds), default=0)
    found = [(names.index(name), (name, curve)) for name, curve in curves.items()]
    groups = [found[start : start + PANEL] for start in range(0, len(found), PANEL)]
    legend_rows = max((ceil((len(group) + 1) / 2) for group in groups), default=0)
    picture = style.figure(len(groups) * (1.9 + 0.13 * legend_rows) + 0.3)
    panels = picture.subplots(len(groups), squeeze=False, sharex=True, sharey=True)[:, 0]
    for group, axes in zip(groups, panels, strict=True):
        _curves(axes, dict(group), end)
        axes.set_ylabel(f"{what}, %")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
        if log:
            _log(axes)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=step == "round", nbins=6))
    _reach_ticks(list(panels))
    panels[-1].set_xlabel(step)
    style.note(picture, note)
    return picture


@style.styled()
def final(marks: Mapping[str, Mark], what: str, note: str) -> Figure:
    """A dot per method with its error bar: final accuracy in per cent."""
    picture, axes = _rows(list(marks))
    for row, mark in enumerate(marks.values()):
        reach = 100 * mark.reach if isfinite(mark.reach) else 0.0
        axes.errorbar(
            100 * mark.mean, row, xerr=reach, fmt="o", color=style.COLOURS[0], ecolor=style.COLOURS[2],
            elinewidth=1, capsize=2,
        )  # fmt: skip
    axes.set_xlabel(f"{what}, %")
    style.note(picture, note)
    return picture


@style.styled()
def clients(values: Mapping[str, Sequence[float]], what: str, note: str) -> Figure:
    """A row per group of clients: a box from quartile to quartile, its median, and a dot per client; accuracies 0..1."""
    picture, axes = _rows([f"{name} (n = {len(each)})" for name, each in values.items()])
    for row, each in enumerate(values.values()):
        found = 100 * np.sort(np.asarray(each, np.float64))
        axes.boxplot(
            found, positions=[row], orientation="horizontal", widths=0.6, whis=(0, 100), showcaps=False,
            showfliers=False, manage_ticks=False, boxprops={"color": style.COLOURS[2], "linewidth": 0.8},
            whiskerprops={"color": style.COLOURS[2], "linewidth": 0.8},
            medianprops={"color": style.COLOURS[4], "linewidth": 1.6},
        )  # fmt: skip
        if len(found) <= MAX_DOTS:
            heights = row + 0.18 * np.sin(
                2.4 * np.arange(len(found))
            )  # apart from each other, the same every time
            axes.scatter(found, heights, s=7, color=style.COLOURS[0], alpha=0.8, linewidths=0, zorder=3)
    axes.set_xlabel(f"{what}, %")
    style.note(picture, note)
    return picture


@style.styled()
def by_cost(marks: Mapping[str, Mark], what: str, cost: str, note: str) -> Figure:
    """Final accuracy in per cent against a cost, a marker with its error bar per method; a method without this cost is a line."""
    picture = style.figure(2.2 + 0.13 * ceil(len(marks) / 2))
    axes = picture.subplots()
    for series, (name, mark) in enumerate(marks.items()):
        look = style.mark(series)
        if mark.cost:
            reach = 100 * mark.reach if isfinite(mark.reach) else 0.0
            axes.errorbar(
                mark.cost, 100 * mark.mean, yerr=reach, label=name, linestyle="", markersize=5, elinewidth=0.8, **look
            )  # fmt: skip
        else:
            axes.axhline(
                100 * mark.mean,
                color=look["color"],
                linewidth=1,
                linestyle="--",
                label=f"{name} (sends nothing)",
            )
    costs = [mark.cost for mark in marks.values() if mark.cost]
    if max(costs) > 10 * min(costs):
        _log(axes)
    axes.set_xlabel(cost)
    axes.set_ylabel(f"{what}, %")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, handlelength=1.8)
    style.note(picture, note)
    return picture


@style.styled()
def labels(counts: NDArray[np.int64], clients: Sequence[str], classes: Sequence[str]) -> Figure:
    """A dot per client and class, its area the number of samples (RepPer, Figure 3; FedRIR, Figure 2). counts [clients, classes]."""
    picture = style.figure(min(max(0.17 * len(classes) + 0.9, 1.8), 8))
    axes = picture.subplots()
    client, label = np.nonzero(counts)
    largest = max(int(counts.max()), 1)
    dot = min(LARGEST_DOT, (150 / max(len(clients), 1)) ** 2)  # neighbours just touch
    axes.scatter(client, label, s=counts[client, label] / largest * dot, color=style.COLOURS[0], linewidths=0)
    _name_ticks(axes, "x", clients, "client")
    _name_ticks(axes, "y", classes, "class")
    axes.set_xlim(-0.7, len(clients) - 0.3)
    axes.set_ylim(-0.7, len(classes) - 0.3)
    for share in (1.0, 0.5, 0.1):
        size = max(round(counts.max() * share), 1)
        axes.scatter(
            [], [], s=size / largest * dot, color=style.COLOURS[0], linewidths=0, label=f"{size} samples"
        )
    picture.legend(loc="outside upper center", ncols=3)
    return picture


@style.styled()
def embedding(panels: Mapping[str, Points]) -> Figure:
    """A panel per entry, its points coloured and marked by group (t-SNE: RepPer, Figure 4; FedRIR, Figures 3 and 5; DualFed, Figure 4)."""
    wide = min(len(panels), 2)
    high = ceil(len(panels) / wide)
    longest = max(len(points.names) for points in panels.values())
    rows = ceil(longest / 4) if longest <= MAX_LEGEND else 0
    same = len({tuple(points.names) for points in panels.values()}) == 1
    picture = style.figure(high * (1.65 + (0 if same else 0.14 * rows)) + same * 0.14 * rows)
    grid = picture.subplots(high, wide, squeeze=False).flat
    for (title, points), axes in zip(panels.items(), grid, strict=False):
        for series, name in enumerate(points.names):
            some = points.at[points.group == series]
            axes.scatter(*some.T, s=5, linewidths=0, alpha=0.9, label=name, **style.mark(series))
        axes.set_title(title)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(visible=True, color="#CCCCCC")
        if rows and not same:
            axes.legend(
                loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3, handletextpad=0, columnspacing=0.6
            )
    for axes in grid:  # unused panels
        axes.set_axis_off()
    if rows and same:
        found = picture.axes[0].get_legend_handles_labels()
        picture.legend(*found, loc="outside lower center", ncols=4, handletextpad=0.2, markerscale=1.4)
    return picture


@style.styled()
def separation(values: Mapping[str, tuple[float, float]], what: str, note: str = "") -> Figure:
    """A dot per method or client: class separation R^2 with its std (DualFed, Figure 5)."""
    picture, axes = _rows(list(values))
    middle, around = np.array(list(values.values())).T
    axes.errorbar(
        middle, range(len(values)), xerr=around, fmt="o", color=style.COLOURS[0], elinewidth=1, capsize=2
    )
    axes.set_xlabel("class separation R² (1: classes are points)")
    axes.set_ylabel(what)
    if note:
        style.note(picture, note)
    return picture


@style.styled()
def similarity(matrix: NDArray[np.float64], names: Sequence[str], what: str) -> Figure:
    """CKA similarity of every two networks on the same samples (DualFed, Figure 6). matrix [n, n], 0..1."""
    picture = style.figure(style.COLUMN - 0.5)
    axes = picture.subplots()
    image = axes.imshow(matrix, vmin=0, vmax=1, cmap=style.AREA)
    axes.grid(visible=False)
    _name_ticks(axes, "x", names, what)
    _name_ticks(axes, "y", names, "")
    axes.xaxis.set_tick_params(rotation=90)
    if len(names) <= 9:
        for row, column in np.ndindex(matrix.shape):
            ink = INK if matrix[row, column] > 0.55 else "white"
            text = f"{matrix[row, column]:.2f}".removeprefix("0")
            axes.text(column, row, text, ha="center", va="center", fontsize=style.LEAST_POINTS, color=ink)
    picture.colorbar(image, label="linear CKA", shrink=0.8)
    return picture


def _curves(axes: Axes, curves: Mapping[int, tuple[str, Curve]], end: float) -> None:
    """Draw the curves of a panel: faint everywhere, and in full where enough clients measured them; diamonds at `end`."""
    for series, (name, curve) in curves.items():
        look = style.line(series)
        diamond = {"marker": "D", "markersize": 5, "color": look["color"], "clip_on": False}
        if not len(curve.rounds):
            axes.plot(
                [end], [100 * (curve.final or 0.0)], label=f"{name}, at the end", linestyle="", **diamond
            )
            continue
        every = ceil(len(curve.rounds) / 6) or 1
        percent = curve.mean * 100
        if curve.faded.any():
            axes.plot(curve.rounds, percent, alpha=FADED, color=look["color"], linestyle=look["linestyle"])
        axes.plot(
            curve.rounds, np.where(curve.faded, np.nan, percent), label=name, markevery=(series % every, every), **look
        )  # fmt: skip
        if curve.std.any():
            low, high = (curve.mean - curve.std) * 100, (curve.mean + curve.std) * 100
            axes.fill_between(
                curve.rounds, np.clip(low, 0, 100), np.clip(high, 0, 100), color=look["color"], alpha=0.15, linewidth=0
            )  # fmt: skip
        if curve.final is not None:
            axes.plot([end], [curve.final * 100], **diamond)
    if any(curve.final is not None for _, curve in curves.values() if len(curve.rounds)):
        axes.plot([], [], "D", color=style.QUIET, label="final personalisation")


def _log(axes: Axes) -> None:
    """A logarithmic axis with plain numbers: exponents would be too small to print. At least two, on short axes too."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    if high < 10 * low:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    elif high < 100 * low:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _reach_ticks(panels: Sequence[Axes]) -> None:
    """End the axes of accuracies, which the panels share, at ticks, so that the highest point is not above all of them."""
    low = min(axes.dataLim.ymin for axes in panels)
    high = max(axes.dataLim.ymax for axes in panels)
    ticks = MaxNLocator(nbins=5, steps=[1, 2, 5, 10]).tick_values(low, high)
    panels[0].set_yticks(ticks)
    space = 0.03 * (ticks[-1] - ticks[0])  # for markers
    panels[0].set_ylim(ticks[0] - space, ticks[-1] + space)


def _rows(names: Sequence[str]) -> tuple[Figure, Axes]:
    """A figure with a row per name, the first on top."""
    picture = style.figure(ROW * len(names) + 0.95)
    axes = picture.subplots()
    axes.set_yticks(range(len(names)), list(names))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.grid(visible=False, axis="y")
    return picture, axes


def _name_ticks(axes: Axes, which: str, names: Sequence[str], what: str) -> None:
    """Every name up to 20, else every tenth."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    every = 1 if len(names) <= 20 else 10
    axis.set_ticks(range(0, len(names), every), list(names[::every]))
    if which == "x" and len(names) > 5:
        axis.set_tick_params(rotation=90)
    axis.set_label_text(what)
