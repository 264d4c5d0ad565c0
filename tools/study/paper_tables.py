"""The comparisons of docs/reproducing-the-papers.md: summaries of finished cells, and the page's tables from these.

python -m tools.study.paper_tables keep FOLDER ...   of a comparison's folder: its finished cells, to docs/paper-tables/
python -m tools.study.paper_tables page              write the tables of the page anew

A summary is a cell without the values of its clients and without the rounds that were not evaluated. The page has a place for each recipe,
`<!-- table: RECIPE -->` to `<!-- end of table -->`, or `<!-- rounds: RECIPE -->` for the same figures round by round. A test compares the
page with the summaries.
"""

import argparse
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec.structs import replace

from edge_fl.console import tables as renderers
from edge_fl.console.tables import Table
from edge_fl.files import atomic
from edge_fl_lab.compare import grid, paper
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.grid import Cell
from edge_fl_server import recipes

ROOT = Path(__file__).parents[2]
SUMMARIES, PAGE = ROOT / "docs" / "paper-tables", ROOT / "docs" / "reproducing-the-papers.md"
PLACE = re.compile(
    r"(<!-- (?P<form>table|rounds): (?P<recipe>\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL
)
COLUMNS = 8  # of rounds
HOUR = 3600.0


class Kept(msgspec.Struct, frozen=True):
    """A summary: the machine's processor, its hours for all training of the cell, and the result without the clients' values."""

    processor: str
    hours: float
    result: CellResult


def keep(folder: Path, to: Path = SUMMARIES) -> list[Path]:
    """Store summaries of a comparison's finished cells, named after method, dataset, partition and seed."""
    oldest_first = sorted(folder.glob("cells/*.json"), key=lambda path: path.stat().st_mtime_ns)
    found = [msgspec.json.decode(path.read_bytes(), type=CellResult) for path in oldest_first]
    newest = {result.key: result for result in found}.values()
    paths = []
    for result in sorted(newest, key=lambda each: each.label):
        if not result.failure:
            measured = [point for point in result.curve if point.means]
            kept = Kept(_processor(), _hours(result), replace(result, clients={}, highest={}, curve=measured))
            name = re.sub(r"[^a-z0-9.]+", "-", str(Cell(result.label, result.recipe)))
            content = msgspec.json.format(msgspec.json.encode(kept), indent=1).decode() + "\n"
            paths.append(atomic.save(to / f"{name}.json", content, "nothing else was changed"))
    return paths


def summaries(folder: Path = SUMMARIES) -> list[Kept]:
    """All stored summaries."""
    return [msgspec.json.decode(path.read_bytes(), type=Kept) for path in sorted(folder.glob("*.json"))]


def of_recipe(name: str, stored: Sequence[Kept]) -> tuple[list[Cell], Mapping[str, Kept]]:
    """The cells of a recipe, with as many seeds as there are, and the summaries of those that were run, by key."""
    recipe = recipes.find(name)
    seeds = 1 + max((kept.result.recipe.seed for kept in stored), default=0)
    known = {kept.result.key: kept for kept in stored}
    rounds = {kept.result.recipe.rounds for kept in stored if kept.result.recipe.data == recipe.data}
    cells: list[Cell] = []
    for number in sorted({recipe.rounds, *rounds}):
        cells += grid.cells(replace(recipe, rounds=number), recipe.compare.methods, seeds=seeds)
    return cells, {cell.key: known[cell.key] for cell in cells if cell.key in known}


