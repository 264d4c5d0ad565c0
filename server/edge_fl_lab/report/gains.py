"""The headline of a run by group of clients, what it gains over its baselines, and the sentence that says so.

Full and head-only devices are separate groups, because their models come about differently. A gain is over the clients with both values.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, isnan

import numpy as np
from msgspec import Struct

from edge_fl import metrics
from edge_fl.console import units
from edge_fl_server.runs import summaries
from edge_fl_server.runs.round_metrics import RoundLine
from edge_fl_server.runs.summaries import Paired

WORST = 5
"""Devices listed of each group."""
HEADLINES = (metrics.PERSONAL_AFTER, metrics.PERSONAL_BEFORE, metrics.GLOBAL_TEST)
"""A group's accuracy is the first of these that enough of its clients measured."""
GROUPS = {
    "simulated": "simulated clients",
    "full": "full devices",
    "head": "head-only devices",
    "unknown": "unknown devices",
}
"""By tier in devices.csv."""
ALL = "clients"
BASELINES = {
    metrics.LOCAL_ONLY: "training on the client's own data alone",
    metrics.GLOBAL_TEST: "the shared model",
    metrics.PERSONAL_BEFORE: "the same models before the final personalisation",
}
"""In the order in which a verdict names them."""
PREVIOUS_HEADS = "the heads on the previous release"
"""`PERSONAL_BEFORE` of head-only devices."""
NO_BASELINE = "Neither training alone nor the shared model was measured, so this does not show what personalised training gains."
ENDS = {"failed": "failed", "stopped": "was stopped", "budget_exhausted": "used up its privacy budget"}


class ReportFigure(Struct, frozen=True):
    """A number and where it comes from: `field` of `metric` on `lines` of round_metrics.jsonl, "7", or "1,2,3" for a sum over lines.

    With `against` it is over the clients of `group` that have both metrics, which paired differences are about.
    """

    value: float | int | None
    lines: str
    field: str
    metric: str = ""
    client: str = ""
    group: str = ""
    against: str = ""


class GroupGain(Struct, frozen=True):
    """The headline accuracy minus that of a baseline, paired; the ends of the 95 % interval are None for one client."""

    over: str
    baseline: ReportFigure
    accuracy: ReportFigure
    difference: ReportFigure
    low: ReportFigure
    high: ReportFigure
    n: ReportFigure


class ClientAccuracy(Struct, frozen=True):
    """A client's accuracy, its test samples, and its training samples if known."""

    accuracy: ReportFigure
    test_samples: ReportFigure
    samples: int | None


class ClientGroup(Struct, frozen=True):
    """Clients of one kind: their newest accuracy by `metric` with its mean, n and gains, and the lowest of them."""

    name: str
    metric: str
    round: int
    mean: ReportFigure
    n: ReportFigure
    gains: tuple[GroupGain, ...]
    devices: dict[str, ClientAccuracy]
    worst: tuple[str, ...]


def of_lines(lines: Sequence[RoundLine], devices: Sequence[Mapping[str, str]]) -> tuple[ClientGroup, ...]:
    """The groups that were evaluated; `devices` are the rows of devices.csv."""
    tiers = {row["device"]: row["tier"] for row in devices}
    samples = {row["device"]: int(row["samples"]) for row in devices}
    members: dict[str, set[str]] = {}
    for line in lines:
        for client in line.clients:
            members.setdefault(GROUPS.get(tiers.get(client, ""), ALL), set()).add(client)
    found = (
        _group(name, members[name], lines, samples) for name in (*GROUPS.values(), ALL) if name in members
    )
    return tuple(group for group in found if group)


def verdict(method: str, state: str, round: int, groups: Sequence[ClientGroup]) -> str:
    """One sentence: what the run reached, over how many clients, and what it gained."""
    end = f" The run {ENDS[state]} after round {round}." if state in ENDS else ""
    if not groups:
        return f"Nothing was measured.{end}"
    after = f" after round {round}" if state == "running" else ""
    alone = "" if has_baseline(groups) else f" {NO_BASELINE}"
    return f"{method} reaches {', and '.join(map(_reached, groups))}{after}.{alone}{end}"


def has_baseline(groups: Sequence[ClientGroup]) -> bool:
    """Whether training alone or the shared model was measured, too."""
    known = {BASELINES[metrics.LOCAL_ONLY], BASELINES[metrics.GLOBAL_TEST]}
    return any(
        group.metric == metrics.GLOBAL_TEST or any(gain.over in known for gain in group.gains)
        for group in groups
    )


