"""A run with exhausted privacy budgets ends with its results so far and its own state: final steps, release, records."""

import csv
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge_fl import metrics
from edge_fl.cli import main
from edge_fl.config import PrivacyConfig
from edge_fl.errors import BudgetExhaustedError
from edge_fl.learn.codec import differential_privacy
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.registry import Database, runs
from edge_fl_server.runs import round_metrics
from edge_fl_server.runs.results import Results, list_runs
from tests.mixed.conftest import Site

FULL, HEADS = ("d1", "d2"), {"h1": "logistic"}
NOISE = PrivacyConfig(noise_multiplier=4.0, clip=0.5)
COST = differential_privacy.cost(NOISE)
TWO_UPDATES = differential_privacy.epsilon(2.5 * COST, NOISE.delta)
EPSILON_SPENT = differential_privacy.epsilon(2 * COST, NOISE.delta)


def frugal(recipe: Recipe, budget: float = TWO_UPDATES) -> Recipe:
    model = replace(recipe.model, options={**recipe.model.options, "norm": False})
    return replace(recipe, model=model, privacy=replace(NOISE, budget=budget))


def only_run(folder: Path) -> Results:
    (found,) = list_runs(folder)
    return Results.open(folder / found.run)


def require_spent(results: Results) -> None:
    state = results.state()
    assert state.state == "budget_exhausted"
    assert (
        "round 3: the privacy budget of all 2 clients is exhausted; the run ends with the model of round 2"
        in state.reason
    )
    assert f"largest epsilon spent: {EPSILON_SPENT:.3g}" in state.reason
    assert [row.round for row in results.rounds()] == [1, 2]
    assert results.summary()[metrics.EPSILON].mean == pytest.approx(EPSILON_SPENT)
    final = round_metrics.lines(results.path / round_metrics.FILE)[-1]
    assert final.final and final.round == 2
    assert metrics.PERSONAL_AFTER in final.clients[next(iter(final.clients))]
    assert "budget_exhausted" in (results.path / "report.html").read_text()


def test_a_fleet_with_an_exhausted_budget_ends_with_final_steps_and_a_release(site: Site) -> None:
    with site.fleet(FULL, HEADS), pytest.raises(BudgetExhaustedError) as ended:
        site.run("fedavg", 5, edit=frugal)
    results = only_run(site.folder / "runs")
    require_spent(results)
    assert ended.value.exit_code == 1 and str(ended.value) == results.state().reason
    rows = {
        row["device"]: row for row in csv.DictReader((results.path / "devices.csv").read_text().splitlines())
    }
    assert [float(rows[id]["epsilon"]) for id in FULL] == [pytest.approx(EPSILON_SPENT)] * 2
    assert (rows["h1"]["epsilon"], rows["h1"]["release"]) == ("", str(len(list(results.artefacts.iterdir()))))
    (known,) = runs.listed(Database.open(site.folder / "server" / "registry.sqlite"), "main")
    assert known.state == "budget_exhausted"


def test_a_simulation_with_an_exhausted_budget_prints_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["model.options.norm=false", "data.fraction=0.1", f"privacy.budget={TWO_UPDATES}"]
    settings += [f"privacy.{name}={getattr(NOISE, name)}" for name in ("noise_multiplier", "clip")]
    given = [part for setting in settings for part in ("--set", setting)]
    where = [
        "--runs",
        str(tmp_path / "runs"),
        "--clients",
        "2",
        "--rounds",
        "4",
        "--set",
        "method.epochs=1",
        *given,
    ]
    assert main(["simulate", "--method", "fedavg", "--dataset", "digits", "--model", "cnn-tiny", *where]) == 1
    said = capsys.readouterr()
    require_spent(only_run(tmp_path / "runs"))
    assert metrics.EPSILON in said.out
    assert said.err.splitlines()[-1].startswith(
        "edge-fl: round 3: the privacy budget of all 2 clients is exhausted"
    )


def test_a_run_without_any_remaining_budget_fails(site: Site) -> None:
    with site.fleet(FULL, {}):
        with pytest.raises(BudgetExhaustedError):
            site.run("fedavg", 5, edit=frugal)
        with pytest.raises(BudgetExhaustedError, match=r"round 1: .* of all 2 clients"):
            site.run("fedavg", 5, edit=frugal)
    assert {run.state for run in list_runs(site.folder / "runs")} == {"budget_exhausted", "failed"}
