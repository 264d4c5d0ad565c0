"""The contents of a report, read from a run's folder: every number is a `ReportFigure`, which names its lines of round_metrics.jsonl.

The headline of a group of clients is their mean accuracy on the newest line that evaluated them; gains are paired (`gains`).

Accuracies have the names of `edge_fl.metrics`: "last" is the last line with the metric, the final personalisation's if it measured it;
"best_by_validation" is the round with the highest validation accuracy. No round is selected by its test accuracy.
"""

from collections.abc import Sequence
from math import isfinite

import msgspec
from msgspec import Struct

from edge_fl import metrics
from edge_fl.metrics import Summary
from edge_fl.wire.egress import Egress
from edge_fl_lab import recipe_changes
from edge_fl_lab.report import gains
from edge_fl_lab.report.gains import ClientGroup, ReportFigure
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.runs import round_metrics, summaries
from edge_fl_server.runs.results import Results, RunManifest, data_name
from edge_fl_server.runs.round_metrics import RoundLine

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


class SentMessage(Struct, frozen=True):
    """A kind of message that devices send, and its content."""

    message: str
    content: str


class SentBytes(Struct, frozen=True):
    """What a device sent in this run: all bytes, and those for sums of class statistics."""

    device: str
    bytes_up: int
    statistics_bytes: int


class RunReport(Struct, frozen=True):
    """The contents of a report. `egress`: what devices may send; `sent`: what each has sent; `kept`: the parts that stay on the client."""

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
    egress: tuple[SentMessage, ...]
    sent: tuple[SentBytes, ...]
    kept: str
    accuracy: tuple[Accuracy, ...]
    curves: dict[str, Points]
    labels: dict[str, Points]
    bytes_by_round: dict[int, float]
    totals: dict[str, ReportFigure]
    versions: dict[str, str]


def _worse(lines: Sequence[RoundLine]) -> tuple[WorseRound, ...]:
    return tuple(
        WorseRound(line.round, line.line, verdict.outcome, str(verdict), ", ".join(sorted(verdict.named)))
        for line in lines
        if (verdict := line.verdict) and verdict.outcome != "accepted"
    )


def of_run(results: Results, egress: Sequence[Egress], personal: Sequence[str]) -> RunReport:
    """The report of a run with its method's egress manifests and personal parts. Raises InputError for an invalid folder."""
    manifest, state, recipe = results.manifest(), results.state(), results.recipe()
    lines = round_metrics.latest(round_metrics.lines(results.path / round_metrics.FILE))
    groups = gains.of_lines(lines, results.devices())
    settings, defaults = map(_settings, (recipe, Recipe()))
    return RunReport(
        run=manifest.run,
        created=manifest.created,
        state=state.state,
        reason=state.reason,
        source=manifest.source,
        method=recipe.method.name,
        dataset=data_name(recipe),
        verdict=gains.verdict(recipe.method.name, state.state, results.reached, groups),
        groups=groups,
        worse=_worse(lines),
        changed={
            name: ChangedSetting(settings.get(name, "none"), defaults.get(name, "none"))
            for name in {**settings, **defaults}
            if settings.get(name) != defaults.get(name) and name not in SHOWN_ELSEWHERE
        },
        settings=settings,
        egress=(*messages(manifest.source, egress), *sums(results)),
        sent=by_device(results),
        kept=", ".join(personal) or "none: the method keeps no part on the client",
        accuracy=_accuracy(lines),
        curves=_curves(lines),
        labels=_by_labels(lines),
        bytes_by_round=_bytes_by_round(lines),
        totals=_totals(lines),
        versions=_versions(manifest),
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


def _totals(lines: Sequence[RoundLine]) -> dict[str, ReportFigure]:
    rounds = [line for line in lines if not line.final]
    numbers = ",".join(str(line.line) for line in rounds)
    totals = {"rounds": ReportFigure(len(rounds), numbers, "round")}
    for field in ("seconds", "bytes_down", "bytes_up"):
        values = [value for line in rounds if (value := getattr(line, field)) is not None]
        if values:
            totals[field] = ReportFigure(sum(values), numbers, field)
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


def by_device(results: Results) -> tuple[SentBytes, ...]:
    """What each device sent; empty for simulated clients."""
    return tuple(
        SentBytes(row["device"], int(row["bytes_up"]), int(row.get("statistics_bytes", 0)))
        for row in results.devices()
        if row["tier"] != "simulated"
    )


def messages(source: str, egress: Sequence[Egress]) -> tuple[SentMessage, ...]:
    """The messages that the egress manifest of each tier allows; none for simulated clients."""
    if source == "simulated":
        return ()
    parts = (
        SentMessage(f"{kind} report of {one.tier} devices", f"tensors of: {', '.join(names) or 'nothing'}")
        for one in egress
        for kind, names in one.parts.items()
    )
    encoding = (
        SentMessage(f"encoding of {one.tier} devices", _encoding(one)) for one in egress if one.tier == "full"
    )
    sums = (
        SentMessage(f"vectors of {one.tier} devices for sums of {subject}", ", ".join(content))
        for one in egress
        for subject, content in one.sums.items()
    )
    messages = {kind: ", ".join(fields) for one in egress for kind, fields in one.messages.items()}
    numbers = dict.fromkeys(number for one in egress for number in one.numbers)
    return (
        *parts,
        *encoding,
        *sums,
        *(SentMessage(*one) for one in messages.items()),
        SentMessage("numbers in a report", ", ".join(numbers)),
    )


def sums(results: Results) -> tuple[SentMessage, ...]:
    """The sum of class statistics that was completed, if any."""
    if (found := results.sum()) is None:
        return ()
    form = "masked: the server knows the sum alone" if found.masked else "plain: the server saw each device's"
    noise = f"; epsilon {found.epsilon:.3g}" if found.epsilon else ""
    content = f"{found.pictures} pictures of {len(found.devices)} devices, {found.bytes_each} bytes of each; {form}{noise}"
    return (SentMessage(f"sum of class statistics on release {found.release}", content),)


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