def lowest(groups: Sequence[ClientGroup]) -> str:
    """One sentence: the client with the lowest accuracy, and of how many test images; "" if nothing was measured."""
    devices = {name: device for group in groups for name, device in group.devices.items()}
    if not devices:
        return ""
    name = min(devices, key=lambda client: devices[client].accuracy.value or 0.0)
    tested = devices[name].test_samples.value
    images = f" of {tested:.0f} test images" if tested else ""
    return f"Lowest: {name}, {units.percent(devices[name].accuracy.value)}{images}."


def interval_text(low: float | None, high: float | None) -> str:
    """Format an interval in percentage points: "+0.7 to +3.6"; a dash for one client."""
    if low is None or high is None:
        return units.NOTHING
    return f"{_signed(low)} to {_signed(high)}"


def counted(group: ClientGroup) -> str:
    """Format as "8 head-only devices"."""
    return f"{group.n.value} {group.name.removesuffix('s') if group.n.value == 1 else group.name}"


def _group(
    name: str, members: set[str], lines: Sequence[RoundLine], samples: Mapping[str, int]
) -> ClientGroup | None:
    for line in reversed(lines):
        found = {metric: _values(line, members, metric) for metric in HEADLINES}
        largest = max(map(len, found.values()))
        if not largest:
            continue
        metric = next(metric for metric in HEADLINES if summaries.is_enough(len(found[metric]), largest))
        values = found[metric]
        at = str(line.line)
        return ClientGroup(
            name,
            metric,
            line.round,
            ReportFigure(float(np.mean(list(values.values()))), at, "mean", metric, group=name),
            ReportFigure(len(values), at, "clients", metric, group=name),
            tuple(_gains(name, metric, values, line, members)),
            {
                client: ClientAccuracy(
                    ReportFigure(value, at, "value", metric, client),
                    ReportFigure(
                        line.clients[client].get(metrics.TEST_SAMPLES),
                        at,
                        "value",
                        metrics.TEST_SAMPLES,
                        client,
                    ),
                    samples.get(client),
                )
                for client, value in sorted(values.items())
            },
            tuple(sorted(values, key=lambda client: (values[client], client))[:WORST]),
        )
    return None


def _values(line: RoundLine, members: set[str], metric: str) -> dict[str, float]:
    return {
        client: report[metric]
        for client, report in line.clients.items()
        if client in members and isfinite(report.get(metric, float("nan")))
    }


def _gains(
    name: str, metric: str, after: Mapping[str, float], line: RoundLine, members: set[str]
) -> Iterator[GroupGain]:
    for against, meaning in BASELINES.items():
        before = {} if against == metric else _values(line, members, against)
        if (found := summaries.paired(before, after)) is None:
            continue
        heads = name == GROUPS["head"] and against == metrics.PERSONAL_BEFORE
        yield _gain(PREVIOUS_HEADS if heads else meaning, found, str(line.line), metric, name, against)


def _gain(over: str, found: Paired, at: str, metric: str, group: str, against: str) -> GroupGain:
    values = {
        "baseline": found.before,
        "accuracy": found.after,
        "difference": found.mean,
        "low": None if isnan(found.low) else found.low,
        "high": None if isnan(found.high) else found.high,
        "n": found.n,
    }
    return GroupGain(
        over,
        **{
            field: ReportFigure(value, at, f"paired.{field}", metric, group=group, against=against)
            for field, value in values.items()
        },
    )


def _reached(group: ClientGroup) -> str:
    text = f"a mean accuracy of {units.percent(group.mean.value)} over {counted(group)}"
    gain = next((gain for gain in group.gains if gain.difference.value or gain.low.value), None)
    if gain is None:
        return text
    n = f"n = {gain.n.value}"
    return f"{text}, {compared(gain.over, gain.difference.value, gain.low.value, gain.high.value, n)}"


def compared(over: str, mean: float | None, low: float | None, high: float | None, n: str) -> str:
    """Format a paired difference to a baseline with its interval (None for one client) and n."""
    points = units.points(mean)
    if low is None or high is None:
        return f"{points} compared with {over} ({n})"
    interval = f"95 % CI {interval_text(low, high)}"
    if low <= 0 <= high:
        return f"not clearly different from {over} ({points}, {interval}, {n})"
    return f"{points} compared with {over} ({interval}, {n})"


def _signed(difference: float) -> str:
    return units.points(difference).removesuffix(" points")
