"""Tables as text, Markdown, LaTeX and CSV: what a comparison prints and saves, each cell a string already."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

SPECIAL = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "±": r"$\pm$",
           "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "→": r"$\to$"}  # fmt: skip


@dataclass(frozen=True)
class TextTable:
    """A table with a title, a heading per column, rows as long as that, and notes below."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def text(table: TextTable) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(table.headings, *table.rows, strict=True)]
    lines = [table.title, ""]
    for row in [table.headings, *table.rows]:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *rest]).rstrip())
    return "\n".join([*lines, "", *table.notes]).rstrip() + "\n"


def markdown(table: TextTable) -> str:
    """A table as GitHub draws it."""
    rule = "|" + " --- |" + " ---: |" * (len(table.headings) - 1)
    lines = [_line(table.headings), rule, *map(_line, table.rows)]
    return (
        "\n".join([f"### {table.title}", "", *lines, "", *(f"{note}  " for note in table.notes)]).rstrip()
        + "\n"
    )


def latex(table: TextTable) -> str:
    """A table for the package booktabs."""
    caption = "; ".join(note.removeprefix("- ").rstrip(".:") for note in table.notes)
    body = [" & ".join(map(_escaped, row)) + r" \\" for row in table.rows]
    return "\n".join([
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_escaped(table.title)}. {_escaped(caption)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(table.headings) - 1)}}}",
        r"\toprule",
        " & ".join(map(_escaped, table.headings)) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]) + "\n"  # fmt: skip


FORMATS: Mapping[str, Callable[[TextTable], str]] = {"txt": text, "md": markdown, "tex": latex}
"""By file ending."""


def together(tables: Sequence[TextTable], ending: str) -> str:
    """Several tables as one file."""
    return "\n".join(FORMATS[ending](table) for table in tables)


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
