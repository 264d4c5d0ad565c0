"""A report as one HTML file without any outside reference, as Markdown, and as JSON; written from a `RunReport` alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from edge_fl.errors import RunError
from edge_fl.files import atomic
from server.report import facts, formatting, svg
from server.report.facts import Figure, Points, RunReport
from server.runs.results import Results

FOLDER = Path(__file__).parent
STYLE = FOLDER.parent / "dashboard" / "style.css"
NAME = "report.html"
WORDS = {
    "simulated": "the clients' data are on the server; nothing was asked of any device",
    "fleet": "full devices trained on their own data; the server only aggregated",
    "hybrid": "full devices trained on their own data, beside clients whose data are on the server",
}
TOTALS: dict[str, Callable[[float | int | None], str]] = {
    "rounds": formatting.number,
    "asked": formatting.number,
    "answered": formatting.number,
    "seconds": formatting.seconds,
    "bytes_down": formatting.size,
    "bytes_up": formatting.size,
    "largest_epsilon": lambda value: formatting.NOTHING if value is None else f"{value:.3g}",
}


def report(results: Results) -> RunReport:
    """What there is to say of a run."""
    from edge_fl.methods.contract.egress import of_method  # torch comes with it
    from server import catalogue

    recipe = results.recipe()
    method = catalogue.sample(recipe.method.name)
    method = replace(method, compression=recipe.compression, privacy=recipe.privacy)
    personal = [part for part, spec in method.parts.items() if not spec.travels]
    return facts.of_run(results, of_method(method), personal)


def write(results: Results) -> Path:
    """Writes the run's report.html -> its path. Raises RunError when the disk does not take it."""
    path = results.path / NAME
    try:
        atomic.write(path, html(report(results)))
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({error.strerror}); the run's numbers are untouched"
        ) from error
    return path


def html(found: RunReport) -> str:
    """The self-contained page."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((FOLDER / "report.html.j2").read_text())
    series, labels = _series(found.curves), _series(found.labels)
    values = {name: figure.value for name, figure in found.devices.items() if figure.value is not None}
    return template.render(
        report=found,
        style=Markup(STYLE.read_text()),
        curves=_drawn(series, "round"),
        labels=_drawn(labels, "labels per class"),
        spread=Markup(svg.fitting(lambda width: svg.spread(values, width=width))) if values else "",
        source=WORDS[found.source],
        totals=TOTALS,
        show=_show,
        attributes=_attributes,
        clock=formatting.clock,
    )


def markdown(found: RunReport) -> str:
    """The same for a terminal or a pull request: settings, accuracies, totals."""
    lines = [
        f"# {found.run}",
        "",
        f"{found.method} on {found.dataset}, {found.state}. Source {found.source}: {WORDS[found.source]}.",
        "",
    ]
    lines += [
        "| metric | of | round | line | " + " | ".join(facts.FIELDS) + " |",
        "|" + " --- |" * 2 + " ---: |" * 7,
    ]
    for row in found.accuracy:
        cells = " | ".join(_show(figure) for figure in row.figures)
        lines.append(f"| {row.metric} | {row.which} | {row.round} | {row.figures[0].lines} | {cells} |")
    lines += [
        "",
        *(
            f"- {name.replace('_', ' ')}: {TOTALS[name](figure.value)}"
            for name, figure in found.totals.items()
        ),
    ]
    if found.worst:
        worst = ", ".join(f"{name} {_show(found.devices[name])}" for name in found.worst)
        lines += ["", f"Worst devices by {found.devices_by}, %: {worst}"]
    lines += ["", "What left the devices:", ""]
    lines += [f"- {one.message}: {one.content}" for one in found.egress] or ["- nothing"]
    lines += ["", f"Parts that stay on the client: {found.kept}", "", "| setting | value |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in found.settings.items()]
    return "\n".join(lines) + "\n"


def json(found: RunReport) -> str:
    """The whole report, every figure with the lines it stands on."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"


FORMATS: dict[str, Callable[[RunReport], str]] = {"html": html, "md": markdown, "json": json}


def _drawn(series: Sequence[svg.Series], step: str) -> Markup:
    """Curves and their legend; empty without any point."""
    if not any(one.points for one in series):
        return Markup("")
    label = f"Accuracy by {step}"
    drawn = svg.fitting(lambda width: svg.curves(series, width=width, label=label, step=step))
    return Markup(drawn + svg.legend(series))


def _series(curves: Mapping[str, Points]) -> list[svg.Series]:
    series = []
    for name, points in curves.items():
        drawn = []
        for at, mean, std in points:
            if mean.value is not None:
                around = std.value or 0.0
                marks = {
                    "line": mean.lines,
                    "metric": mean.metric,
                    "field": "mean",
                    "value": repr(mean.value),
                }
                drawn.append(svg.Point(at, mean.value, mean.value - around, mean.value + around, marks))
        series.append(svg.Series(name, drawn))
    return series


def _show(figure: Figure) -> str:
    """Shares in per cent, counts as they are."""
    return formatting.number(figure.value) if figure.field == "clients" else formatting.share(figure.value, 2)


def _attributes(figure: Figure) -> Markup:
    """Where a number stands, for whoever checks it."""
    fields = {"line": figure.lines, "field": figure.field, "metric": figure.metric, "client": figure.client}
    given = {**fields, "value": "" if figure.value is None else repr(figure.value)}
    return Markup(
        " ".join(f'data-{name}="{formatting.escape(value)}"' for name, value in given.items() if value)
    )