def table(name: str, stored: Sequence[Kept]) -> Table:
    """Ours next to the paper's, with the standard deviation over clients and what it cost."""
    cells, kept = of_recipe(name, stored)
    results = {key: each.result for key, each in kept.items()}
    compared = paper.against(name, cells, results)
    ran = [cell for cell in cells if cell.key in results]
    hours: dict[str, list[float]] = {}
    for cell in ran:
        hours.setdefault(cell.label, []).append(kept[cell.key].hours)
    notes = [*compared.notes, *_provenance(kept)]
    body = []
    for row, shown in zip(paper.rows_of(name, cells, results), compared.rows, strict=True):
        std = "-" if row.spread is None else f"{row.spread * 100:.2f}"
        body.append([*shown[:2], std, *shown[2:-1], f"{sum(hours[row.method]):.2f}"])
    headings = [*compared.headings[:2], "std over clients", *compared.headings[2:-1], "hours"]
    return Table(headings, body, compared.title, notes, headings[1:])


def by_round(name: str, stored: Sequence[Kept]) -> Table:
    """Ours after some of the evaluated rounds, as the paper computes its own, next to the paper's last figure; means over seeds."""
    cells, kept = of_recipe(name, stored)
    results = {key: each.result for key, each in kept.items()}
    curves: list[tuple[paper.Row, dict[int, float]]] = []
    for row in paper.rows_of(name, cells, results):
        of_method = [results[cell.key] for cell in cells if cell.key in results and cell.label == row.method]
        if row.figure and (curve := _curve(of_method, row)):
            curves.append((row, curve))
    evaluated = sorted({round for _, curve in curves for round in curve}, reverse=True)
    shown = sorted(evaluated[:: max(len(evaluated) // COLUMNS, 1)])
    body = []
    for row, curve in curves:
        values = [f"{curve[round] * 100:.2f}" if round in curve else paper.NONE for round in shown]
        body.append([paper.named(row), *values, paper.printed(row)])
    headings = ["method", *(f"round {round}" for round in shown), "paper, at its end"]
    return Table(headings, body, f"{name} round by round", [], headings[1:])


def _curve(results: Sequence[CellResult], row: paper.Row) -> dict[int, float]:
    """Accuracy after each evaluated round, 0..1, mean over the runs, with the mean over clients that the row has."""
    metric = paper.EVALUATIONS[row.evaluation][0]
    found: dict[int, list[float]] = {}
    for point in (point for result in results for point in result.curve):
        means = point.weighted if row.as_in.mean == "samples" else point.means
        if metric in means:
            found.setdefault(point.round, []).append(means[metric])
    return {round: fmean(values) for round, values in found.items()}


FORMS = {"table": table, "rounds": by_round}


def page(text: str, stored: Sequence[Kept]) -> str:
    """The page with its tables written anew."""

    def written(found: re.Match[str]) -> str:
        shown = FORMS[found["form"]](found["recipe"], stored)
        return f"{found[1]}{renderers.RENDERERS['md'](shown).strip()}\n{found[4]}"

    return PLACE.sub(written, text)


def _provenance(kept: Mapping[str, Kept]) -> Iterator[str]:
    every = list(kept.values())
    seeds = len({each.result.recipe.seed for each in every})
    processors = ", ".join(sorted({each.processor for each in every}))
    commits = ", ".join(sorted({each.result.commit[:12] for each in every}))
    total = sum(each.hours for each in every)
    yield (
        f"{seeds} seed{'s' * (seeds != 1)}; hours: processor time of the clients' training, on one core of {processors}, {total:.1f} in"
        f" all; commit {commits}."
    )


def _hours(result: CellResult) -> float:
    """Processor hours of all training: how long the cell took in all depends on what else the machine did."""
    rounds = sum(point.device_seconds * point.clients for point in result.curve)
    return round((rounds + result.final_seconds * len(result.clients)) / HOUR, 6)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.study.paper_tables", description=__doc__)
    parser.add_argument("action", choices=["keep", "page"])
    parser.add_argument("folders", nargs="*", type=Path)
    given = parser.parse_args(arguments)
    if given.action == "keep":
        for path in [path for folder in given.folders for path in keep(folder)]:
            print(path)
    else:
        atomic.save(PAGE, page(PAGE.read_text(), summaries()), "the page is as it was")
        print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
