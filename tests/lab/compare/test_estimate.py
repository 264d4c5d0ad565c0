"""The duration of a comparison is known before its first cell: from finished cells, from a few steps, or from the costs of methods."""

import json
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge_fl import cli
from edge_fl_lab.compare import cell_runs, comparison, estimate
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.grid import Cell, cells
from edge_fl_server.recipes.recipe import Recipe, with_settings

SMALL = with_settings(Recipe(name="small"), ["data.clients=5", "rounds=8", "method.epochs=2"])
METHODS = ["local", "fedavg", "fedrep", "ditto"]


def grid(recipe: Recipe = SMALL, seeds: int = 1) -> list[Cell]:
    return cells(recipe, METHODS, seeds=seeds, without=["fedavg+ft"])


def finished(cell: Cell, seconds: float, **fields: object) -> CellResult:
    return CellResult(cell.key, cell.label, cell.recipe, seconds=seconds, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings", [[], ["cohort.participation=0.4", "data.fraction=0.5", "method.batch_size=8"]]
)
def test_an_estimate_is_right_within_a_factor_of_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    monkeypatch.setattr(estimate, "SHARE", float("inf"))
    small = grid(with_settings(SMALL, settings))
    short = replace(small[0], recipe=replace(small[0].recipe, rounds=1))
    cell_runs.run([short], tmp_path)  # what is imported first
    found = estimate.of_cells(small, [])
    assert found.measured == len(METHODS) and not found.finished
    for cell in small:
        start = time.process_time()
        (result,) = cell_runs.run([cell], tmp_path)
        assert not result.failure
        took = time.process_time() - start
        assert took / 3 < found.cells[cell.key] < 3 * took, cell


def test_local_costs_as_much_as_others_and_fine_tuning_at_the_end_nothing_more() -> None:
    few = cells(
        with_settings(SMALL, ["cohort.participation=0.2", "evaluate_every=0", "rounds=100"]), ["fedrep"]
    )
    found = estimate.of_cells(few, [])
    local, fedavg, tuned = (found.cells[cell.key] for cell in few[:3])
    assert 0.3 < local / fedavg < 3
    assert tuned == fedavg
    assert len(found.trainings) == 3 and sum(found.trainings) < sum(found.cells.values())
    known = estimate.of_cells(few[1:3], [finished(few[1], 100.0)])
    assert known.seconds(1) == 100, "the training of both"


def test_a_method_with_a_finished_cell_takes_as_long_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "_measured", pytest.fail)
    first, second = grid(seeds=2)[: len(METHODS)], grid(seeds=2)[len(METHODS) :]
    known = [finished(cell, 100.0 * place) for place, cell in enumerate(first, 1)]
    found = estimate.of_cells(second, known)
    assert list(found.cells.values()) == [100.0, 200.0, 300.0, 400.0]
    assert (found.finished, found.measured) == (4, 0)
    assert found.seconds(1) == 1000
    monkeypatch.setattr(estimate.processes, "cores", lambda: 4)
    assert found.seconds(2) == 500
    assert found.seconds(4) == found.seconds(9) == 400, "no less than the longest cell"
    assert (
        found.text(2) == "4 cells, about 8 min with 2 jobs (estimated from the finished cells of 4 methods)"
    )


def test_measuring_ends_when_it_would_take_too_long_and_other_methods_are_estimated_by_their_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def measured(cell: Cell) -> float:
        seen.append(cell.label)
        time.sleep(0.05)
        return 0.1

    monkeypatch.setattr(estimate, "_measured", measured)
    found = estimate.of_cells(small := grid(), [])
    assert seen == ["local"]
    assert found.cells[small[3].key] > 1.5 * found.cells[small[1].key], "ditto trains twice"


def test_a_method_that_cannot_be_measured_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(cell: Cell) -> float:
        if cell.label != "fedavg":
            raise RuntimeError("out of memory")
        return 60.0

    monkeypatch.setattr(estimate, "_measured", measured)
    small = grid()
    found = estimate.of_cells(small, [finished(small[0], 1.0, failure="broken")])
    assert (
        found.measured == 1
        and found.cells[small[1].key] == 60
        and all(each > 0 for each in found.cells.values())
    )
    monkeypatch.setattr(estimate, "_measured", lambda cell: 1 / 0)
    assert estimate.of_cells(small, []).text(1) == "4 cells, unknown time"
    assert estimate.of_cells([], []).text(1) == "no cell is missing"


def test_a_long_comparison_says_how_long_before_its_first_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = grid(with_settings(SMALL, ["rounds=1"]))[:1]
    comparison.run(short, tmp_path / "short")
    assert "estimated from" not in capsys.readouterr().err
    monkeypatch.setattr(comparison, "LONG_S", 0.0)
    comparison.run(short, tmp_path / "long")
    said = capsys.readouterr().err
    assert said.index("1 cell, about ") < said.index("[1/1] local")
    assert "(estimated from a few steps of 1 method, measured in " in said


def test_only_the_estimate_is_printed_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = "compare --methods fedrep --datasets digits --clients 3 --rounds 1 --seeds 1 --estimate".split()
    assert cli.main([*command, "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith("4 cells, about ")
    assert not out.exists()
    assert cli.main([*command, "--jobs", "2", "--out", str(out), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cells"], found["jobs"]) == (4, 2) and 0 < found["seconds"] < 100
    assert cli.main([*command, "--tune"]) == 4
    assert "--estimate: not with --tune" in capsys.readouterr().err


def test_the_time_left_is_known_as_soon_as_one_cell_is_finished() -> None:
    small = grid()
    expected = dict(zip((cell.key for cell in small), (10.0, 20.0, 30.0, 40.0), strict=True))
    with comparison.CellProgress(small, 0, 1, expected) as progress:
        assert progress.seconds_left() == 100
        progress.done(finished(small[0], 11.0))
        assert progress.seconds_left() == 90
