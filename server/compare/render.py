"""Sheets as text, Markdown, LaTeX and CSV: what a comparison prints and saves, each cell a string already."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

SPECIAL = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "±": r"$\pm$",
           "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "→": r"$\to$"}  # fmt: skip


@dataclass(frozen=True)
class Sheet:
    """A table with a title, a heading per column, rows as long as that, and notes below."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def text(sheet: Sheet) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(sheet.headings, *sheet.rows, strict=True)]
    lines = [sheet.title, ""]
    for row in [sheet.headings, *sheet.rows]:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *rest]).rstrip())
    return "\n".join([*lines, "", *sheet.notes]).rstrip() + "\n"


def markdown(sheet: Sheet) -> str:
    """A table as GitHub draws it."""
    rule = "|" + " --- |" + " ---: |" * (len(sheet.headings) - 1)
    lines = [_line(sheet.headings), rule, *map(_line, sheet.rows)]
    return (
        "\n".join([f"### {sheet.title}", "", *lines, "", *(f"{note}  " for note in sheet.notes)]).rstrip()
        + "\n"
    )


def latex(sheet: Sheet) -> str:
    """A table for the package booktabs."""
    caption = "; ".join(note.removeprefix("- ").rstrip(".:") for note in sheet.notes)
    body = [" & ".join(map(_escaped, row)) + r" \\" for row in sheet.rows]
    return "\n".join([
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_escaped(sheet.title)}. {_escaped(caption)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(sheet.headings) - 1)}}}",
        r"\toprule",
        " & ".join(map(_escaped, sheet.headings)) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]) + "\n"  # fmt: skip


FORMATS: Mapping[str, Callable[[Sheet], str]] = {"txt": text, "md": markdown, "tex": latex}
"""By file ending."""


def together(sheets: Sequence[Sheet], ending: str) -> str:
    """Several sheets as one file."""
    return "\n".join(FORMATS[ending](sheet) for sheet in sheets)


def comma_separated(records: Sequence[Mapping[str, object]]) -> str:
    """Records as CSV; the columns are their keys in the order of their first appearance."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def _line(row: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"


def _escaped(cell: str) -> str:
    return re.sub("|".join(map(re.escape, SPECIAL)), lambda found: SPECIAL[found[0]], cell)
