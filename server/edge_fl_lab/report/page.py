"""A `RunReport` as one HTML file without external references, as Markdown, and as JSON."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import edge_fl_server
from edge_fl import metrics
from edge_fl.console import tables, units
from edge_fl.console.tables import Table
from edge_fl.files import atomic
from edge_fl_lab.report import facts, plots, style
from edge_fl_lab.report.facts import Points, ReportFigure, RunReport
from edge_fl_lab.report.plots import Curve, Drawn
from edge_fl_server.runs.results import Results
from edge_fl_server.runs.summaries import LEAST_SHARE

SHOWN = {
    metrics.PERSONAL_BEFORE: "personal models",
    metrics.GLOBAL_TEST: "shared model",
    metrics.LOCAL_ONLY: "local training only",
    metrics.UNSEEN_TEST: "shared model, unseen clients",
}
"""Curves by round, and their names; the other metrics are in the table of values."""
FOLDER = Path(__file__).parent
STYLE = Path(edge_fl_server.__file__).with_name("style.css")  # the dashboard's too
NAME = "report.html"
SOURCES = {
    "simulated": "all clients were simulated on the server; no device took part",
    "fleet": "full devices trained on their own data; the server only aggregated",
    "none": "nothing was trained; head-only devices fitted heads on the extractor as it is",
    "hybrid": "full devices trained on their own data, together with clients simulated on the server",
}
TOTALS: dict[str, Callable[[float | int | None], str]] = {
    "rounds": units.number,
    "selected": units.number,
    "responded": units.number,
    "seconds": units.seconds,
    **dict.fromkeys((*facts.TRAFFIC.values(), *facts.TENSORS.values()), units.size),
    "largest_epsilon": lambda value: units.NOTHING if value is None else f"{value:.3g}",
}


def report(results: Results) -> RunReport:
    """Read the report of a run."""
    from edge_fl.methods.contract.tiers import of_method  # torch comes with it
    from edge_fl_lab import catalogue

    recipe = results.recipe()
    method = catalogue.sample(recipe.method.name)
    method = replace(method, compression=recipe.compression, privacy=recipe.privacy)
    personal = [part for part, spec in method.parts.items() if not spec.travels]
    return facts.of_run(results, of_method(method), personal)


def write(results: Results) -> Path:
    """Write the run's report.html and return its path. Raises RunError if it cannot be written."""
    return atomic.save(results.path / NAME, html(report(results)), style.UNCHANGED)


def html(content: RunReport) -> str:
    """The report as a self-contained page."""
    return (
        templates()
        .get_template("report.html.j2")
        .render(
            report=content,
            figures=[(drawn, inlined(drawn)) for drawn in figures_of(content)],
            source=SOURCES[content.source],
            totals=TOTALS,
            show=_show,
            attributes=_attributes,
            clock=units.clock,
        )
    )


def figures_of(report: RunReport) -> Iterator[Drawn]:
    """The figures of a report: accuracy by round, bytes and labels, and the clients. One with one point or one client is left out."""
    seed = f"seed {report.settings['seed']}"
    shown = {SHOWN[name]: points for name, points in report.curves.items() if name in SHOWN}
    finals = [group.mean.value for group in report.groups if group.metric == metrics.PERSONAL_AFTER]
    after = {SHOWN[metrics.PERSONAL_BEFORE]: float(finals[0] or 0.0)} if len(finals) == 1 else {}
    if curves := _curves(shown, after):
        note = f"Mean over {_clients(curves)}; band: ±1 std over clients; {seed}."
        yield Drawn(
            "accuracy",
            plots.accuracy(curves, "mean test accuracy", note),
            "Test accuracy by round",
            f"Mean test accuracy over clients by round, on {report.dataset}.",
        )
        places: dict[float, float] = {
            round: bytes / plots.MEGABYTE for round, bytes in report.bytes_by_round.items()
        }
        against = {
            name: Curve([places[round] for round in curve.rounds], curve.mean, curve.std, None, curve.clients)
            for name, curve in curves.items()
            if all(places.get(round) for round in curve.rounds)
        }
        if against:
            yield Drawn(
                "accuracy-by-megabytes",
                plots.accuracy(against, "mean test accuracy", note, step="MB to and from a client so far"),
                "Test accuracy by traffic",
                "Mean test accuracy against the tensors sent to and from a client until then (1 MB = 10⁶ bytes).",
            )
    rows = {
        group.name: [float(one.accuracy.value or 0.0) for one in group.devices.values()]
        for group in report.groups
    }
    if any(len(values) > 1 for values in rows.values()):
        yield Drawn(
            "clients",
            plots.clients(rows, "test accuracy", f"{plots.BOX}; {seed}."),
            "Test accuracy of each client",
            "Each client's test accuracy on its own test samples.",
        )
    if labels := _curves(report.labels, {}):
        note = f"Mean over {_clients(labels)} whose head is auto; band: ±1 std over them."
        yield Drawn(
            "labels",
            plots.accuracy(labels, "held-out accuracy", note, step="labels per class"),
            "Held-out accuracy by labels per class",
            "Held-out accuracy of each kind of head against the number of labels per class.",
        )


