"""A report as text: the machine, then one row per figure, followed by its notes."""

from collections.abc import Iterator

from edge_fl.console.tables import Table, aligned_lines
from tools.bench.figures import Figure, Report
from tools.bench.measure import Machine

COLUMNS = ("", "figure", "result", "target", "", "of each turn", "seconds", "difference", "of peak")


def render(report: Report) -> str:
    """Format the whole report."""
    headings, *rows = aligned_lines(Table(COLUMNS, [row(figure) for figure in report.figures]))
    lines = [heading(report.machine), *([report.remark] if report.remark else []), "", headings]
    for figure, line in zip(report.figures, rows, strict=True):
        lines += [line, *(f"    {text}" for text in remarks(figure))]
    return "\n".join(lines)


def heading(machine: Machine) -> str:
    """Describe the machine and its load."""
    before, after = machine.load
    return (
        f"{machine.cores} cores, {machine.threads} threads, {machine.device}, torch {machine.torch}; "
        f"GEMM peak {machine.gemm:.0f} GFLOP/s; load average {before:g} before, {after:g} after"
    )


def row(figure: Figure) -> tuple[str, ...]:
    """The cells of a figure; one that is not comparable shows no number."""
    shown = figure.comparable
    sign = "<=" if figure.at_most else ">="
    ratios = figure.ratios
    return (
        figure.id,
        figure.what,
        f"{figure.found:.3g}{figure.unit}" if shown else "-",
        f"{sign} {figure.target:g}{figure.unit}" if figure.target else "",
        figure.verdict,
        f"{min(ratios):.2f} to {max(ratios):.2f}" if shown and ratios else "",
        _seconds(figure),
        "" if figure.difference is None else f"{figure.difference:.1e}",
        "" if figure.peak is None else f"{figure.peak:.0%}",
    )


def remarks(figure: Figure) -> Iterator[str]:
    """The other sides and the notes of a figure."""
    if others := [name for name in figure.sides if name not in (figure.theirs, figure.ours)]:
        yield "; ".join(f"{name} {figure.sides[name].median:.3g} s" for name in others)
    if figure.notes:
        yield "; ".join(f"{name}: {_number(value)}" for name, value in figure.notes.items())


def _seconds(figure: Figure) -> str:
    sides = [figure.sides[name] for name in (figure.theirs, figure.ours) if name in figure.sides]
    return " / ".join(f"{side.median:.3g}" for side in sides)


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
