"""Built-in recipes match the settings of the papers' tables, build on each other and scale; papers.toml holds the printed figures."""

import json
from pathlib import Path

import numpy as np
import pytest

from edge_fl import toml
from edge_fl.config import MethodConfig, OptimiserConfig
from edge_fl.errors import ConfigError
from edge_fl_lab.compare import paper
from edge_fl_lab.compare.grid import parse_method
from edge_fl_lab.recipe_changes import differences, scaled, with_method
from edge_fl_server import recipes
from edge_fl_server.recipes.recipe import Recipe, with_settings

PAPERS = ("fedcrc", "fedcrl", "fedrir", "dualfed", "repper")


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_is_valid_and_has_a_title(name: str) -> None:
    recipe = recipes.find(name)
    assert recipe.name == name
    assert recipes.title(name)


def test_a_cell_is_a_few_changes_to_its_file() -> None:
    files = [path for path in recipes.FOLDER.glob("*.toml") if path != recipes.PAPERS]
    assert len(files) <= 12
    for path in files:
        for name, cell in toml.read(path).get("cells", {}).items():
            assert name.startswith(f"{path.stem}-") and len(cell) <= 4
            assert recipes.find(name) != recipes.find(path.stem)


@pytest.mark.parametrize("name", PAPERS)
def test_every_method_of_a_paper_exists_with_the_options_it_is_given(name: str) -> None:
    recipe = recipes.find(name)
    for label in [*recipe.compare.methods, *recipe.methods]:
        method, options = parse_method(label)
        chosen = with_method(recipe, method, options).method
        given = (f"{key}={json.dumps(value)}" for key, value in chosen.options.items())
        parse_method(":".join([method, *given]))


