"""Comparison of our numbers with the papers' (`recipes/papers.toml`): differences, ranks, and deviations from the paper's setup.

A scaled run, a single seed, a "best" round or a doubtful cell also cause differences; the notes state each of them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import msgspec
import numpy as np
from msgspec import Struct

from edge_fl import metrics, toml
from edge_fl.console.tables import Table
from edge_fl.errors import InputError, nearest
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.grid import Cell, parse_method
from edge_fl_lab.compare.summary import MeanStd, mean_std
from edge_fl_lab.compare.tables import percent
from edge_fl_lab.recipe_changes import differences, with_method
from edge_fl_server import recipes

NUMBERS = {
    "personal": metrics.PERSONAL_AFTER,
    "global": metrics.GLOBAL_TEST,
    "unseen": metrics.UNSEEN_TEST,
}
CELL = re.compile(r"(?P<value>\d+(?:\.\d+)?)(?:±(?P<spread>\d+(?:\.\d+)?))?(?P<doubtful>\?)?")
NONE = "-"


class PaperTable(Struct, frozen=True, forbid_unknown_fields=True):
    """One printed table; the head of `papers.toml` explains the format."""

    title: str
    columns: list[str]
    rows: dict[str, str]
    spread: str = ""
    note: str = ""


class PaperFigure(Struct, frozen=True):
    """One printed cell, in per cent: a method, the name of our comparable number, and one client ("": all clients)."""

    recipe: str
    table: str
    method: str
    number: str
    value: float
    spread: float | None
    spread_over: str
    doubtful: bool
    client: str


@cache
def tables() -> tuple[PaperTable, ...]:
    """Read all tables of the papers. Raises ConfigError for a damaged file."""
    tree = toml.read(recipes.PAPERS)
    return tuple(msgspec.convert(tree["table"], list[PaperTable]))


def figures(recipe: str) -> list[PaperFigure]:
    """The papers' figures for a recipe, each number once. Raises InputError for a recipe that is in no table."""
    known: dict[tuple[str, str, str], PaperFigure] = {}
    for figure in _all_figures():
        if figure.recipe == recipe:
            known.setdefault((figure.method, figure.number, figure.client), figure)
    if not known:
        recipes = {figure.recipe for figure in _all_figures()}
        raise InputError(f"recipe {recipe!r}: no paper's table has it{nearest(recipe, recipes)}")
    return list(known.values())


def against(recipe: str, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> Table:
    """Compare our numbers with the paper's, for every method that both have: difference in percentage points and both ranks."""
    printed = figures(recipe)
    pairs = [(figure, ours) for figure in printed if (ours := _ours(figure, cells, results))]
    seeds = max((ours.count for _, ours in pairs), default=0)
    body = [
        [
            _name(figure),
            percent(ours, seeds),
            _printed(figure),
            f"{ours.mean * 100 - figure.value:+.2f}",
            *_ranks(figure, pairs),
            figure.table,
        ]
        for figure, ours in pairs
    ]
    headings = ["method", "ours", "paper", "difference", "our rank", "paper's rank", "table"]
    notes = list(_notes(recipe, cells, printed, pairs))
    return Table(headings, body, f"{recipe} compared with the paper", notes, headings[1:-1])


def _all_figures() -> Iterator[PaperFigure]:
    for table in tables():
        for row, text in table.rows.items():
            method, _, number = row.partition("@")
            for column, cell in zip(table.columns, text.split(), strict=True):
                recipe, _, client = column.partition("/")
                if cell != NONE and (match := CELL.fullmatch(cell)):
                    value, spread, doubtful = match.group("value", "spread", "doubtful")
                    yield PaperFigure(
                        recipe,
                        table.title,
                        method,
                        NUMBERS[number or "personal"],
                        float(value),
                        float(spread) if spread else None,
                        table.spread,
                        bool(doubtful),
                        client,
                    )


def _ours(figure: PaperFigure, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> MeanStd | None:
    """Our number over the complete cells of the figure's method."""
    known = [results[cell.key] for cell in cells if cell.label == figure.method and cell.key in results]
    complete = [result for result in known if not result.failure]
    if figure.client:
        values = [result.clients.get(figure.client, {}).get(figure.number) for result in complete]
    else:
        values = [each.last[figure.number].mean for each in complete if figure.number in each.last]
    measured = [value for value in values if value is not None]
    return mean_std(measured) if measured else None


def _ranks(figure: PaperFigure, pairs: Sequence[tuple[PaperFigure, MeanStd]]) -> tuple[str, str]:
    """Ranks among all figures of the same client, best first; equal values share the better rank."""
    rivals = [(theirs, ours) for theirs, ours in pairs if theirs.client == figure.client]
    mine = next(ours for theirs, ours in rivals if theirs == figure)
    ours = 1 + sum(other.mean > mine.mean for _, other in rivals)
    return str(ours), str(1 + sum(theirs.value > figure.value for theirs, _ in rivals))


def _notes(
    recipe: str,
    cells: Sequence[Cell],
    printed: Sequence[PaperFigure],
    pairs: Sequence[tuple[PaperFigure, MeanStd]],
) -> Iterator[str]:
    changed = list(dict.fromkeys(change for cell in cells for change in _changes(recipe, cell)))
    yield f"Different from the paper's setup: {'; '.join(changed) or 'nothing'}."
    share = cells[0].recipe.data.validation_fraction
    if share:
        yield f"{share:.0%} of the training images are held out to choose the best round; the papers train on them."
    if over := next((figure.spread_over for figure in printed if figure.spread_over), ""):
        yield f"The paper's ± is over {over}, ours over seeds."
    if any(figure.doubtful for figure in printed):
        yield "?: a doubtful cell of the paper."
    for table in tables():
        if table.note and table.title in {figure.table for figure in printed}:
            yield f"{table.title}: {table.note}."
    if missing := dict.fromkeys(_name(f) for f in printed if f not in [figure for figure, _ in pairs]):
        yield f"In the paper only: {', '.join(missing)}."
    if disagreement := _disagreement(pairs):
        yield disagreement


def _changes(recipe: str, cell: Cell) -> list[str]:
    name, options = parse_method(cell.label)
    return differences(with_method(recipes.find(recipe), name, options), cell.recipe)


def _disagreement(pairs: Sequence[tuple[PaperFigure, MeanStd]]) -> str:
    """Count the pairs of methods whose order differs from the paper's."""
    whole = [(figure.value, ours.mean) for figure, ours in pairs if not figure.client]
    if len(whole) < 2:
        return ""
    theirs, ours = (np.array(column) for column in zip(*whole, strict=True))
    first, second = np.triu_indices(len(whole), 1)
    agreement = np.sign(theirs[first] - theirs[second]) * np.sign(ours[first] - ours[second])
    return f"{int((agreement < 0).sum())} of {len(agreement)} pairs of methods are ordered differently in the paper."


def _name(figure: PaperFigure) -> str:
    word = next(word for word, number in NUMBERS.items() if number == figure.number)
    return figure.method + f" ({word})" * (word != "personal") + f" on {figure.client}" * bool(figure.client)


def _printed(figure: PaperFigure) -> str:
    around = "" if figure.spread is None else f"±{figure.spread:.2f}"
    return f"{figure.value:.2f}{around}{'?' * figure.doubtful}"
