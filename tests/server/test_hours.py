"""Hours of a whole comparison, as `edge-fl recipes list` shows them."""

import json
import subprocess
import sys

import pytest

from edge_fl import cli
from edge_fl.methods import METHODS
from edge_fl_server import recipes
from edge_fl_server.recipes import hours
from edge_fl_server.recipes.recipe import with_settings


@pytest.mark.parametrize(
    ("recipe", "method", "seconds_of_a_round"),
    [
        ("fedcrc-cifar10-dir01", "fedavg", 26.5 + 8.5 / 10),
        ("fedcrc-cifar10-dir01", "fedcrc", 27.5 + 8.5 / 10),
        ("fedcrl-cifar10-dir01", "fedcrl", 36.0),
        ("fedrir-fmnist-dir01", "fedrir", 80.0),
    ],
)
def test_a_round_takes_as_long_as_it_was_measured_to_within_a_factor_of_two(
    recipe: str, method: str, seconds_of_a_round: float
) -> None:
    """Measured in whole runs, on the machine of the costs."""
    found = recipes.find(recipe)
    seconds = hours.of_cell(found, method)
    assert seconds and 0.5 < seconds / found.rounds / seconds_of_a_round < 2


def test_hours_follow_the_size_of_a_comparison() -> None:
    base = recipes.find("fedcrl-cifar10-dir01")

    def ratio(*settings: str, method: str = "fedavg") -> float:
        found, usual = (hours.of_cell(each, method) for each in (with_settings(base, settings), base))
        assert found and usual
        return found / usual

    assert ratio("rounds=250") == pytest.approx(0.5)
    assert ratio("data.fraction=0.1") == pytest.approx(0.1)
    assert ratio("cohort.participation=0.1", "evaluate_every=0") < 0.12
    assert ratio("cohort.participation=0.1", "evaluate_every=0", method="local") < 0.12
    assert ratio("cohort.participation_from=0.5", "evaluate_every=0") == pytest.approx(
        0.75 * ratio("evaluate_every=0")
    )
    assert 1.6 < ratio("method.epochs=2") < 2
    assert ratio("data.max_train=225") < 0.2
    trained = ["local", "fedavg", *(base.compare.methods or [])]
    whole = hours.of_comparison(base)
    assert whole and whole == pytest.approx(
        base.compare.seeds * sum(hours.of_cell(base, name) or 0 for name in dict.fromkeys(trained)) / 3600
    ), "fedavg+ft has the rounds of fedavg"
    assert whole and hours.of_comparison(with_settings(base, ["compare.seeds=10"])) == pytest.approx(
        2 * whole
    )


def test_what_is_not_known_has_no_hours() -> None:
    for name in ("demo", "fedrir-domainnet"):
        assert hours.of_comparison(recipes.find(name)) is None
    base = recipes.find("fedcrl-cifar10-dir01")
    for other in ("model.name=cnn-tiny", "data.dataset=own", "data.split=split.csv", "method.batch_size=7"):
        assert hours.of_comparison(with_settings(base, [other])) is None
    assert hours.of_cell(base, "own:Method") is None


def test_every_network_of_a_paper_and_every_method_has_its_costs() -> None:
    assert hours.costs().methods.keys() >= METHODS.keys() - {"pretrained"}
    lacking = {name for name in recipes.names() if hours.of_comparison(recipes.find(name)) is None}
    assert lacking == {"demo", "robust", "dualfed-domainnet", "fedrir-domainnet"}, (
        "python -m tools.bench.costs"
    )


def test_the_list_of_recipes_shows_hours_without_loading_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "list", "--format", "json"]) == 0
    shown = capsys.readouterr()
    rows = {row["recipe"]: row["hours"] for row in json.loads(shown.out)}
    assert rows["fedcrc-cifar10-dir01"] > 3 and rows["demo"] is None
    assert hours.costs().machine in shown.err
    code = "import sys; from edge_fl.cli import main; main(['recipes', 'list']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
