"""The tables of docs/reproducing-the-papers.md follow from the summaries of cells that are stored next to it."""

from pathlib import Path

import msgspec

from edge_fl import metrics
from edge_fl.metrics import Summary
from edge_fl_lab.compare import cell_runs, grid
from edge_fl_lab.compare.cell_runs import CellResult, Point
from edge_fl_server import recipes
from edge_fl_server.recipes.recipe import with_settings
from tools.study import paper_tables


def test_the_page_has_the_tables_of_the_stored_summaries() -> None:
    page = paper_tables.PAGE.read_text()
    assert paper_tables.page(page, paper_tables.summaries()) == page, (
        "run python -m tools.study.paper_tables page"
    )


def test_every_summary_is_of_a_paper_s_own_setting_apart_from_the_rounds() -> None:
    shown = {found["recipe"] for found in paper_tables.PLACE.finditer(paper_tables.PAGE.read_text())}
    stored = paper_tables.summaries()
    used = {key for name in shown for key in paper_tables.of_recipe(name, stored)[1]}
    assert {kept.result.key for kept in stored} == used


def test_a_finished_cell_is_kept_without_its_clients_and_read_back_into_a_table(tmp_path: Path) -> None:
    recipe = recipes.find("fedcrc-mnist-dir01")
    small = with_settings(
        recipe,
        [
            'data.dataset="digits"',
            "data.clients=5",
            "rounds=1",
            "evaluate_every=1",
            'model={name="cnn-tiny"}',
            "method.epochs=1",
        ],
    )
    (cell,) = [each for each in grid.cells(small, ["fedper"]) if each.label == "fedper"]
    (ran,) = cell_runs.run([cell], tmp_path)
    cell_runs.write(CellResult("0" * 24, "fedrep", cell.recipe, failure="diverged"), tmp_path)
    (path,) = paper_tables.keep(tmp_path, tmp_path / "kept")
    assert path.name == "fedper-digits-dirichlet-clients-0.1-seed-0.json"
    (kept,) = paper_tables.summaries(tmp_path / "kept")
    assert kept.processor and kept.result.last == ran.last and not kept.result.clients and ran.clients
    as_printed = msgspec.structs.replace(
        kept.result,
        recipe=recipe,
        key=next(c.key for c in grid.cells(recipe, ["fedper"]) if c.label == "fedper"),
    )
    table = paper_tables.table("fedcrc-mnist-dir01", [paper_tables.Kept("a processor", 0.5, as_printed)])
    (row, *_) = table.rows
    assert (
        row[0] == "fedper"
        and row[1] == f"{ran.last['personal.test_acc.after'].mean * 100:.2f}"
        and row[4] == "97.05"
    )
    assert row[-1] == "0.50" and "on one core of a processor, 0.5 in all" in table.notes[-1]
    assert 0 < kept.hours < ran.seconds / 3600


def test_round_by_round_the_figures_are_those_of_the_curve_with_the_mean_of_the_paper() -> None:
    recipe = with_settings(recipes.find("fedcrl-cifar10-dir01"), ["rounds=20"])
    cell = next(cell for cell in grid.cells(recipe, ["fedrep"]) if cell.label == "fedrep")
    name = metrics.PERSONAL_BEFORE
    curve = [
        Point(round, 1.0, 0, 0, 20, {name: 0.01 * round}, {name: 0.02 * round}) for round in range(1, 21)
    ]
    last = {metrics.PERSONAL_AFTER: Summary(0.2, 0.4, 0.1, 0.1, 20)}
    ran = CellResult(cell.key, cell.label, cell.recipe, curve=curve, last=last)
    table = paper_tables.by_round("fedcrl-cifar10-dir01", [paper_tables.Kept("a processor", 0.5, ran)])
    assert table.headings[-3:] == ["round 18", "round 20", "paper, at its end"]
    assert table.rows == [["fedrep", *(f"{2 * round:.2f}" for round in range(2, 21, 2)), "90.66±6.28"]]
