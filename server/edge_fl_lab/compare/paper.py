"""Comparison of our numbers with the papers' (`recipes/papers.toml`): differences, ranks, and deviations from the paper's setup.

A scaled run, a single seed, a "best" round or a doubtful cell also cause differences; the notes state each of them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Literal

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

EVALUATIONS = {
    "global": (metrics.GLOBAL_TEST, metrics.GLOBAL_TEST),
    "before": (metrics.PERSONAL_BEFORE, metrics.PERSONAL_BEFORE),
    "post_local": (metrics.PERSONAL_LOCAL, metrics.PERSONAL_LOCAL),
    "personal": (metrics.PERSONAL_BEFORE, metrics.PERSONAL_AFTER),
    "unseen": ("", metrics.UNSEEN_TEST),
}
"""Our numbers by the words of `papers.toml`: (between rounds, at the end)."""

ROUNDS = {
    "last": "after the last round",
    "best": "in the best round by test accuracy",
    "best-of-each-client": "in each client's best round by test accuracy",
}
MEANS = {
    "clients": "mean over clients, each alike",
    "samples": "share of all test samples (clients weighted by samples)",
}
CELL = re.compile(r"(?P<value>\d+(?:\.\d+)?)(?:±(?P<spread>\d+(?:\.\d+)?))?(?P<doubtful>\?)?")
NONE = "-"


class PaperTable(Struct, frozen=True, forbid_unknown_fields=True):
    """One printed table; the head of `papers.toml` explains the format."""

    title: str
    mean: Literal["clients", "samples"]
    round: Literal["last", "best", "best-of-each-client"]
    source: str
    columns: list[str]
    rows: dict[str, str]
    spread: str = ""
    note: str = ""


class PaperFigure(Struct, frozen=True):
    """One printed cell, in per cent: table, method, evaluation (of EVALUATIONS), and one client ("": all clients)."""

    recipe: str
    table: PaperTable
    method: str
    evaluation: str
    value: float
    spread: float | None
    doubtful: bool
    client: str


class Row(Struct, frozen=True):
    """Our number of a method, evaluation and client, as the table `as_in` computes its own; `figure` is the paper's, if it prints one.

    `spread` is the standard deviation over clients after the last round, mean over seeds; None for one client, or in another round.
    `clients` is the number of clients that were measured, per seed: after a local update only those of the last round.
    """

    method: str
    evaluation: str
    client: str
    as_in: PaperTable
    ours: MeanStd
    spread: float | None
    clients: int
    figure: PaperFigure | None


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
            known.setdefault((figure.method, figure.evaluation, figure.client), figure)
    if not known:
        recipes = {figure.recipe for figure in _all_figures()}
        raise InputError(f"recipe {recipe!r}: no paper's table has it{nearest(recipe, recipes)}")
    return list(known.values())


def against(recipe: str, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> Table:
    """Compare our numbers with the paper's, for every method that both have: difference in percentage points and both ranks.

    Ours are computed as the paper computes its own (mean and round, see the notes). Evaluations that the paper does not print have a row
    too, where they give another number.
    """
    theirs, rows = figures(recipe), rows_of(recipe, cells, results)
    seeds = max((row.ours.count for row in rows), default=0)
    body = [
        [
            named(row),
            _ours_text(row, seeds),
            str(row.clients),
            printed(row),
            f"{row.ours.mean * 100 - row.figure.value:+.2f}" if row.figure else NONE,
            *_ranks(row, rows),
            row.as_in.title,
        ]
        for row in rows
    ]
    headings = ["method", "ours", "clients", "paper", "difference", "our rank", "paper's rank", "table"]
    notes = list(_notes(recipe, cells, theirs, rows))
    return Table(headings, body, f"{recipe} compared with the paper", notes, headings[1:-1])


def rows_of(recipe: str, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> list[Row]:
    """The rows of `against`. Raises InputError for a recipe that is in no table."""
    return list(_rows(figures(recipe), cells, results))


def _all_figures() -> Iterator[PaperFigure]:
    for table in tables():
        for row, text in table.rows.items():
            method, _, evaluation = row.partition("@")
            for column, cell in zip(table.columns, text.split(), strict=True):
                recipe, _, client = column.partition("/")
                if cell != NONE and (match := CELL.fullmatch(cell)):
                    value, spread, doubtful = match.group("value", "spread", "doubtful")
                    yield PaperFigure(
                        recipe,
                        table,
                        method,
                        evaluation or "personal",
                        float(value),
                        float(spread) if spread else None,
                        bool(doubtful),
                        client,
                    )


def _rows(
    printed: Sequence[PaperFigure], cells: Sequence[Cell], results: Mapping[str, CellResult]
) -> Iterator[Row]:
    """The rows of each printed method: the paper's evaluations, then others that give another number."""
    of_methods: dict[tuple[str, str], dict[str, PaperFigure]] = {}
    for figure in printed:
        of_methods.setdefault((figure.method, figure.client), {})[figure.evaluation] = figure
    for (method, client), theirs in of_methods.items():
        known = [results[cell.key] for cell in cells if cell.label == method and cell.key in results]
        complete = [result for result in known if not result.failure]
        table = next(iter(theirs.values())).table
        shown: set[float] = set()
        for evaluation in [*theirs, *(word for word in EVALUATIONS if word not in theirs and not client)]:
            values = [_number(result, evaluation, client, table) for result in complete]
            ours = mean_std([value for value in values if value is not None])
            if ours.count and (evaluation in theirs or ours.mean not in shown):
                shown.add(ours.mean)
                spread = _over_clients(complete, evaluation, client, table)
                measured = 1 if client else max(_measured(result, evaluation) for result in complete)
                yield Row(method, evaluation, client, table, ours, spread, measured, theirs.get(evaluation))


