"""Our numbers beside the papers': the figures of `server/recipes/papers.toml`, the difference, both ranks, and what was run otherwise.

A difference is not yet an error: a scaled run, one seed, a "best" round and a doubtful cell all make one. So each of them is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import msgspec
import numpy as np
from msgspec import Struct

from edge_fl import config, metrics
from edge_fl.config import Recipe
from edge_fl.errors import InputError, nearest
from server import recipes
from server.compare.cell import Measured
from server.compare.grid import Cell, parse_method
from server.compare.render import TextTable
from server.compare.summary import MeanStd, mean_std
from server.compare.tables import percent
from server.recipes.changes import differences, with_method

NUMBERS = {
    "personal": metrics.PERSONAL_AFTER,
    "global": metrics.GLOBAL_TEST,
    "unseen": metrics.UNSEEN_TEST,
}
CELL = re.compile(r"(?P<value>\d+(?:\.\d+)?)(?:±(?P<spread>\d+(?:\.\d+)?))?(?P<doubtful>\?)?")
NONE = "-"


class Table(Struct, frozen=True, forbid_unknown_fields=True):
    """One printed table, as `papers.toml` holds it; its head says what the strings mean."""

    title: str
    columns: list[str]
    rows: dict[str, str]
    spread: str = ""
    note: str = ""


class Figure(Struct, frozen=True):
    """One printed cell, in per cent: of a method, by the name of the number it is comparable with, on all clients or on one."""

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
def tables() -> tuple[Table, ...]:
    """Every table of the papers. Raises ConfigError for a damaged file."""
    tree = config.read(recipes.PAPERS)
    return tuple(msgspec.convert(tree["table"], list[Table]))


def figures(recipe: str) -> list[Figure]:
    """What the papers print for a recipe, each number once. Raises InputError for a recipe that is of no table."""
    found: dict[tuple[str, str, str], Figure] = {}
    for figure in _all_figures():
        if figure.recipe == recipe:
            found.setdefault((figure.method, figure.number, figure.client), figure)
    if not found:
        known = sorted({figure.recipe for figure in _all_figures()})
        raise InputError(f"recipe {recipe!r}: no paper's table has it{nearest(recipe, known)}")
    return list(found.values())


def against(recipe: str, cells: Sequence[Cell], found: Mapping[str, Measured]) -> TextTable:
    """Our figures beside the paper's for every method that both have, with the difference in percentage points and both ranks."""
    printed = figures(recipe)
    pairs = [
        (figure, ours) for figure in printed if (ours := _ours(figure, _runs(figure.method, cells, found)))
    ]
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
    return TextTable(
        f"{recipe} beside the paper", headings, body, list(_notes(recipe, cells, printed, pairs))
    )


def methods_of(recipe: Recipe) -> list[str]:
    """The methods that a recipe compares: those of its table, or its own."""
    return recipe.compare.methods or [recipe.method.name]


def _all_figures() -> Iterator[Figure]:
    for table in tables():
        for row, text in table.rows.items():
            method, _, number = row.partition("@")
            for column, cell in zip(table.columns, text.split(), strict=True):
                recipe, _, client = column.partition("/")
                if cell != NONE and (match := CELL.fullmatch(cell)):
                    value, spread, doubtful = match.group("value", "spread", "doubtful")
                    yield Figure(
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


def _runs(method: str, cells: Sequence[Cell], found: Mapping[str, Measured]) -> list[Measured]:
    kept = [found[cell.key] for cell in cells if cell.label == method and cell.key in found]
    return [measured for measured in kept if not measured.failure]


def _ours(figure: Figure, runs: Sequence[Measured]) -> MeanStd | None:
    if figure.client:
        values = [run.clients.get(figure.client, {}).get(figure.number) for run in runs]
    else:
        values = [run.last[figure.number].mean if figure.number in run.last else None for run in runs]
    known = [value for value in values if value is not None]
    return mean_std(known) if known else None


def _ranks(figure: Figure, pairs: Sequence[tuple[Figure, MeanStd]]) -> tuple[str, str]:
    """Places among all figures of the same client, best first; equals share the better place."""
    rivals = [(theirs, ours) for theirs, ours in pairs if theirs.client == figure.client]
    mine = next(ours for theirs, ours in rivals if theirs == figure)
    ours = 1 + sum(other.mean > mine.mean for _, other in rivals)
    return str(ours), str(1 + sum(theirs.value > figure.value for theirs, _ in rivals))


def _notes(
    recipe: str, cells: Sequence[Cell], printed: Sequence[Figure], pairs: Sequence[tuple[Figure, MeanStd]]
) -> Iterator[str]:
    changed = list(dict.fromkeys(change for cell in cells for change in _changes(recipe, cell)))
    yield f"Run otherwise than in the paper: {'; '.join(changed) or 'nothing'}."
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
        yield f"In the paper, but not here: {', '.join(missing)}."
    if disagreement := _disagreement(pairs):
        yield disagreement


def _changes(recipe: str, cell: Cell) -> list[str]:
    name, options = parse_method(cell.label)
    return differences(with_method(recipes.find(recipe), name, options), cell.recipe)


def _disagreement(pairs: Sequence[tuple[Figure, MeanStd]]) -> str:
    """How many pairs of methods stand in another order than in the paper."""
    whole = [(figure.value, ours.mean) for figure, ours in pairs if not figure.client]
    if len(whole) < 2:
        return ""
    theirs, ours = (np.array(column) for column in zip(*whole, strict=True))
    first, second = np.triu_indices(len(whole), 1)
    apart = np.sign(theirs[first] - theirs[second]) * np.sign(ours[first] - ours[second])
    return (
        f"{int((apart < 0).sum())} of {len(apart)} pairs of methods stand in another order than in the paper."
    )


def _name(figure: Figure) -> str:
    word = next(word for word, number in NUMBERS.items() if number == figure.number)
    return figure.method + f" ({word})" * (word != "personal") + f" on {figure.client}" * bool(figure.client)


def _printed(figure: Figure) -> str:
    around = "" if figure.spread is None else f"±{figure.spread:.2f}"
    return f"{figure.value:.2f}{around}{'?' * figure.doubtful}"