def _curves(curves: Mapping[str, Points], after: Mapping[str, float]) -> dict[str, Curve]:
    """The curves of more than one point."""
    drawn = {}
    for name, points in curves.items():
        measured = [
            (at, mean.value, std.value or 0.0, n.value or 0)
            for at, mean, std, n in points
            if mean.value is not None
        ]
        if len(measured) > 1:
            places, means, stds, clients = zip(*measured, strict=True)
            drawn[name] = Curve(places, np.array(means), np.array(stds), after.get(name), clients)
    return drawn


def _clients(curves: Mapping[str, Curve]) -> str:
    """How many clients the points of the curves are over."""
    found = [n for curve in curves.values() for n in curve.clients]
    if min(found) == max(found):
        return f"n = {found[0]} clients"
    few = any(curve.faded.any() for curve in curves.values())
    return f"n = {min(found)} to {max(found)} clients" + few * f", faded below {LEAST_SHARE * max(found):g}"


def inlined(drawn: Drawn) -> Markup:
    """The figure as an element of a page."""
    return Markup(style.inline(drawn.figure, drawn.title, drawn.name))


def templates() -> Environment:
    """The templates of pages, with the style sheet."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["style"] = Markup(STYLE.read_text() + style.css())
    return environment


def markdown(content: RunReport) -> str:
    """The report as Markdown: verdict, gains, lowest devices, worse rounds, changed settings, accuracies, totals, sent data."""
    numbers = ["round", "line", *facts.FIELDS]
    rows = [
        [row.metric, row.which, str(row.round), row.figures[0].lines, *map(_show, row.figures)]
        for row in content.accuracy
    ]
    gained = [
        [
            group.name, gain.over, _show(gain.baseline), _show(gain.accuracy), *gain.texts, str(gain.n.value),
        ]
        for group in content.groups
        for gain in group.gains
    ]  # fmt: skip
    worst = [
        [
            name, group.name, _show(group.devices[name].accuracy), group.devices[name].interval or units.NOTHING,
            _show_known(group.devices[name].fleet), _show(group.devices[name].test_samples),
        ]
        for group in content.groups
        for name in group.worst
    ]  # fmt: skip
    totals = [
        f"- {name.replace('_', ' ')}: {TOTALS[name](one.value)}" for name, one in content.totals.items()
    ]
    messages = [f"- {name}: {contents}" for name, contents in content.egress.items()] or ["- nothing"]
    sent = [[one.device, str(one.bytes_up), str(one.statistics_bytes)] for one in content.sent]
    worse = [[str(one.round), one.outcome, one.why, one.named or "none"] for one in content.worse]
    changed = [[name, one.value, one.default] for name, one in content.changed.items()]
    blocks = [
        f"# {content.run}",
        content.verdict,
        content.reason,
        f"{content.method} on {content.dataset}, {content.state}. Source {content.source}: {SOURCES[content.source]}.",
        _table(["clients", "compared with"], ["baseline", "accuracy", "difference", "95 % CI", "n"], gained),
        "Lowest accuracy:" if worst else "",
        _table(["device", "group"], ["accuracy", "90 % interval", "fleet's head", "test samples"], worst),
        "Rounds that made devices worse:" if worse else "",
        _table(["round", "outcome", "why", "named"], [], worse),
        _table(["changed setting", "value", "default"], [], changed),
        _table(["metric", "of"], numbers, rows),
        "\n".join(totals),
        "Sent by devices:",
        "\n".join(messages),
        _table(["device"], ["bytes up", "of these class statistics"], sent),
        f"Parts that stay on the client: {content.kept}",
    ]
    return "\n\n".join(block.strip() for block in blocks if block) + "\n"


def json(content: RunReport) -> str:
    """The report as JSON; every figure names its lines."""
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"


FORMATS: dict[str, Callable[[RunReport], str]] = {"html": html, "md": markdown, "json": json}


def _table(headings: Sequence[str], numeric: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; empty without rows."""
    return tables.markdown(Table([*headings, *numeric], rows, numeric=numeric)) if rows else ""


def _show(figure: ReportFigure) -> str:
    """Accuracies in per cent with one decimal, counts unchanged."""
    is_count = figure.metric in metrics.COUNTS or figure.field in ("clients", "paired.n")
    return units.number(figure.value) if is_count else units.percent(figure.value)


def _show_known(figure: ReportFigure | None) -> str:
    return units.NOTHING if figure is None else _show(figure)


def _attributes(figure: ReportFigure) -> Markup:
    """Attributes that name the lines of a number."""
    names = ("field", "metric", "client", "against", "group")
    fields = {"line": figure.lines} | {name: getattr(figure, name) for name in names}
    given = {**fields, "value": "" if figure.value is None else repr(figure.value)}
    return Markup(" ".join(f'data-{name}="{units.escape(value)}"' for name, value in given.items() if value))
