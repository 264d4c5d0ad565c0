"""A `RunReport` as one HTML file without external references, as Markdown, and as JSON."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import edge_fl_server
from edge_fl import metrics
from edge_fl.console import formatting, tables, units
from edge_fl.console.tables import Table
from edge_fl_lab.report import facts, figures, gains, style
from edge_fl_lab.report.facts import RunReport
from edge_fl_lab.report.gains import ReportFigure
from edge_fl_lab.report.plots import Drawn
from edge_fl_server.runs.results import Results

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
    from edge_fl.methods.contract.tiers import of_method  # torch comes with it
    from edge_fl_lab import catalogue

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
    return (
        templates()
        .get_template("report.html.j2")
        .render(
            report=content,
            figures=[(drawn, inlined(drawn)) for drawn in figures.of_report(content)],
            source=SOURCES[content.source],
            totals=TOTALS,
            show=_show,
            points=lambda figure: units.points(figure.value),
            interval=lambda gain: gains.interval_text(gain.low.value, gain.high.value),
            attributes=_attributes,
            clock=formatting.clock,
        )
    )


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
            group.name, gain.over, _show(gain.baseline), _show(gain.accuracy), units.points(gain.difference.value),
            gains.interval_text(gain.low.value, gain.high.value), str(gain.n.value),
        ]
        for group in content.groups
        for gain in group.gains
    ]  # fmt: skip
    worst = [
        [name, group.name, _show(group.devices[name].accuracy), _show(group.devices[name].test_samples)]
        for group in content.groups
        for name in group.worst
    ]
    totals = [
        f"- {name.replace('_', ' ')}: {TOTALS[name](one.value)}" for name, one in content.totals.items()
    ]
    messages = [f"- {one.message}: {one.content}" for one in content.egress] or ["- nothing"]
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
        _table(["device", "group"], ["accuracy", "test samples"], worst),
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
    return formatting.number(figure.value) if is_count else units.percent(figure.value)


def _attributes(figure: ReportFigure) -> Markup:
    """Attributes that name the lines of a number."""
    fields = {
        "line": figure.lines,
        "field": figure.field,
        "metric": figure.metric,
        "client": figure.client,
        "against": figure.against,
        "group": figure.group,
    }
    given = {**fields, "value": "" if figure.value is None else repr(figure.value)}
    return Markup(
        " ".join(f'data-{name}="{formatting.escape(value)}"' for name, value in given.items() if value)
    )
