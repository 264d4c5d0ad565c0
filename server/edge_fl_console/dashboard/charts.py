"""The pages' charts as ECharts options. Colours are variables of the style sheet, so that charts follow the page's theme."""

import json
from collections.abc import Mapping, Sequence
from math import ceil, floor, isfinite, sqrt
from statistics import median_low
from typing import Any

from msgspec import Struct

COLOURS = 6
ONE_DECIMAL = "(p) => p.value.toFixed(1)"
AT_A_TIME = (
    "(points) => [new Date(points[0].value[0]).toISOString().slice(0, 16).replace('T', ' ') + ' UTC',"
    " ...points.filter((one) => one.value[1] !== null).map((one) => one.value[2])].join('<br>')"
)
FEW_POINTS = 40  # up to which each is a dot
LARGEST_DOT, SMALLEST_DOT = 20.0, 2.4  # pixels
MOST_USUAL = 10
LABELLED = 12  # bars that have room for their numbers on a phone
LEAST_RANGE = 5  # points of an axis of accuracies
QUIET = {"color": "var(--quiet)", "fontSize": 11}
SCALE = {
    "type": "value",
    "axisLabel": QUIET,
    "splitLine": {"lineStyle": {"color": "var(--line)"}},
}
AXIS = {
    "type": "category",
    "axisLabel": {**QUIET, "lineHeight": 14},
    "axisLine": {"lineStyle": {"color": "var(--line)"}},
    "axisTick": {"show": False},
}
BASE: dict[str, Any] = {
    "animation": False,
    "aria": {"enabled": True},
    "textStyle": {"fontFamily": "system-ui, sans-serif"},
    "grid": {"left": 4, "right": 48, "top": 12, "bottom": 4, "containLabel": True},
    "tooltip": {
        "backgroundColor": "var(--sheet)",
        "borderColor": "var(--line)",
        "textStyle": {"color": "var(--ink)", "fontSize": 12},
    },
}


class Chart(Struct, frozen=True):
    """ECharts options, the height in pixels, a CSS rule for the width where it is not the page's, and a legend as markup.

    No series changes under the mouse: ECharts cannot calculate a lighter colour from a CSS variable, and would hide what it is over.
    """

    options: dict[str, Any]
    height: int
    width: str = ""
    legend: str = ""

    def __post_init__(self) -> None:
        for series in self.options["series"]:
            series["emphasis"] = {"disabled": True}


class ChartCurve(Struct, frozen=True):
    """Accuracy 0..1 by place on the x axis, with the std over clients where there is one, and their number.

    The points `few` are drawn hollow and without a line: their clients are not comparable with those of the others.
    """

    name: str
    mean: Mapping[int, float]
    std: Mapping[int, float] = {}
    dashed: bool = False
    clients: Mapping[int, int] = {}
    few: frozenset[int] = frozenset()


def lines(
    curves: Sequence[ChartCurve], step: str, height: int = 260, names: Mapping[int, str] = {}
) -> Chart | None:
    """Accuracy in per cent by `step`: a line per curve, with a band of one std. Places have their number, or one of `names`, as label."""
    shown = [curve for curve in curves if any(map(isfinite, curve.mean.values()))]
    if not shown:
        return None
    places = sorted({place for curve in shown for place in curve.mean})
    series: list[dict[str, Any]] = []
    ends: set[tuple[int, float]] = set()
    for number, curve in enumerate(shown):
        colour = f"var(--s{number % COLOURS})"
        mean_of = {x: mean for x, mean in curve.mean.items() if x not in curve.few}
        end = max(((x, round(100 * mean, 1)) for x, mean in mean_of.items() if isfinite(mean)), default=None)
        label = end is not None and end not in ends  # one label for equal ends, which would overprint
        ends |= {end} if end else set()
        if curve.std:
            low = {x: max(mean - curve.std.get(x, 0.0), 0.0) for x, mean in mean_of.items()}
            high = {x: min(mean + curve.std.get(x, 0.0), 1.0) for x, mean in mean_of.items()}
            band = {"type": "line", "stack": f"band {number}", "symbol": "none", "silent": True}
            band |= {"connectNulls": True, "lineStyle": {"opacity": 0}}
            series.append({**band, "id": f"low {number}", "data": _percent(low, places)})
            width = {x: high[x] - low[x] for x in low}
            area = {"areaStyle": {"color": colour, "opacity": 0.13}}
            series.append({**band, **area, "id": f"band {number}", "data": _percent(width, places)})
        series.append(
            {
                "type": "line",
                "id": str(number),
                "name": curve.name,
                "data": _percent(mean_of, places),
                "connectNulls": True,
                "symbol": "circle",
                "symbolSize": 5,
                "showAllSymbol": True,
                "itemStyle": {"color": colour},
                "lineStyle": {"color": colour, "width": 1.6, "type": "dashed" if curve.dashed else "solid"},
                "endLabel": {"show": label, ":formatter": ONE_DECIMAL, "color": "var(--ink)", "fontSize": 12},
                "labelLayout": {"moveOverlap": "shiftY"},
            }
        )
        if curve.few:
            apart = _percent({x: curve.mean[x] for x in curve.few}, places)
            hollow = {
                "symbol": "emptyCircle",
                "symbolSize": 5,
                "itemStyle": {"color": colour, "opacity": 0.5},
            }
            series.append(
                {"type": "scatter", "id": f"few {number}", "name": curve.name, "data": apart, **hollow}
            )
    legend = {"left": 0, "top": 0, "textStyle": QUIET, "data": [curve.name for curve in shown]}
    wide = {"legend": {"orient": "horizontal"}, "grid": {"top": 38}}
    narrow = {"legend": {"orient": "vertical"}, "grid": {"top": 16 + 22 * len(shown)}}
    options = {
        **BASE,
        "grid": {**BASE["grid"], "left": 16 if names else 4},  # half a name is left of the axis
        "legend": legend,
        "tooltip": {**BASE["tooltip"], **_hint(shown, places, step)},
        "xAxis": {
            **AXIS,
            "boundaryGap": False,
            "data": [names.get(place) or _place(shown, place) for place in places],
        },
        "yAxis": {**SCALE, **_range(shown)},
        "series": series,
        "media": [{"query": {"maxWidth": 560}, "option": narrow}, {"option": wide}],
    }
    return Chart(options, height)


