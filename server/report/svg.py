"""Small pictures as SVG text, drawn from numbers alone: curves by round, dots per client and class, bars, a strip of devices.

They carry no colour of their own but classes (`s0`, `s1`, ...), so that one style sheet turns them light or dark. Every mark has a title,
and, where its caller says so, attributes that name where its number stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt

from server.report.formatting import escape, number, share

COLOURS = 6
WIDE, NARROW = 960, 340
"""Widths that charts are drawn at, one for a desk and one for a hand: a drawing that is scaled from one to the other cannot be read."""


@dataclass(frozen=True)
class Point:
    """One measured value (0..1) of a round, with the attributes that its mark gets."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    marks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Series:
    """A named curve."""

    name: str
    points: Sequence[Point]
    dashed: bool = False


def fitting(draw: Callable[[int], str]) -> str:
    """A chart at both widths; the style sheet shows the one that fits."""
    return f'<div class="fitting">{draw(WIDE)}{draw(NARROW)}</div>'


def curves(
    series: Sequence[Series], *, width: int = WIDE, height: int = 260, label: str = "", step: str = "round"
) -> str:
    """Accuracy (0..1) by round, a line per series and a band where its points have one; empty without any point."""
    shown = [one for one in series if one.points]
    if not shown:
        return ""
    left, right, top, bottom = 38, 12, 10, 24
    xs = [point.x for one in shown for point in one.points]
    ys = [y for one in shown for p in one.points for y in (p.y, p.low, p.high) if y is not None]
    x0, x1 = min(xs), max(max(xs), min(xs) + 1)
    y0, y1 = _bounds(ys)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (x - x0) / (x1 - x0) * (width - left - right),
            top + (y1 - min(max(y, y0), y1)) / (y1 - y0) * (height - top - bottom),
        )

    parts = [
        f'<svg class="{_chart(width)}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">',
        f"<title>{escape(label)}</title>",
    ]
    for tick in _ticks(y0, y1):
        _, y = at(x0, tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{left - 6}" y="{y + 3.5:.1f}" text-anchor="end">{100 * tick:g}</text>'
        )
    for round in _rounds(x0, x1, width // 75):
        x, _ = at(round, y0)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height - 7}" text-anchor="middle">{round}</text>')
    for place, one in enumerate(shown):
        style = f"s{place % COLOURS}"
        if band := [p for p in one.points if p.low is not None and p.high is not None]:
            upper = [at(p.x, p.high or 0.0) for p in band]
            lower = [at(p.x, p.low or 0.0) for p in reversed(band)]
            parts.append(f'<polygon class="band {style}" points="{_path([*upper, *lower])}"/>')
        dash = " dashed" if one.dashed else ""
        parts.append(
            f'<polyline class="line {style}{dash}" points="{_path([at(p.x, p.y) for p in one.points])}"/>'
        )
        for point in one.points:
            x, y = at(point.x, point.y)
            marks = "".join(f' data-{name}="{escape(value)}"' for name, value in point.marks.items())
            title = f"{one.name}, {step} {point.x:g}: {share(point.y, 2)} %"
            parts.append(
                f'<circle class="point {style}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"{marks}><title>{escape(title)}</title></circle>'
            )
    return "".join([*parts, "</svg>"])


def legend(series: Sequence[Series]) -> str:
    """What each colour of `curves` means, and where it ends."""
    shown = [one for one in series if one.points]
    items = "".join(
        f'<li><i class="key s{place % COLOURS}{" dashed" if one.dashed else ""}"></i>{escape(one.name)}'
        f" <b>{share(one.points[-1].y)}</b></li>"
        for place, one in enumerate(shown)
    )
    return f'<ul class="legend">{items}</ul>' if items else ""


def dots(
    counts: Mapping[str, Sequence[int]], classes: Sequence[str], link: str = "", largest: int = 0
) -> str:
    """A row per client, a column per class, a dot whose area is the number of samples (RepPer, Figure 3).

    A dot of `largest` samples is as large as a dot may be; by default that is the largest one here.
    """
    if not counts:
        return ""
    step, left, top = 22, 22 + 7 * min(max(map(len, counts)), 20), 26
    largest = largest or max((count for row in counts.values() for count in row), default=1) or 1
    width, height = left + step * len(classes) + 12, top + step * len(counts) + 8
    parts = [
        f'<svg class="dots" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
        ' aria-label="Samples per client and class">'
    ]
    for column, name in enumerate(classes):
        x = left + step * (column + 0.5)
        parts.append(f'<text class="tick" x="{x}" y="14" text-anchor="middle">{escape(name[:4])}</text>')
    for place, (client, row) in enumerate(counts.items()):
        y = top + step * (place + 0.5)
        shown = f"{escape(client[:20])}<title>{escape(client)}</title>"
        text = f'<text class="name" x="{left - 12}" y="{y + 4}" text-anchor="end">{shown}</text>'
        parts.append(
            f'<a href="{escape(link + client)}" data-key="dots-{escape(client)}">{text}</a>' if link else text
        )
        parts.append(f'<line class="grid" x1="{left}" x2="{width - 12}" y1="{y}" y2="{y}"/>')
        for column, count in enumerate(row):
            if count:
                radius = max(1.2, (step / 2 - 1) * sqrt(count / largest))
                title = f"{client}, class {classes[column] if column < len(classes) else column}: {count:,} samples"
                parts.append(
                    f'<circle class="s0" cx="{left + step * (column + 0.5)}" cy="{y}" r="{radius:.1f}">'
                    f"<title>{escape(title)}</title></circle>"
                )
    return "".join([*parts, "</svg>"])


