"""A tuned comparison: equally many trials for every method on validation data, paired differences, and what they cost."""

import csv
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from edge_fl import cli
from edge_fl.errors import InputError, MethodError
from edge_fl.methods import METHODS
from edge_fl.methods.finetuned import FineTuned
from edge_fl.metrics import (
    PERSONAL_AFTER,
    PERSONAL_BEFORE,
    PERSONAL_VALIDATION_AFTER,
    Summary,
    summarise_reports,
)
from edge_fl_lab.compare import summary, tables, tuning
from edge_fl_lab.compare.cell_runs import CellResult, Point
from edge_fl_lab.compare.grid import Cell, cells
from edge_fl_lab.compare.tuning import Tuning
from edge_fl_server.recipes.recipe import Recipe, with_settings

TINY = with_settings(
    Recipe(name="tiny"),
    ["data.clients=3", "data.fraction=0.2", "rounds=1", "model.options={feature_dim=8, width=4}"],
)
COMMAND = "compare --methods local --datasets digits --clients 3 --rounds 1 --seeds 1 --set data.fraction=0.2 --set".split()
SMALL = [*COMMAND, "model.options={feature_dim=8, width=4}"]


def trained(cell: Cell, validation: float, clients: Mapping[str, float] | None = None) -> CellResult:
    reports = {client: {PERSONAL_AFTER: value} for client, value in (clients or {}).items()}
    last = {PERSONAL_VALIDATION_AFTER: Summary(validation, validation, 0.0, validation, 3)}
    if reports:
        last |= summarise_reports(list(reports.values()))
    return CellResult(cell.key, cell.label, cell.recipe, last=last, clients=reports)


def search(
    methods: Sequence[str], accuracy: Callable[[Recipe], float], trials: int = 6, seeds: int = 2
) -> list[Tuning]:
    """Search with results that are computed from the recipe instead of trained; a negative accuracy is a failure."""

    def run(some: Sequence[Cell]) -> dict[str, CellResult]:
        found = {cell.key: (cell, accuracy(cell.recipe)) for cell in some}
        return {
            key: trained(cell, value)
            if value >= 0
            else CellResult(key, cell.label, cell.recipe, failure="diverged")
            for key, (cell, value) in found.items()
        }

    return tuning.search(cells(TINY, methods, seeds=seeds), run, trials)


def test_the_documented_values_are_those_of_the_methods() -> None:
    page = Path(__file__).parents[3] / "docs" / "research.md"
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \|$",
        page.read_text().partition("### Values that are tried")[2],
        re.MULTILINE,
    )
    stated = {
        name: re.findall(r"`(\w+)` ([^;]+)", text) for name, text in rows if name not in ("method", "---")
    }
    assert stated == {
        name: [(key, ", ".join(map(tables.value_text, values))) for key, values in method.grid.items()]
        for name, method in {**METHODS, "+ft": FineTuned}.items()
    }


def rates(found: Tuning) -> list[object]:
    return [trial.values["lr"] for trial in found.trials]


@pytest.mark.parametrize("trials", [2, 6, 9])
def test_every_method_has_the_same_number_of_different_trials_and_the_first_is_untuned(trials: int) -> None:
    methods = ["fedrep", "fedprox", "fedcrl", "dualfed", "fedprox+ft"]
    found = search(methods, lambda recipe: recipe.method.optimiser.lr, trials)
    assert [each.method for each in found] == ["local", "fedavg", "fedavg+ft", *methods]
    assert {len({trial.key for trial in each.trials}) for each in found} == {trials}
    untuned = {cell.label: cell.key for cell in cells(TINY, methods)}
    assert {each.method: each.trials[0].key for each in found} == untuned
    assert {each.seed for each in found} == {0}


def test_learning_rates_are_tried_on_both_sides_of_the_best_one() -> None:
    upwards = search([], lambda recipe: recipe.method.optimiser.lr)[0]
    assert rates(upwards) == [0.05, 0.15, 0.017, 0.45, 0.087, 1.4] and upwards.chosen == {"lr": 1.4}
    within = search([], lambda recipe: 1 - abs(recipe.method.optimiser.lr - 0.05))[0]
    assert rates(within) == [0.05, 0.15, 0.017, 0.087, 0.029, 0.066] and within.chosen == within.default


