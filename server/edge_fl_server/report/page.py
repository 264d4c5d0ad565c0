"""A `RunReport` as one HTML file without external references, as Markdown, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure as MatplotlibFigure

from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl_server.report import facts, formatting, plots, style
from edge_fl_server.report.facts import Figure, Points, RunReport
from edge_fl_server.report.plots import Curve
from edge_fl_server.runs.results import Results

FOLDER = Path(__file__).parent
STYLE = FOLDER.parent / "dashboard" / "style.css"
NAME = "report.html"
SIZES = {"wide": (10.0, 3.2), "narrow": (3.5, 3.6)}  # inches
SOURCES = {
    "simulated": "all clients were simulated on the server; no device took part",
    "fleet": "full devices trained on their own data; the server only aggregated",
    "none": "nothing was trained; head-only devices fitted heads on the extractor as it is",
    "hybrid": "full devices trained on their own data, together with clients simulated on the server",
}
TOTALS: dict[str, Callable[[float | int | None], str]] = {
    "rounds": formatting.number,
    "selected": formatting.number,
    "responded": formatting.number,
    "seconds": formatting.seconds,
    "bytes_down": formatting.size,
    "bytes_up": formatting.size,
    "largest_epsilon": lambda value: formatting.NOTHING if value is None else f"{value:.3g}",
}


def report(results: Results) -> RunReport:
    """Read the report of a run."""
    from edge_fl.methods.contract.egress import of_method  # torch comes with it
    from edge_fl_server import catalogue

    recipe = results.recipe()
    method = catalogue.sample(recipe.method.name)
    method = replace(method, compression=recipe.compression, privacy=recipe.privacy)
    personal = [part for part, spec in method.parts.items() if not spec.travels]
    return facts.of_run(results, of_method(method), personal)


def write(results: Results) -> Path:
    """Write the run's report.html and return its path. Raises RunError if it cannot be written."""
    return style.write(results.path / NAME, html(report(results)))


def html(content: RunReport) -> str:
    """The report as a self-contained page."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((FOLDER / "report.html.j2").read_text())
    values = [figure.value for figure in content.devices.values() if figure.value is not None]
    return template.render(
        report=content,
        style=Markup(STYLE.read_text()),
        curves=_curves(content.curves, "round"),
        labels=_curves(content.labels, "labels per class"),
        spread=_drawn(lambda size: plots.histogram(values, content.devices_by, size), "spread")
        if values
        else "",
        source=SOURCES[content.source],
        totals=TOTALS,
        show=_show,
        attributes=_attributes,
        clock=formatting.clock,
    )


def markdown(content: RunReport) -> str:
    """The report as Markdown: accuracies, totals, sent data, settings."""
    numbers = ["round", "line", *facts.FIELDS]
    rows = [
        [row.metric, row.which, str(row.round), row.figures[0].lines, *map(_show, row.figures)]
        for row in content.accuracy
    ]
    totals = [
        f"- {name.replace('_', ' ')}: {TOTALS[name](one.value)}" for name, one in content.totals.items()
    ]
    worst = ", ".join(f"{name} {_show(content.devices[name])}" for name in content.worst)
    sent = [f"- {one.message}: {one.content}" for one in content.egress] or ["- nothing"]
    blocks = [
        f"# {content.run}",
        f"{content.method} on {content.dataset}, {content.state}. Source {content.source}: {SOURCES[content.source]}.",
        tables.markdown(Table(["metric", "of", *numbers], rows, numeric=numbers)),
        "\n".join(totals),
        worst and f"Worst devices by {content.devices_by}, %: {worst}",
        "Sent by devices:",
        "\n".join(sent),
        tables.markdown(
            Table(
                ["device", "bytes up", "of these class statistics"],
                [[one.device, str(one.bytes_up), str(one.statistics_bytes)] for one in content.sent],
                numeric=["bytes up", "of these class statistics"],
            )
        )
        if content.sent
        else "",
        f"Parts that stay on the client: {content.kept}",
        tables.markdown(Table(["setting", "value"], list(content.settings.items()))),
    ]
    return "\n\n".join(block.strip() for block in blocks if block) + "\n"


def json(content: RunReport) -> str:
    """The report as JSON; every figure names its lines."""
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"


FORMATS: dict[str, Callable[[RunReport], str]] = {"html": html, "md": markdown, "json": json}


def _curves(curves: Mapping[str, Points], step: str) -> Markup:
    """Means by `step` with a band of one std over clients; empty without any point."""
    drawn = {}
    for name, points in curves.items():
        measured = [(at, mean.value, std.value or 0.0) for at, mean, std in points if mean.value is not None]
        if measured:
            places, means, stds = zip(*measured, strict=True)
            drawn[name] = Curve(places, np.array(means), np.array(stds))
    draw = partial(plots.accuracy, drawn, "accuracy", step=step, legend="outside upper left")
    return _drawn(lambda size: draw(size=size), step) if drawn else Markup("")


def _drawn(draw: Callable[[tuple[float, float]], MatplotlibFigure], salt: str) -> Markup:
    """A figure for wide and one for narrow windows; the style sheet shows the one that fits."""
    return Markup(
        "".join(
            f'<div class="{kind}">{style.inline(draw(size), f"{salt} {kind}")}</div>'
            for kind, size in SIZES.items()
        )
    )


def _show(figure: Figure) -> str:
    """Accuracies in per cent, counts unchanged."""
    return formatting.number(figure.value) if figure.field == "clients" else formatting.share(figure.value, 2)


def _attributes(figure: Figure) -> Markup:
    """Attributes that name the lines of a number."""
    fields = {"line": figure.lines, "field": figure.field, "metric": figure.metric, "client": figure.client}
    given = {**fields, "value": "" if figure.value is None else repr(figure.value)}
    return Markup(
        " ".join(f'data-{name}="{formatting.escape(value)}"' for name, value in given.items() if value)
    )
