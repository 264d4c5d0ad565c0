"""The contents of a report, read from a run's folder: every number is a `ReportFigure`, which names its lines of round_metrics.jsonl.

The headline of a group of clients is their mean accuracy on the newest line that evaluated them. Full and head-only devices are separate
groups, because their models come about differently. A gain over a baseline is over the clients with both values.

Accuracies have the names of `edge_fl.metrics`: "last" is the last line with the metric, the final personalisation's if it measured it;
"best_by_validation" is the round with the highest validation accuracy. No round is selected by its test accuracy.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, isnan

import msgspec
import numpy as np
from msgspec import Struct

from edge_fl import metrics
from edge_fl.console import units
from edge_fl.heads.wording import MeasuredAccuracy
from edge_fl.metrics import Summary
from edge_fl.wire.egress import Egress
from edge_fl_lab import recipe_changes
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.runs import round_metrics, summaries
from edge_fl_server.runs.results import Results, RunManifest, data_name
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
    metrics.FLEET: "the fleet's head alone",
}
"""In the order in which a verdict names them."""
PREVIOUS_HEADS = "the heads on the previous release"
"""`PERSONAL_BEFORE` of head-only devices."""
NO_BASELINE = "Neither training alone nor the shared model was measured, so this does not show what personalised training gains."
ENDS = {"failed": "failed", "stopped": "was stopped", "budget_exhausted": "used up its privacy budget"}


TRAFFIC = {"bytes_down": "traffic_down", "bytes_up": "traffic_up"}
"""What devices received and sent, as they count it: payloads of releases, models, updates, reports and sums of statistics."""
TENSORS = {"bytes_down": "tensors_down", "bytes_up": "tensors_up"}
"""The tensors that simulated clients would receive and send."""
DEVICES = "devices.csv"


class ReportFigure(Struct, frozen=True):
    """A number and where it comes from: `field` of `metric` on `lines` of round_metrics.jsonl, "7", or "1,2,3" for a sum over lines.

    `lines` is "devices.csv" for a sum over that file.
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

    @property
    def texts(self) -> tuple[str, str]:
        """The difference and its interval: "+2.1 points", "+0.7 to +3.5"; a dash for the interval of one client."""
        mean, *ends = units.difference(self.difference.value, self.low.value, self.high.value)
        return f"{mean} points", units.NOTHING if units.NOTHING in ends else " to ".join(ends)


class ClientAccuracy(Struct, frozen=True):
    """A client's accuracy, its test samples, and its training samples if known.

    interval: the 90 % interval of an accuracy on few test samples, else "". fleet: the accuracy of the fleet's head on the same
    ones, if it was measured.
    """

    accuracy: ReportFigure
    test_samples: ReportFigure
    samples: int | None
    interval: str
    fleet: ReportFigure | None


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


SHOWN_ELSEWHERE = ("name", "method.name", "data.dataset", "data.data_dir", "broker.port")
"""Settings that are in the heading, or belong to the machine."""
FIELDS = ("mean", "weighted_mean", "std", "bottom_decile", "clients")

Points = tuple[tuple[int, ReportFigure, ReportFigure, ReportFigure], ...]
"""(round or labels per class, mean over clients, std over clients, number of clients), ascending."""


class Accuracy(Struct, frozen=True):
    """One row of the accuracy table."""

    metric: str
    which: str
    round: int
    figures: tuple[ReportFigure, ...]


class ChangedSetting(Struct, frozen=True):
    """A setting of the run that is not the default."""

    value: str
    default: str


class WorseRound(Struct, frozen=True):
    """A round that made devices worse: what the round gate did with it, why, and whom it named."""

    round: int
    line: int
    outcome: str
    why: str
    named: str


class SentBytes(Struct, frozen=True):
    """What a device sent in this run: all bytes, and those for sums of class statistics."""

    device: str
    bytes_up: int
    statistics_bytes: int


class RunReport(Struct, frozen=True):
    """The contents of a report.

    `egress`: the kinds of messages that devices may send, with their content; `sent`: what each has sent; `kept`: the parts that stay
    on the client.
    """

    run: str
    created: str
    state: str
    reason: str
    source: str
    method: str
    dataset: str
    verdict: str
    groups: tuple[ClientGroup, ...]
    worse: tuple[WorseRound, ...]
    changed: dict[str, ChangedSetting]
    settings: dict[str, str]
    egress: dict[str, str]
    sent: tuple[SentBytes, ...]
    kept: str
    accuracy: tuple[Accuracy, ...]
    curves: dict[str, Points]
    labels: dict[str, Points]
    bytes_by_round: dict[int, float]
    totals: dict[str, ReportFigure]
    versions: dict[str, str]


