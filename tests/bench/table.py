"""A report as text: one row per figure, what else was measured below it, and the machine first, without which no figure means anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.bench.figures import PLAIN, Figure, Report
from tests.bench.measure import Machine

COLUMNS = ("", "what", "found", "target", "", "of each turn", "seconds", "difference", "of peak")


def render(report: Report) -> str:
    """The whole report."""
    rows = [COLUMNS, *(row(figure) for figure in report.figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [heading(report.machine), "", _line(rows[0], widths)]
    for figure, cells in zip(report.figures, rows[1:], strict=True):
        lines.append(_line(cells, widths))
        lines += [f"{'':{widths[0]}}  {text}" for text in remarks(figure)]
    return "\n".join(lines)


def heading(machine: Machine) -> str:
    """Where and under what load."""
    before, after = machine.load
    return (
        f"{machine.cores} cores, {machine.threads} threads, {machine.device}, torch {machine.torch}; "
        f"GEMM peak {machine.gemm:.0f} GFLOP/s; load average {before:g} before, {after:g} after"
    )


def row(figure: Figure) -> tuple[str, ...]:
    """The cells of a figure; one that is not comparable shows no number to be quoted."""
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
    """The other sides, and the notes."""
    if others := [name for name in figure.sides if name not in (PLAIN, figure.ours)]:
        yield "; ".join(f"{name} {figure.sides[name].median:.3g} s" for name in others)
    if figure.notes:
        yield "; ".join(f"{name}: {_number(value)}" for name, value in figure.notes.items())


def _seconds(figure: Figure) -> str:
    sides = [figure.sides[name] for name in (PLAIN, figure.ours) if name in figure.sides]
    return " / ".join(f"{side.median:.3g}" for side in sides)


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
