"""A comparison as one self-contained page: verdict, paired differences, figures and tables by dataset and partition."""

from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path

from msgspec import Struct

from edge_fl import metrics
from edge_fl.console import units
from edge_fl.console.progress import Watch, unwatched
from edge_fl.console.tables import Table
from edge_fl_lab.compare import paired, summary
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.grid import ALWAYS, Cell, blocks
from edge_fl_lab.compare.paired import PairedDifference
from edge_fl_lab.compare.summary import MethodRow
from edge_fl_lab.compare.tables import conditions
from edge_fl_lab.report import comparison_plots, gains, page, style

NAME = "comparison.html"


class Block(Struct, frozen=True):
    """The methods on one dataset and partition; `chosen` has the highest validation accuracy, `baseline` that of the baselines."""

    where: str
    conditions: str
    rows: tuple[MethodRow, ...]
    chosen: str
    baseline: str


def write(
    folder: Path,
    tables: Sequence[Table],
    cells: Sequence[Cell],
    results: Mapping[str, CellResult],
    watch: Watch = unwatched,
) -> Path:
    """Write the page of a comparison and return its path. Raises RunError if it cannot be written."""
    figures = [
        (drawn, page.inlined(drawn)) for drawn in comparison_plots.of_cells(cells, results, folder, watch)
    ]
    found = [block(cells, results, where) for where, _ in blocks(cells)]
    drawn = (
        page.templates()
        .get_template("comparison.html.j2")
        .render(
            name=folder.name,
            blocks=found,
            verdict=verdict,
            figures=figures,
            tables=tables,
            failures=[
                (cell, results[cell.key].failure)
                for cell in cells
                if cell.key in results and results[cell.key].failure
            ],
            cells=[(cell, results[cell.key]) for cell in cells if cell.key in results],
            percent=units.percent,
            difference=difference_text,
        )
    )
    return style.write(folder / NAME, drawn)


def block(cells: Sequence[Cell], results: Mapping[str, CellResult], where: tuple[str, str]) -> Block:
    """Compare the methods of one dataset and partition with the baseline of the highest validation accuracy."""
    inside = [cell for cell in cells if cell.block == where]
    rows = tuple(row for row in summary.rows(inside, results) if metrics.PERSONAL_AFTER in row.numbers)
    scores = {row.method: paired.score(paired.of_method(row.method, where, inside, results)) for row in rows}
    chosen = max(scores, key=lambda label: scores[label]) if any(scores.values()) else ""
    best = paired.best_baseline(where, inside, results)
    return Block(", ".join(where), conditions(inside[0].recipe), rows, chosen, best)


def verdict(found: Block) -> str:
    """One sentence: the method with the highest validation accuracy, and what it gains over the best baseline."""
    if not found.rows:
        return "All cells failed."
    if not found.chosen:
        return "Without validation data no method is selected; the table has their test accuracies."
    row = next(row for row in found.rows if row.method == found.chosen)
    seeds = f"{row.accuracy.count} seed{'s' * (row.accuracy.count != 1)}"
    reached = f"{units.percent(row.accuracy.mean)} of the test images (mean over {seeds}, {row.clients} pairs of client and seed)"
    if found.chosen in ALWAYS:
        return f"By validation accuracy no method is better than the baseline {found.chosen}, which classifies {reached} correctly."
    gain = f", {difference_text(row.difference)}" if row.difference else ""
    return f"Of {len(found.rows)} methods {found.chosen} has the highest validation accuracy and classifies {reached} correctly{gain}."


def difference_text(found: PairedDifference) -> str:
    """Format a paired difference with its interval and n."""
    n = f"n = {found.seeds} seeds" if found.over == "seeds" else f"n = {found.pairs} clients"
    low, high = (None if isnan(end) else end for end in (found.low, found.high))
    return gains.compared(found.baseline, found.mean, low, high, n)