def of_run(results: Results, egress: Sequence[Egress], personal: Sequence[str]) -> RunReport:
    """The report of a run with its method's egress manifests and personal parts. Raises InputError for an invalid folder."""
    manifest, state, recipe = results.manifest(), results.state(), results.recipe()
    lines = round_metrics.latest(round_metrics.lines(results.path / round_metrics.FILE))
    groups = groups_of(lines, results.devices())
    settings, defaults = map(_settings, (recipe, Recipe()))
    return RunReport(
        run=manifest.run,
        created=manifest.created,
        state=state.state,
        reason=state.reason,
        source=manifest.source,
        method=recipe.method.name,
        dataset=data_name(recipe),
        verdict=verdict(recipe.method.name, state.state, results.reached, groups),
        groups=groups,
        worse=_worse(lines),
        changed={
            name: ChangedSetting(settings.get(name, "none"), defaults.get(name, "none"))
            for name in {**settings, **defaults}
            if settings.get(name) != defaults.get(name) and name not in SHOWN_ELSEWHERE
        },
        settings=settings,
        egress=messages(manifest.source, egress) | _sum(results),
        sent=_sent(results),
        kept=", ".join(personal) or "none: the method keeps no part on the client",
        accuracy=_accuracy(lines),
        curves=_curves(lines),
        labels=_by_labels(lines),
        bytes_by_round=_bytes_by_round(lines),
        totals=_totals(lines, results.devices()),
        versions=_versions(manifest),
    )


def groups_of(lines: Sequence[RoundLine], devices: Sequence[Mapping[str, str]]) -> tuple[ClientGroup, ...]:
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
    """One sentence: the client with the lowest accuracy, and of how many test samples; "" if nothing was measured."""
    devices = {name: device for group in groups for name, device in group.devices.items()}
    if not devices:
        return ""
    name = min(devices, key=lambda client: devices[client].accuracy.value or 0.0)
    tested = devices[name].test_samples.value
    images = f" of {tested:.0f} test samples" if tested else ""
    return f"Lowest: {name}, {units.percent(devices[name].accuracy.value)}{images}."


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
                    _of_client(line, client, metric),
                    _of_client(line, client, metrics.TEST_SAMPLES),
                    samples.get(client),
                    MeasuredAccuracy.of_report(
                        {**line.clients[client], metrics.PERSONAL_AFTER: values[client]}
                    ).range,
                    _of_client(line, client, metrics.FLEET)
                    if metrics.FLEET in line.clients[client]
                    else None,
                )
                for client in sorted(values)
            },
            tuple(sorted(values, key=lambda client: (values[client], client))[:WORST]),
        )
    return None


def _of_client(line: RoundLine, client: str, metric: str) -> ReportFigure:
    return ReportFigure(line.clients[client].get(metric), str(line.line), "value", metric, client)


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
    points, *ends = units.difference(mean, low, high)
    if low is None or high is None:
        return f"{points} points compared with {over} ({n})"
    interval = f"95 % CI {' to '.join(ends)}"
    if low <= 0 <= high:
        return f"not clearly different from {over} ({points} points, {interval}, {n})"
    return f"{points} points compared with {over} ({interval}, {n})"


def _worse(lines: Sequence[RoundLine]) -> tuple[WorseRound, ...]:
    return tuple(
        WorseRound(line.round, line.line, verdict.outcome, str(verdict), ", ".join(sorted(verdict.named)))
        for line in lines
        if (verdict := line.verdict) and verdict.outcome != "accepted"
    )


def _versions(manifest: RunManifest) -> dict[str, str]:
    origin = manifest.provenance
    versions = {
        "edge-fl": origin.edge_fl,
        "Python": origin.python,
        "machine": origin.machine,
        **origin.libraries,
    }
    if origin.commit:
        versions["commit"] = origin.commit.sha[:12] + (", with changes" if origin.commit.dirty else "")
    versions |= {"data": manifest.data_hash, "engine": manifest.engine}
    if manifest.engine_timing:
        versions["choice of the engine"] = str(manifest.engine_timing)
    return {name: version for name, version in versions.items() if version}


def _settings(recipe: Recipe) -> dict[str, str]:
    """The settings that have a value, as text."""
    every = recipe_changes.flat(msgspec.to_builtins(recipe))
    return {name: str(value) for name, value in every.items() if value not in ("", None)}


def _accuracy(lines: Sequence[RoundLine]) -> tuple[Accuracy, ...]:
    rows = [
        _row(name, metrics.LAST, next(line for line in reversed(lines) if name in line.metrics))
        for name in dict.fromkeys(name for line in lines for name in line.metrics)
        if "_acc" in name and not metrics.by_labels({name: name})
    ]
    place = summaries.best_by_validation([line.metrics for line in lines])
    if place is not None:
        best = lines[place]
        rows += [_row(name, metrics.BEST_BY_VALIDATION, best) for name in best.metrics if "test" in name]
    return tuple(rows)


def _row(name: str, which: str, line: RoundLine) -> Accuracy:
    summary = line.metrics[name]
    figures = tuple(_figure(summary, line, field, name) for field in FIELDS)
    return Accuracy(name, which, line.round, figures)


def _figure(summary: Summary, line: RoundLine, field: str, metric: str) -> ReportFigure:
    value = getattr(summary, field)
    return ReportFigure(value if isfinite(value) else None, str(line.line), field, metric)