class TimeCurve(Struct, frozen=True):
    """Values by time, in seconds since 1970, each with the text of its point; None: a gap. `steps`: constant between points."""

    name: str
    points: Sequence[tuple[int, float | None, str]]
    dashed: bool = False
    steps: bool = False


def times(curves: Sequence[TimeCurve], unit: str, *, least: float | None = None) -> Chart | None:
    """Values of this unit over time (UTC), a line per curve; the axis begins at `least`, by default near the lowest value."""
    shown = [one for one in curves if any(value is not None for _, value, _ in one.points)]
    if not shown:
        return None
    series = [
        {
            "type": "line",
            "id": str(number),
            "name": one.name,
            "data": [[1000 * at_s, value, text] for at_s, value, text in one.points],
            "step": "end" if one.steps else False,
            "connectNulls": False,
            "symbol": "circle",
            "symbolSize": 4,
            "showSymbol": len(one.points) < FEW_POINTS,
            "itemStyle": {"color": f"var(--s{number % COLOURS})"},
            "lineStyle": {
                "color": f"var(--s{number % COLOURS})",
                "width": 1.6,
                "type": "dashed" if one.dashed else "solid",
            },
        }
        for number, one in enumerate(shown)
    ]
    values = [value for one in shown for _, value, _ in one.points if value is not None]
    low, high = (10 * floor(min(values) / 10) if least is None else least), 10 * ceil(max(values) / 10)
    legend = {"left": 0, "top": 0, "textStyle": QUIET, "data": [one.name for one in shown]}
    wide = {"legend": {"orient": "horizontal"}, "grid": {"top": 56}}
    narrow = {"legend": {"orient": "vertical"}, "grid": {"top": 38 + 22 * len(shown)}}
    label = {**QUIET, "hideOverlap": True}
    options = {
        **BASE,
        "useUTC": True,
        "grid": {**BASE["grid"], "left": 8, "right": 16, "bottom": 22},
        "legend": legend,
        "tooltip": {**BASE["tooltip"], "trigger": "axis", ":formatter": AT_A_TIME},
        "xAxis": {
            "type": "time",
            "name": "UTC",
            "nameLocation": "middle",
            "nameGap": 26,
            "nameTextStyle": QUIET,
            "axisLabel": label,
            "axisLine": AXIS["axisLine"],
            "axisTick": {"show": True, "lineStyle": {"color": "var(--line)"}},
        },
        "yAxis": {
            "type": "value",
            "name": unit,
            "nameTextStyle": {**QUIET, "align": "left"},
            "min": low,
            "max": max(high, low + 10),
            "minInterval": 1,
            "axisLabel": label,
            "splitLine": {"lineStyle": {"color": "var(--line)"}},
        },
        "series": series,
        "media": [{"query": {"maxWidth": 420}, "option": narrow}, {"option": wide}],
    }
    return Chart(options, 260)


def columns(counts: Sequence[int]) -> Chart | None:
    """Samples by class, with their numbers on up to LABELLED classes."""
    if not any(counts):
        return None
    bars = {
        "type": "bar",
        "data": [count or None for count in counts],
        "itemStyle": {"color": "var(--s0)"},
        "barWidth": "70%",
        "label": {"show": len(counts) <= LABELLED, "position": "top", **QUIET},
        "labelLayout": {"hideOverlap": True},
    }
    options = {
        **BASE,
        "grid": {**BASE["grid"], "top": 30, "bottom": 24, "right": 12},
        "tooltip": {**BASE["tooltip"], "formatter": "class {b}: {c} samples"},
        "xAxis": {
            **AXIS,
            **_named("class", "middle", 26),
            "data": [str(place) for place in range(len(counts))],
        },
        "yAxis": {**SCALE, **_named("samples", "end", 8), "minInterval": 1},
        "series": [bars],
    }
    return Chart(options, 180, f"width: {34 * len(counts) + 60}px; max-width: 100%")