def test_hyper_parameters_are_tried_at_the_best_learning_rate() -> None:
    def accuracy(recipe: Recipe) -> float:
        return recipe.method.optimiser.lr + 0.1 * (recipe.method.options.get("tau") == 0.5)

    found = search(["fedcrc"], accuracy)[-1]
    assert [trial.values for trial in found.trials[3:5]] == [
        {"lr": 0.15, "tau": 0.5},
        {"lr": 0.15, "tau": 0.9},
    ]
    assert found.trials[5].values == {"lr": 0.45, "tau": 0.5}
    (fixed,) = [each for each in search(["fedcrc:tau=0.9"], accuracy) if each.method == "fedcrc:tau=0.9"]
    assert set(fixed.chosen) == {"lr"}


def test_a_failed_trial_is_never_chosen_and_of_equal_ones_the_untuned() -> None:
    found = search([], lambda recipe: -1.0 if recipe.method.optimiser.lr > 0.1 else 0.5)[0]
    assert found.chosen == found.default
    assert [trial.failure for trial in found.trials[:2]] == ["", "diverged"]
    assert search([], lambda recipe: -1.0)[0].chosen == {"lr": 0.05}


def test_the_chosen_values_go_to_all_seeds_and_default_values_leave_the_cell_as_it_is() -> None:
    grid = cells(TINY, ["fedcrc"], seeds=2)
    same = search(["fedcrc"], lambda recipe: 0.5)
    assert [cell.key for cell in tuning.tuned(grid, same)] == [cell.key for cell in grid]
    best = search(["fedcrc"], lambda recipe: recipe.method.options.get("tau", 0.0) == 0.9)  # type: ignore[arg-type]
    crc = [cell.recipe for cell in tuning.tuned(grid, best) if cell.label == "fedcrc"]
    assert [(recipe.seed, recipe.method.options) for recipe in crc] == [(0, {"tau": 0.9}), (1, {"tau": 0.9})]


def test_own_values_replace_those_of_the_method_and_are_checked() -> None:
    grids = tuning.parse_grids(["fedcrc:tau=0.7,0.8", "fedavg+ft:ft_lr=0.3"])
    assert grids == {"fedcrc": {"tau": [0.7, 0.8]}, "fedavg+ft": {"ft_lr": [0.3]}}
    tried = [cell.recipe.method.options for cell in tuning.variants(cells(TINY, ["fedcrc"]), grids)]
    assert tried == [{"ft_lr": 0.3}, {"tau": 0.7}, {"tau": 0.8}]
    with pytest.raises(InputError, match="fedcrc is not compared"):
        tuning.variants(cells(TINY, []), grids)
    for wrong in ("fedcrc:tau=0.5,2", "nope:tau=0.5", "fedcrc:nope=1"):
        with pytest.raises(MethodError):
            tuning.parse_grids([wrong])
    for wrong in ("fedcrc", "fedcrc:tau", "fedcrc:tau=", "fedcrc:tau=0.5,"):
        with pytest.raises(InputError, match="expected METHOD:OPTION=VALUE,VALUE"):
            tuning.parse_grids([wrong])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tune", "--tune-values", "fedprox:mu=-1"], "mu = -1, expected 0 to inf"),
        (["--tune-values", "fedprox:mu=1"], "only with --tune"),
        (["--tune", "--set", "data.validation_fraction=0"], "has no validation samples"),
    ],
)
def test_wrong_input_is_one_line_and_nothing_starts(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*SMALL, *more, "--out", str(tmp_path / "out")]) == 4
    said = capsys.readouterr().err.strip()
    assert message in said and len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_differences_are_paired_by_client_with_students_t_over_three_seeds() -> None:
    theirs = {seed: {"c0": 0.5, "c1": 0.9} for seed in (0, 1, 2)}
    ours = {seed: {"c0": 0.6 + seed / 10, "c1": 1.0 + seed / 10} for seed in (0, 1, 2)}
    found = summary.difference("local", theirs, ours)
    assert found is not None and (found.over, found.seeds, found.pairs) == ("seeds", 3, 6)
    assert found.by_seed == pytest.approx({0: 0.1, 1: 0.2, 2: 0.3})
    assert (found.mean, found.low, found.high) == pytest.approx(
        (0.2, 0.2 - 0.248414, 0.2 + 0.248414), abs=1e-6
    )  # t 4.302653
    two = summary.difference("local", {0: theirs[0]}, {0: {"c0": 0.6, "c1": 0.9, "c9": 0.0}})
    assert two is not None and (two.over, two.pairs) == ("clients", 2)
    assert (two.mean, two.high) == pytest.approx((0.05, 0.05 + 0.05 * 12.706205))
    assert summary.difference("local", theirs, {7: ours[0]}) is None