def _curves(lines: Sequence[RoundLine]) -> dict[str, Points]:
    names = dict.fromkeys(
        name for line in lines for name in line.metrics if "test_acc" in name and not line.final
    )
    return {
        name: tuple(
            _point(line.round, line, name) for line in lines if not line.final and name in line.metrics
        )
        for name in names
    }


def _by_labels(lines: Sequence[RoundLine]) -> dict[str, Points]:
    """Accuracy by labels per class for each kind of head, as devices whose head is `auto` measured it last."""
    for line in reversed(lines):
        if curves := metrics.by_labels({name: name for name in line.metrics}):
            return {
                kind: tuple(_point(labels, line, name) for labels, name in sorted(names.items()))
                for kind, names in curves.items()
            }
    return {}


def _point(at: int, line: RoundLine, metric: str) -> tuple[int, ReportFigure, ReportFigure, ReportFigure]:
    mean, std, clients = (
        _figure(line.metrics[metric], line, field, metric) for field in ("mean", "std", "clients")
    )
    return at, mean, std, clients


def _bytes_by_round(lines: Sequence[RoundLine]) -> dict[int, float]:
    """Bytes to and from a client that takes part in every round, until the end of each."""
    found, so_far = {}, 0.0
    for line in lines:
        if not line.final:
            so_far += (line.bytes_down + line.bytes_up) / max(len(line.responded), 1)
            found[line.round] = so_far
    return found


def _totals(lines: Sequence[RoundLine], devices: Sequence[Mapping[str, str]]) -> dict[str, ReportFigure]:
    rounds = [line for line in lines if not line.final]
    numbers = ",".join(str(line.line) for line in rounds)
    totals = {"rounds": ReportFigure(len(rounds), numbers, "round")}
    of_devices = [row for row in devices if row["tier"] != "simulated"]
    for field, name in {"seconds": "seconds", **({} if of_devices else TENSORS)}.items():
        values = [value for line in rounds if (value := getattr(line, field)) is not None]
        if values:
            totals[name] = ReportFigure(sum(values), numbers, field)
    for field, name in TRAFFIC.items() if of_devices else ():
        totals[name] = ReportFigure(sum(int(row[field]) for row in of_devices), DEVICES, field)
    for field in ("selected", "responded"):
        totals[field] = ReportFigure(sum(len(getattr(line, field)) for line in rounds), numbers, field)
    for line in reversed(lines):
        if spent := [
            report[metrics.EPSILON] for report in line.clients.values() if metrics.EPSILON in report
        ]:
            return {
                **totals,
                "largest_epsilon": ReportFigure(max(spent), str(line.line), "max", metrics.EPSILON),
            }
    return totals


def _sent(results: Results) -> tuple[SentBytes, ...]:
    """What each device sent; empty for simulated clients."""
    return tuple(
        SentBytes(row["device"], int(row["bytes_up"]), int(row.get("statistics_bytes", 0)))
        for row in results.devices()
        if row["tier"] != "simulated"
    )


def messages(source: str, egress: Sequence[Egress]) -> dict[str, str]:
    """The messages that the egress manifest of each tier allows, with their content; none for simulated clients."""
    if source == "simulated":
        return {}
    tensors = {
        f"{kind} report of {one.tier} devices": f"tensors of: {', '.join(names) or 'nothing'}"
        for one in egress
        for kind, names in one.parts.items()
    }
    encoding = {f"encoding of {one.tier} devices": _encoding(one) for one in egress if one.tier == "full"}
    sums = {
        f"vectors of {one.tier} devices for sums of {subject}": ", ".join(content)
        for one in egress
        for subject, content in one.sums.items()
    }
    others = {kind: ", ".join(fields) for one in egress for kind, fields in one.messages.items()}
    numbers = dict.fromkeys(number for one in egress for number in one.numbers)
    return {**tensors, **encoding, **sums, **others, "numbers in a report": ", ".join(numbers)}


def _sum(results: Results) -> dict[str, str]:
    """The sum of class statistics that was completed, if any."""
    if (found := results.sum()) is None:
        return {}
    form = "masked: the server knows the sum alone" if found.masked else "plain: the server saw each device's"
    noise = f"; epsilon {found.epsilon:.3g}" if found.epsilon else ""
    content = f"{found.pictures} samples of {len(found.devices)} devices, {found.bytes_each} bytes of each; {form}{noise}"
    return {f"sum of class statistics on release {found.release}": content}


def _encoding(egress: Egress) -> str:
    """Compression and noise of the parts that a tier sends."""
    compression, privacy = egress.compression, egress.privacy
    share = f" of {compression.keep:g} of the values" if compression.kind == "topk" else ""
    if not privacy.noise_multiplier:
        return f"compression {compression.kind}{share}; no noise"
    budget = f"epsilon {privacy.budget:g}" if privacy.budget else "no limit"
    return (
        f"compression {compression.kind}{share}; clipped to {privacy.clip:g}, noise multiplier"
        f" {privacy.noise_multiplier:g}, budget per device {budget} at delta {privacy.delta:g}"
    )