def dots(counts: Mapping[str, Sequence[int]]) -> Chart | None:
    """A row per device and a column per class, the area of a dot the number of samples (RepPer, Figure 3, turned).

    The largest dot stands for MOST_USUAL times what is usual among the devices, or more, so that none makes those of all others tiny.
    """
    classes = max(map(len, counts.values()), default=0)
    tops = [top for row in counts.values() if (top := max(row, default=0))]
    if not tops:
        return None
    most = max(tops)
    largest = min(most, MOST_USUAL * median_low(tops))

    column = max(min(44, 1100 / classes), 11)  # pixels

    def size(count: int) -> float:
        return round(max(min(LARGEST_DOT, column) * sqrt(min(count / largest, 1)), SMALLEST_DOT), 1)

    points = [
        {
            "name": f"{device}, class {label}: {count:,} samples",
            "device": device,
            "value": [label, place],
            "symbolSize": size(count),
        }
        for place, (device, row) in enumerate(counts.items())
        for label, count in enumerate(row)
        if count
    ]
    names = {"interval": 0, "fontSize": 11, "color": "var(--accent)"}
    labels = {**AXIS, **_named("class", "middle", 26), "data": [str(label) for label in range(classes)]}
    options = {
        **BASE,
        "grid": {**BASE["grid"], "top": 46, "bottom": 24, "right": 16},
        "tooltip": {**BASE["tooltip"], "formatter": "{b}"},
        "xAxis": {**labels, "position": "top"},
        "yAxis": {
            **AXIS,
            **_named("device", "end", 8),
            "data": list(counts),
            "axisLabel": names,
            "inverse": True,
            "triggerEvent": True,
        },
        "series": [{"type": "scatter", "data": points, "itemStyle": {"color": "var(--s0)"}}],
    }
    shown = sorted({max(round(largest / part), 1) for part in (10, 3, 1)})
    keys = "".join(
        f'<li><i style="width:{size(count)}px;height:{size(count)}px"></i>{count:,}{" or more" if count == largest < most else ""}</li>'
        for count in shown
    )
    legend = f'<ul class="legend"><li>Samples of a class on a device, by the area of the dot:</li>{keys}</ul>'
    name = max(map(len, counts))
    edges = 7 * name + 30
    width = f"max-width: {column * classes + edges:.0f}px; min-width: {11 * classes + edges}px"
    return Chart(options, 22 * len(counts) + 80, width, legend)


def _named(name: str, where: str, gap: int) -> dict[str, Any]:
    """The name of an axis: at its "start", "middle" or "end", `gap` pixels from it."""
    return {"name": name, "nameLocation": where, "nameGap": gap, "nameTextStyle": QUIET}


def _place(curves: Sequence[ChartCurve], place: int) -> str:
    """The label of a place, with the numbers of clients behind its points."""
    clients = sorted({n for curve in curves if (n := curve.clients.get(place))})
    if not clients:
        return str(place)
    return f"{place}\nn = {clients[0]}" + (f" to {clients[-1]}" if len(clients) > 1 else "")


def _hint(curves: Sequence[ChartCurve], places: Sequence[int], step: str) -> dict[str, str]:
    """The text at a point: its curve, place and value, and its own number of clients where it is known."""
    if not any(curve.clients for curve in curves):
        return {
            "formatter": f"{{a}}, {step} {{b}}: {{c}} %"
        }  # escaped by ECharts, unlike the result of a function
    clients = {curve.name: [curve.clients.get(place) for place in places] for curve in curves}
    shown = f"${{p.seriesName}}, {step} ${{parseInt(p.name)}}: ${{p.value.toFixed(1)}} %"
    return {
        ":formatter": f"(p) => `{shown} (n = ${{{json.dumps(clients)}[p.seriesName][p.dataIndex] || '?'}})`"
    }


def _range(curves: Sequence[ChartCurve]) -> dict[str, float]:
    """The ends of the axis in per cent and its steps: around all points and bands, within 0 to 100, each end a whole number of steps."""
    points = [(mean, curve.std.get(x, 0.0)) for curve in curves for x, mean in curve.mean.items()]
    known = [(mean, std if isfinite(std) else 0.0) for mean, std in points if isfinite(mean)]
    low = 100 * max(min(mean - std for mean, std in known), 0.0)
    high = 100 * min(max(mean + std for mean, std in known), 1.0)
    step = next((step for step in (1, 2, 5, 10) if high - low <= 6 * step), 20)
    least = max(step, LEAST_RANGE)
    low = min(step * floor(round(low, 6) / step), 100 - least)
    return {"min": low, "max": max(step * ceil(round(high, 6) / step), low + least), "interval": step}


def _percent(values: Mapping[int, float], places: Sequence[int]) -> list[float | None]:
    chosen = [values.get(place) for place in places]
    return [None if value is None or not isfinite(value) else round(100 * value, 1) for value in chosen]