def test_every_method_is_compared_with_each_baseline_also_without_validation_data() -> None:
    grid = cells(TINY, ["fedrep"])
    test = {"local": 0.9, "fedavg": 0.5, "fedavg+ft": 0.7, "fedrep": 0.6}
    results = {cell.key: trained(cell, 0.0, {"c0": test[cell.label]}) for cell in grid}
    same = tuning.search(grid, lambda some: {c.key: trained(c, 0.5) for c in some}, 2)
    found = summary.rows(tuning.tuned(grid, same), results)
    before = summary.rows(grid, {cell.key: trained(cell, 0.5, {"c0": 0.3}) for cell in grid})
    tuned = [tables.TunedRow(*each) for each in zip(same, found, before, strict=True)]
    rows = {row.method: row for row in found}
    assert list(rows["fedavg"].differences) == ["local", "fedavg+ft"]
    gains = {label: gain.mean for label, gain in rows["fedrep"].differences.items()}
    assert gains == pytest.approx({"local": -0.3, "fedavg": 0.1, "fedavg+ft": -0.1})
    (table,) = tables.tuned_tables(tuned, grid)
    assert dict(zip(table.headings[:7], table.rows[-1], strict=False)) == {
        "method": "fedrep",
        "tuned to": "lr 0.05, head_epochs 4",
        "tuned": "60.00",
        "untuned": "30.00",
        "minus local": "-30.00",
        "minus fedavg": "+10.00",
        "minus fedavg+ft": "-10.00",
    }
    assert "- minus BASELINE: tuned, minus that of the baseline, which is tuned too," in " ".join(table.notes)


def test_costs_are_cumulative_and_of_one_client() -> None:
    (cell, *_) = cells(TINY, [])
    curve = [Point(n, 9.0, 20, 10, 2, {PERSONAL_AFTER: 0.5}, device_seconds=0.25) for n in (1, 2)]
    result = CellResult(cell.key, cell.label, cell.recipe, curve=curve, final_seconds=1.5)
    costs = [(cost.bytes_down, cost.bytes_up, cost.device_seconds) for cost in summary.cumulative(result)]
    assert costs == [(10, 5, 0.25), (20, 10, 0.5), (20, 10, 2.0)]
    assert [line["round"] for line in summary.curve(cell, result)] == [1, 2, "final"]


def test_a_tuned_comparison_is_saved_and_a_second_call_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*SMALL, "--tune", "--tune-trials", "2", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    tree = json.loads((tmp_path / "table.json").read_text())
    assert [len(entry["trials"]) for entry in tree["tuning"]] == [2, 2, 2]
    (local, *_) = tree["tuning"]
    best = max(local["trials"], key=lambda trial: trial["validation"])
    assert local["chosen"] == best["values"] and local["tuned"]["keys"]["0"] == best["key"]
    assert "| fedavg+ft | lr " in (tmp_path / "table.md").read_text()
    records = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    assert (
        records[0]["chosen"] == tables.values_text(local["chosen"])
        and float(records[1]["device_seconds"]) > 0
    )
    lines = list(csv.DictReader((tmp_path / "curves.csv").read_text().splitlines()))
    assert [line["round"] for line in lines] == ["1", "final"] * 3
    assert 0 < float(lines[4]["device_seconds"]) < float(lines[5]["device_seconds"])  # FedAvg+FT
    weighted = f"{PERSONAL_BEFORE}.weighted_mean"  # PFLlib's Averaged Test Accuracy
    assert all(0 < float(line[weighted]) <= 1 for line in lines)
    assert any(line[weighted] != line[PERSONAL_BEFORE] for line in lines)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    capsys.readouterr()
    assert cli.main(command) == 0 and "0 cells to run" in capsys.readouterr().err
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()} == before
