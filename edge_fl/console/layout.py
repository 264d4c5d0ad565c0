"""Fit a table to the width of a terminal without shortening a cell: wrap prose, leave out columns by rank, or stack records."""

import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import inf

from edge_fl.console.tables import Table, aligned_lines, cell_width

RECORDS_BELOW = 100  # columns of a terminal below which no column is left out
MIN_PROSE = 32  # columns that wrapped prose has at least
GAP = 2
INDENT, SEPARATOR = "  ", "   "


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
