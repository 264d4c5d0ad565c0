"""Hooks of other packages: one whose setting a recipe has measures more, any client; one that cannot be imported ends the run at once."""

from pathlib import Path

import pytest

from edge_fl.errors import ConfigError
from edge_fl_server.orchestrate.execution import HOOKS, simulate
from edge_fl_server.recipes.recipe import Recipe, with_settings
from edge_fl_server.training import studies
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.rounds import FinalResult, Reports, RunHooks
from edge_fl_server.training.studies import Study
from tests.rounds_seen import RoundsSeen

SETTINGS = ["data.clients=3", "data.fraction=0.2", "rounds=1", "model.options={feature_dim=8, width=4}"]


class CountsTrained(RunHooks):
    """Measures how many clients trained, of a client that is none of the study's."""

    def __init__(self, study: Study, device: str) -> None:
        assert len(study.data()) == 3 and device == "cpu"

    def measure(self, result: FinalResult, clients: Clients) -> Reports:
        return {"visitor": {"own.trained": float(len(result.trained))}, "c000": {"own.round": 1.0}}


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a package whose entry point has this name and value."""

    def install(setting: str, value: str) -> None:
        info = tmp_path / "own-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{HOOKS}]\n{setting} = {value}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


@pytest.mark.parametrize(("settings", "asked"), [(["evaluate_every=1"], True), (["evaluate_every=0"], False)])
def test_a_hook_measures_more_if_the_recipe_has_its_setting(
    register, settings: list[str], asked: bool
) -> None:
    register("evaluate_every", f"{__name__}:{CountsTrained.__name__}")
    seen = RoundsSeen()
    outcome = simulate(studies.prepare(with_settings(Recipe(), [*SETTINGS, *settings])), seen)
    (final,) = seen.final
    assert final.metrics == outcome.final
    assert ("visitor" in outcome.final) == ("own.round" in outcome.final["c000"]) == asked
    assert "personal.test_acc.after" in outcome.final["c000"]
    if asked:
        assert outcome.final["visitor"] == {"own.trained": 3.0}
        assert outcome.last()["own.trained"].clients == 1


def test_a_hook_that_cannot_be_imported_ends_the_run_before_its_rounds(register) -> None:
    register("evaluate_every", "no_such_package:Hook")
    seen = RoundsSeen()
    study = studies.prepare(with_settings(Recipe(), [*SETTINGS, "evaluate_every=1"]))
    with pytest.raises(ConfigError, match=r"setting 'evaluate_every': cannot be imported .*package own"):
        simulate(study, seen)
    assert not seen.results
