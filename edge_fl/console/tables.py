"""Tables as aligned text, Markdown, LaTeX, CSV and rich's terminal table; every cell is a string already."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LATEX_SPECIAL = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "±": r"$\pm$",
                 "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "→": r"$\to$"}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Rows of cells under `headings`, with an optional title above and notes below; the columns headed `numeric` are right-aligned."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = ()
    numeric: Collection[str] = ()


def cell_text(value: object) -> str:
    """Format a value for a cell: "-" for None, yes or no, three decimals for a float."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3f}"
    return str(value)


def aligned_lines(table: Table) -> list[str]:
    """Format the headings and each row as one line of padded columns, without title and notes."""
    lines = [table.headings, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    signs = [">" if heading in table.numeric else "<" for heading in table.headings]
    return [
        "  ".join(
            f"{cell:{sign}{width}}" for cell, sign, width in zip(line, signs, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


def text(table: Table) -> str:
    """Format as aligned plain text."""
    return _blocks([table.title], aligned_lines(table), table.notes)


def markdown(table: Table) -> str:
    """Format as a GitHub-flavoured Markdown table."""
    rule = ["---:" if heading in table.numeric else "---" for heading in table.headings]
    rows = [[cell.replace("|", r"\|") for cell in row] for row in table.rows]
    headings = [heading.replace("|", r"\|") for heading in table.headings]
    lines = [f"| {' | '.join(line)} |" for line in (headings, rule, *rows)]
    return _blocks([table.title and f"### {table.title}"], lines, [f"{note}  " for note in table.notes])


def latex(table: Table) -> str:
    """Format as a LaTeX table that uses the package booktabs."""
    caption = "; ".join(note.removeprefix("- ").rstrip(".:") for note in table.notes)
    alignment = "".join("r" if heading in table.numeric else "l" for heading in table.headings)
    headings, *rows = (
        " & ".join(map(_latex_escaped, line)) + r" \\" for line in [table.headings, *table.rows]
    )
    return "\n".join([
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_latex_escaped(table.title)}. {_latex_escaped(caption)}}}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        headings,
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]) + "\n"  # fmt: skip


RENDERERS: Mapping[str, Callable[[Table], str]] = {"txt": text, "md": markdown, "tex": latex}
"""By file ending."""


def csv_text(records: Sequence[Mapping[str, object]]) -> str:
    """Format records as CSV; the columns are their keys in the order of first appearance."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def rich_table(table: Table) -> Any:
    """Build rich's table for a terminal. Cells are plain text: a device's name is never read as markup."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=SIMPLE_HEAD, title=table.title or None, caption="\n".join(table.notes) or None)
    for heading in table.headings:
        drawn.add_column(heading, justify="right" if heading in table.numeric else "left")
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn


def _blocks(*blocks: Sequence[str]) -> str:
    """Join blocks of lines with empty lines between them."""
    return "\n\n".join("\n".join(block) for block in blocks if any(block)).rstrip() + "\n"


def _latex_escaped(cell: str) -> str:
    return re.sub("|".join(map(re.escape, LATEX_SPECIAL)), lambda match: LATEX_SPECIAL[match[0]], cell)