# docs/reproducing-the-papers.md: clients, participation, rounds, epochs, batch, optimiser, test share, model.
SETTINGS = {
    "fedcrc-cifar10-dir05": (100, 0.1, 100, 5, 64, ("sgd", 0.05, 0.9, 0.0), 0.2, "cnn4"),
    "fedcrc-cifar100-iid": (100, 0.1, 100, 5, 64, ("sgd", 0.05, 0.9, 0.0), 0.2, "resnet18"),
    "fedcrl-emnist-pathological": (20, 1.0, 500, 1, 16, ("adam", 0.003, 0.0, 0.0), 0.25, "cnn2"),
    "fedrir-fmnist-pathological": (20, 1.0, 1000, 1, 100, ("adam", 5e-4, 0.0, 0.0), 0.25, "cnn2-bn"),
    "fedrir-domainnet": (6, 1.0, 1000, 1, 100, ("adam", 5e-4, 0.0, 0.0), 0.25, "cnn2-bn"),
    "dualfed-officehome": (4, 1.0, 300, 1, 256, ("sgd", 0.01, 0.5, 0.0), 0.25, "torchvision:resnet18"),
    "repper-cifar10-c08-iid-e20": (20, 0.8, 100, 20, 256, ("adam", 0.001, 0.0, 1e-4), 0.25, "resnet34"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_recipe_is_the_papers_setting(name: str) -> None:
    r = recipes.find(name)
    o = r.method.optimiser
    found = (r.data.clients, r.cohort.participation, r.rounds, r.method.epochs, r.method.batch_size)
    optimiser = (o.name, o.lr, o.momentum, o.weight_decay)
    assert (*found, optimiser, r.data.test_fraction, r.model.name) == SETTINGS[name]


def test_partitions_of_the_tables() -> None:
    pathological = recipes.find("fedrir-cifar100-pathological").data
    assert (pathological.partition, pathological.classes_per_client) == ("pathological", 10)
    assert recipes.find("fedcrl-cifar10-dir001").data.beta == 0.01
    assert recipes.find("fedcrc-mnist-iid").data.partition == "iid"
    assert recipes.find("fedcrc-cifar10-dir05").data.partition == "dirichlet-clients"
    papers = [name for name in recipes.names() if name.startswith(PAPERS)]
    assert all(recipes.find(name).data.validation_fraction == 0 for name in papers)
    assert recipes.find("fedrir-fmnist-rho01").cohort.participation_from == 0.1
    assert recipes.find("fedcrc-newclients-dir01").data.unseen == 40
    assert recipes.find("dualfed-pacs").data.max_train == 500


def test_dualfed_s_baselines_train_as_in_its_paper() -> None:
    table = recipes.find("dualfed-pacs")
    found = {name: with_method(table, name).method for name in ("dualfed", "fedper", "fedbn")}
    assert {one.augment for one in found.values()} == {"flip-rotate"}
    assert [one.projector for one in found.values()] == [False, True, True]
    assert [one.batch_norm for one in found.values()] == ["local_stats", "local_stats", ""]


def test_another_method_does_not_keep_the_options_of_the_base() -> None:
    base = recipes.find("fedcrc-cifar10-dir01")
    assert base.method.options
    changed = with_settings(base, ["method.name=fedavg"])
    assert changed.method.options == {}


def test_the_robust_recipe_is_the_demo_with_another_centre() -> None:
    robust = recipes.find("robust")
    assert (robust.method.name, robust.method.options, robust.method.epochs) == ("fedavg", {}, 5)
    assert robust.validation.centre == "geometric"


def test_a_recipe_file_changes_only_the_given_values_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "fedrir-fmnist-dir01"\nrounds = 3\n[data]\nclients = 5\n')
    mine, base = recipes.find(str(tmp_path / "mine.toml")), recipes.find("fedrir-fmnist-dir01")
    assert differences(base, mine) == ["rounds: 1000 -> 3", "data.clients: 20 -> 5"]


def test_an_unknown_base_or_recipe_is_rejected_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "fedrirr"\n')
    with pytest.raises(ConfigError, match=r"base = 'fedrirr'.*did you mean 'fedrir'"):
        recipes.find(str(tmp_path / "mine.toml"))
    with pytest.raises(ConfigError, match="did you mean 'fedrir-fmnist-dir0"):
        recipes.find("fedrir-fmnist-dir02")


def test_methods_of_a_table_share_its_settings_except_for_its_own_changes() -> None:
    table = recipes.find("fedcrc-cifar10-dir01")
    fedprox, fedrep = with_method(table, "fedprox").method, with_method(table, "fedrep").method
    assert fedprox == MethodConfig("fedprox", 5, 64, table.method.optimiser, {"mu": 0.1})
    assert fedrep == MethodConfig("fedrep", 1, 64, table.method.optimiser, {"head_epochs": 4})
    assert with_method(table, "fedprox+ft").method.options == {"mu": 0.1}
    assert with_method(table, "repper").method.optimiser == table.method.optimiser
    assert with_method(table, "fedcrc", {"tau": 0.5}).method.options == {
        "tau": 0.5,
        "refresh_personal": False,
    }


def test_outside_a_table_a_method_uses_its_usual_optimiser() -> None:
    assert with_method(Recipe(), "repper").method.optimiser == OptimiserConfig(
        "adam", 0.001, weight_decay=1e-4
    )
    assert with_method(Recipe(), "fedrep").method.optimiser == Recipe().method.optimiser


def test_scaling_shrinks_rounds_data_and_schedules_together() -> None:
    whole, small = recipes.find("fedcrc"), scaled(recipes.find("fedcrc"), 0.1)
    assert (small.rounds, small.data.fraction) == (10, 0.1)
    assert small.method.optimiser.lr_steps == [
        (6, 0.2),
        (8, 0.02),
    ]  # the shares of rounds before them are kept
    assert small.data.clients == whole.data.clients and small.method.epochs == whole.method.epochs
    assert scaled(recipes.find("dualfed"), 0.1).data.max_train == 50
    assert scaled(whole, 1e-6).rounds == 1
    assert scaled(whole, 1) == whole
    assert differences(whole, small)[:2] == ["rounds: 100 -> 10", "data.fraction: 1 -> 0.1"]


def test_every_column_of_the_papers_is_a_recipe_and_every_row_a_method() -> None:
    for table in paper.tables():
        for column in table.columns:
            assert column.partition("/")[0] in recipes.names(), column
        for row, cells in table.rows.items():
            parse_method(row.partition("@")[0])
            assert len(cells.split()) == len(table.columns), (table.title, row)


def test_every_setting_of_a_table_has_its_figures() -> None:
    settings = [name for name in recipes.names() if "-" in name]
    assert len(settings) == 75
    for name in settings:
        assert paper.figures(name)


def test_printed_averages_follow_from_the_cells() -> None:
    """FedCRL prints the mean of every column, DualFed of every row, which reveals a mistyped figure."""
    averages = {
        "fedcrl-cifar10-dir01": (83.83, 8.21),
        "fedcrl-emnist-dir01": (94.125, 2.86),
        "fedcrl-cifar100-dir01": (46.43, 5.15),
        "fedcrl-cifar10-pathological": (83.95, 9.00),
        "fedcrl-emnist-pathological": (92.59, 4.02),
        "fedcrl-cifar100-pathological": (46.34, 5.15),
        "fedcrl-cifar10-dir1": (69.24, 5.04),
    }
    for recipe, (mean, spread) in averages.items():
        cells = paper.figures(recipe)
        assert np.mean([cell.value for cell in cells]) == pytest.approx(mean, abs=0.02)
        assert np.mean([cell.spread or 0 for cell in cells]) == pytest.approx(spread, abs=0.02)
    for recipe in ("dualfed-pacs", "dualfed-domainnet", "dualfed-officehome"):
        cells = paper.figures(recipe)
        for method in {cell.method for cell in cells}:
            domains = [cell for cell in cells if cell.method == method and cell.client]
            printed = next(cell for cell in cells if cell.method == method and not cell.client)
            agrees = abs(np.mean([cell.value for cell in domains]) - printed.value) < 0.015
            assert agrees or any(cell.doubtful for cell in domains), (recipe, method)


def test_a_printed_cell_is_read_with_its_spread_and_its_doubt() -> None:
    figures = {(f.method, f.evaluation): f for f in paper.figures("fedrir-fmnist-pathological")}
    fedavg = figures["fedavg", "personal"]
    assert (fedavg.value, fedavg.spread, fedavg.table.spread, fedavg.doubtful) == (
        86.01,
        0.15,
        "repeats",
        True,
    )
    crc = {(f.method, f.evaluation): f.value for f in paper.figures("fedcrc-cifar10-dir01")}
    assert crc["fedcrc", "global"] == 64.61 and crc["fedcrc", "personal"] == 79.4
    assert not [f for f in paper.figures("fedcrl-cifar10-dir001") if f.method == "fedpac"]
