"""Tables as aligned text, Markdown, LaTeX and CSV; every cell is a string already.

`fitted` fits a table to the width of a terminal without shortening a cell: it wraps prose, leaves out columns by rank, or stacks records.
"""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import inf
from typing import Any

LATEX_SPECIAL = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "±": r"$\pm$",
                 "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "→": r"$\to$"}  # fmt: skip
RECORDS_BELOW = 100  # columns of a terminal below which no column is left out
MIN_PROSE = 32  # columns that wrapped prose has at least
GAP = 2
INDENT, SEPARATOR = "  ", "   "


@dataclass(frozen=True)
class Table:
    """Rows of cells under `headings`, with an optional title above and notes below.

    Of columns, by heading: `numeric` ones are right-aligned, `prose` may be wrapped between words, and where there is little room the ones
    of the highest rank are left out first (`ranks`; those without a rank never).
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = ()
    numeric: Collection[str] = ()
    prose: Collection[str] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)


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


def cell_width(text: str) -> int:
    """Columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


@dataclass(frozen=True)
class Column:
    """A column of a listing: heading, format of a value, and the properties of `Table`'s columns."""

    heading: str
    write: Callable[[Any], str] = cell_text
    prose: bool = False
    rank: int = 0


Columns = Mapping[str, str | Column]
"""By a record's key: the column, or the heading of a plain one."""


def listing(rows: Sequence[Mapping[str, Any]], columns: Columns) -> Table:
    """Make a table of records; columns of numbers are right-aligned, columns without any value are left out."""
    chosen = {
        key: column if isinstance(column, Column) else Column(column)
        for key, column in columns.items()
        if not rows or any(row.get(key) not in (None, "") for row in rows)
    }
    values = {column.heading: [row.get(key) for row in rows] for key, column in chosen.items()}
    return Table(
        list(values),
        [[column.write(row.get(key)) for key, column in chosen.items()] for row in rows],
        numeric=[heading for heading, found in values.items() if _are_numbers(found)],
        prose=[column.heading for column in chosen.values() if column.prose],
        ranks={column.heading: column.rank for column in chosen.values() if column.rank},
    )


def _are_numbers(values: Sequence[object]) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in known
    )


def aligned_lines(table: Table) -> list[str]:
    """Format the headings and each row as one line of padded columns, without title and notes."""
    lines = [table.headings, *table.rows]
    widths = [max(map(cell_width, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            padded(cell, width, right=heading in table.numeric)
            for cell, width, heading in zip(line, widths, table.headings, strict=True)
        ).rstrip()
        for line in lines
    ]


def padded(cell: str, width: int, *, right: bool = False) -> str:
    """Fill a cell with spaces up to `width` columns of a terminal."""
    space = " " * (width - cell_width(cell))
    return space + cell if right else cell + space


def text(table: Table) -> str:
    """Format as aligned plain text."""
    return titled(table, aligned_lines(table))


def titled(table: Table, lines: Sequence[str]) -> str:
    """Put the table's title above its `lines`, and its notes below."""
    return _blocks([table.title], lines, table.notes)


def markdown(table: Table) -> str:
    """Format as a GitHub-flavoured Markdown table."""
    rule = ["---:" if heading in table.numeric else "---" for heading in table.headings]
    rows = [[cell.replace("|", r"\|") for cell in row] for row in table.rows]
    headings = [heading.replace("|", r"\|") for heading in table.headings]
    lines = [f"| {' | '.join(line)} |" for line in (headings, rule, *rows)]
    return _blocks([table.title and f"### {table.title}"], lines, [f"{note}  " for note in table.notes])


def latex(table: Table) -> str:
    """Format as a LaTeX table that uses the package booktabs; the title is its caption, the notes are comments above it."""
    alignment = "".join("r" if heading in table.numeric else "l" for heading in table.headings)
    headings, *rows = (
        " & ".join(map(_latex_escaped, line)) + r" \\" for line in [table.headings, *table.rows]
    )
    return "\n".join([
        *(f"% {note}" for note in table.notes),
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_latex_escaped(table.title)}.}}",
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


def _blocks(*blocks: Sequence[str]) -> str:
    """Join blocks of lines with empty lines between them."""
    return "\n\n".join("\n".join(block) for block in blocks if any(block)).rstrip() + "\n"


def _latex_escaped(cell: str) -> str:
    return re.sub("|".join(map(re.escape, LATEX_SPECIAL)), lambda match: LATEX_SPECIAL[match[0]], cell)


def fitted(table: Table, width: int, *, stacked: bool = True) -> list[str]:
    """Format for a terminal of `width` columns. Not `stacked`: one line per row at any width, with the columns that fit."""
    ranks = sorted(set(table.ranks.values()), reverse=True) if width >= RECORDS_BELOW or not stacked else []
    left_out: list[str] = []
    for rank in [inf, *ranks]:
        left_out = [heading for heading in table.headings if table.ranks.get(heading, 0) >= rank]
        if shown := _wrapped(_without(table, left_out), width):
            note = [f"not shown in this width: {', '.join(left_out)}"] if left_out and stacked else []
            return [*aligned_lines(shown), *note]
    return records(table, width) if stacked else aligned_lines(_without(table, left_out))


def records(table: Table, width: int) -> list[str]:
    """Format each row as its first cell and, below it, the others with their headings; empty cells are left out."""
    lines: list[str] = []
    for first, *cells in table.rows:
        if len(cells) == 1:
            lines += _lines(f"{first}: {cells[0]}", width)
            continue
        named = zip(table.headings[1:], cells, strict=True)
        lines += [
            first,
            *_flowed([f"{heading}: {cell}" for heading, cell in named if cell not in ("", "-")], width),
        ]
    return lines


def _without(table: Table, headings: Collection[str]) -> Table:
    kept = [place for place, heading in enumerate(table.headings) if heading not in headings]
    rows = [[row[place] for place in kept] for row in table.rows]
    return replace(table, headings=[table.headings[place] for place in kept], rows=rows)


def _wrapped(table: Table, width: int) -> Table | None:
    """The table with prose wrapped into further rows so that it fits; None if it does not fit."""
    columns = list(zip(table.headings, *table.rows, strict=True))
    natural = [max(map(cell_width, column)) for column in columns]
    prose = [place for place, heading in enumerate(table.headings) if heading in table.prose]
    free = width - GAP * (len(columns) - 1) - sum(natural) + sum(natural[place] for place in prose)
    limits = {}
    for number, place in enumerate(sorted(prose, key=lambda place: natural[place])):
        words = " ".join(columns[place]).split()
        least = max(min(natural[place], MIN_PROSE), *map(cell_width, words))
        limits[place] = min(natural[place], max(free // (len(prose) - number), least))
        free -= limits[place]
    if free < 0:
        return None
    rows: list[Sequence[str]] = []
    for row in table.rows:
        cells = [_lines(cell, limits[place]) if place in limits else [cell] for place, cell in enumerate(row)]
        rows += zip_longest(*cells, fillvalue="")
    return replace(table, rows=rows)


def _flowed(pairs: Sequence[str], width: int) -> Iterator[str]:
    """Lines of pairs, each pair on one line unless it is longer than a line."""
    line = ""
    for pair in pairs:
        if line and cell_width(line + SEPARATOR + pair) > width:
            yield line
            line = ""
        line = line + SEPARATOR + pair if line else INDENT + pair
        if cell_width(line) > width:
            first, *more = _lines(pair, width - 2 * len(INDENT))
            yield INDENT + first
            yield from (2 * INDENT + rest for rest in more)
            line = ""
    if line:
        yield line


def _lines(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