def _number(result: CellResult, evaluation: str, client: str, table: PaperTable) -> float | None:
    """The accuracy of one run, 0..1, with the mean and the round of the table; None if it was not measured."""
    during, end = EVALUATIONS[evaluation]
    if client or table.round == "best-of-each-client":
        best = result.highest if table.round == "best-of-each-client" else {}
        found = [
            max(values)
            for id, report in result.clients.items()
            if client in ("", id)
            and (
                values := [
                    each[name] for each, name in ((report, end), (best.get(id, {}), during)) if name in each
                ]
            )
        ]
        return float(np.mean(found)) if found else None
    weighted = table.mean == "samples"
    last = (
        [result.last[end].weighted_mean if weighted else result.last[end].mean] if end in result.last else []
    )
    if table.round == "last":
        return last[0] if last else None
    rounds = [point.weighted if weighted else point.means for point in result.curve]
    return max([*last, *(found[during] for found in rounds if during in found)], default=None)


def _measured(result: CellResult, evaluation: str) -> int:
    """The number of clients with this evaluation at the end."""
    end = result.last.get(EVALUATIONS[evaluation][1])
    return end.clients if end else 0


def _over_clients(
    results: Sequence[CellResult], evaluation: str, client: str, table: PaperTable
) -> float | None:
    """The standard deviation over clients after the last round, mean over the runs."""
    end = EVALUATIONS[evaluation][1]
    if client or table.round != "last":
        return None
    return float(np.mean([result.last[end].std for result in results if end in result.last]))


def _ranks(row: Row, rows: Sequence[Row]) -> tuple[str, str]:
    """Ranks among all figures of the same client, best first; equal values share the better rank."""
    if row.figure is None:
        return NONE, NONE
    rivals = [other for other in rows if other.figure and other.client == row.client]
    ours = 1 + sum(other.ours.mean > row.ours.mean for other in rivals)
    theirs = 1 + sum(other.figure.value > row.figure.value for other in rivals if other.figure)
    return str(ours), str(theirs)


def _notes(
    recipe: str, cells: Sequence[Cell], printed: Sequence[PaperFigure], rows: Sequence[Row]
) -> Iterator[str]:
    every, tables = cells[0].recipe.evaluate_every, {figure.table.title: figure.table for figure in printed}
    for table in tables.values():
        evaluated = f", evaluated every {every} rounds" * (table.round != "last" and every > 1)
        yield f"{table.title}, ours as theirs: {MEANS[table.mean]}, {ROUNDS[table.round]}{evaluated} ({table.source})."
    if any(row.evaluation != "personal" for row in rows):
        yield (
            "A row without word is the client's own model after the final personalisation; before: before it; post-local: after its local"
            " update, before aggregation; global: the global model."
        )
    changed = list(dict.fromkeys(change for cell in cells for change in _changes(recipe, cell)))
    yield f"Different from the paper's setup: {'; '.join(changed) or 'nothing'}."
    share = cells[0].recipe.data.validation_fraction
    if share:
        yield f"{share:.0%} of the training images are held out to choose the best round; the papers train on them."
    over = dict.fromkeys(table.spread for table in tables.values() if table.spread)
    if "clients" in over:
        yield "± is over clients, in both."
    elif over:
        yield f"The paper's ± is over {', '.join(over)}, ours over seeds."
    if any(figure.doubtful for figure in printed):
        yield "?: a doubtful cell of the paper."
    for table in tables.values():
        if table.note:
            yield f"{table.title}: {table.note}."
    seen = [row.figure for row in rows if row.figure]
    missing = dict.fromkeys(_name(f.method, f.evaluation, f.client) for f in printed if f not in seen)
    if missing:
        yield f"In the paper only: {', '.join(missing)}."
    if disagreement := _disagreement(rows):
        yield disagreement


def _changes(recipe: str, cell: Cell) -> list[str]:
    name, options = parse_method(cell.label)
    return differences(with_method(recipes.find(recipe), name, options), cell.recipe)


def _disagreement(rows: Sequence[Row]) -> str:
    """Count the pairs of methods whose order differs from the paper's."""
    whole = [(row.figure.value, row.ours.mean) for row in rows if row.figure and not row.client]
    if len(whole) < 2:
        return ""
    theirs, ours = (np.array(column) for column in zip(*whole, strict=True))
    first, second = np.triu_indices(len(whole), 1)
    agreement = np.sign(theirs[first] - theirs[second]) * np.sign(ours[first] - ours[second])
    return f"{int((agreement < 0).sum())} of {len(agreement)} pairs of methods are ordered differently in the paper."


def named(row: Row) -> str:
    """A row's method with its evaluation, if it is not the usual one, and its client."""
    return _name(row.method, row.evaluation, row.client)


def _name(method: str, evaluation: str, client: str) -> str:
    word = f" ({evaluation.replace('_', '-')})" * (evaluation != "personal")
    return method + word + f" on {client}" * bool(client)


def _ours_text(row: Row, seeds: int) -> str:
    if row.spread is None or row.as_in.spread != "clients":
        return percent(row.ours, seeds)
    return f"{row.ours.mean * 100:.2f}±{row.spread * 100:.2f}"


def printed(row: Row) -> str:
    """The paper's figure as text."""
    if not (figure := row.figure):
        return NONE
    around = "" if figure.spread is None else f"±{figure.spread:.2f}"
    return f"{figure.value:.2f}{around}{'?' * figure.doubtful}"