def bars(counts: Sequence[int], *, width: int = 72, height: int = 14) -> str:
    """How a device's samples are spread over the classes, small enough for a cell of a table."""
    if not counts or not any(counts):
        return ""
    step, largest = width / len(counts), max(counts)
    drawn = "".join(
        f'<rect x="{place * step:.1f}" y="{height - max(1.0, count / largest * height):.1f}"'
        f' width="{max(step - 1, 0.6):.1f}" height="{max(1.0, count / largest * height):.1f}"/>'
        for place, count in enumerate(counts)
        if count
    )
    said = f"{sum(counts):,} samples in {sum(map(bool, counts))} of {len(counts)} classes"
    return (
        f'<svg class="bars" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
        f' aria-label="{said}"><title>{said}</title>{drawn}</svg>'
    )


def columns(counts: Sequence[int], *, height: int = 96) -> str:
    """A device's samples by class, with their numbers."""
    if not any(counts):
        return ""
    step, top, bottom = 34, 16, 18
    width, tall, largest = step * len(counts), height - top - bottom, max(counts)
    parts = [
        f'<svg class="columns" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="Samples by class">'
    ]
    for place, count in enumerate(counts):
        x, high = step * place, count / largest * tall
        y = top + tall - high
        label = f'<text x="{x + step / 2}" y="{y - 4:.1f}" text-anchor="middle">{number(count)}</text>'
        parts.append(
            f"{label if count else ''}"
            f'<rect class="s0" x="{x + 5}" y="{y:.1f}" width="{step - 10}" height="{high:.1f}"/>'
            f'<text class="tick" x="{x + step / 2}" y="{height - 4}" text-anchor="middle">{place}</text>'
        )
    line = height - bottom
    return "".join([*parts, f'<line class="grid" x1="0" x2="{width}" y1="{line}" y2="{line}"/></svg>'])


def spread(values: Mapping[str, float], *, width: int = WIDE, bins: int = 20) -> str:
    """How many devices have which accuracy (0..1), in bins; each bar names its devices."""
    found = {name: value for name, value in values.items() if isfinite(value)}
    if not found:
        return ""
    members: list[list[str]] = [[] for _ in range(bins)]
    for name, value in sorted(found.items()):
        members[min(int(min(max(value, 0.0), 1.0) * bins), bins - 1)].append(name)
    height, left, top, bottom = 130, 38, 10, 24
    step, largest = (width - left - 12) / bins, max(map(len, members))
    parts = [
        f'<svg class="{_chart(width)}" viewBox="0 0 {width} {height}" role="img" aria-label="Devices by accuracy">'
    ]
    for place, names in enumerate(members):
        tall = len(names) / largest * (height - top - bottom)
        x = left + place * step
        if names:
            some = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
            said = f"{100 * place / bins:g} to {100 * (place + 1) / bins:g} %: {number(len(names))} devices ({some})"
            parts.append(
                f'<rect class="s0" x="{x + 0.5:.1f}" y="{height - bottom - tall:.1f}" width="{step - 1:.1f}" height="{tall:.1f}">'
                f"<title>{escape(said)}</title></rect>"
            )
        if place % (2 if width == WIDE else 4) == 0:
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{height - 7}" text-anchor="middle">{100 * place // bins}</text>'
            )
    line = height - bottom
    parts.append(f'<line class="grid" x1="{left}" x2="{width - 12}" y1="{line}" y2="{line}"/>')
    parts.append(f'<text class="tick" x="{left - 6}" y="{top + 8}" text-anchor="end">{largest}</text>')
    return "".join([*parts, "</svg>"])


def _chart(width: int) -> str:
    return "chart" if width > NARROW else "chart narrow"


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """A range of whole tens of per cent around the values, within 0..1."""
    low = max(0.0, int(min(values) * 10) / 10)
    high = min(1.0, -int(-max(values) * 10 // 1) / 10) if max(values) < 1 else 1.0
    return (low, high) if high > low else (max(0.0, low - 0.1), min(1.0, low + 0.1))


def _ticks(low: float, high: float) -> list[float]:
    tens = round((high - low) * 10)
    every = 1 if tens <= 4 else 2
    return [round(low + 0.1 * n, 3) for n in range(0, tens + 1, every)]


def _rounds(first: float, last: float, at_most: int) -> list[int]:
    """Round numbers to name, evenly, with the first."""
    count = int(last) - int(first) + 1
    every = next((n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500) if count / n <= at_most), 1000)
    return [number for number in range(int(first), int(last) + 1) if (number - int(first)) % every == 0]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
