"""What a run with devices says at its end: its result with n and gain, who was not measured, the release, and commands that exist."""

import shlex
from contextlib import closing
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import typer

from edge_fl import cli, metrics
from edge_fl_server.orchestrate import ending
from edge_fl_server.orchestrate.serving import FleetAccess
from edge_fl_server.recipes.recipe import Recipe, with_settings
from edge_fl_server.registry import Database, rollouts
from edge_fl_server.registry.tables import ReleaseRecord
from edge_fl_server.runs.results import Results
from edge_fl_server.runs.round_metrics import RoundMetrics

MEASURED = {
    "pi-1": {metrics.PERSONAL_AFTER: 0.9, metrics.LOCAL_ONLY: 0.7, metrics.TEST_SAMPLES: 50.0},
    "pi-2": {metrics.PERSONAL_AFTER: 0.8, metrics.LOCAL_ONLY: 0.7, metrics.TEST_SAMPLES: 50.0},
    "pi-3": {metrics.PERSONAL_AFTER: 1.0, metrics.TEST_SAMPLES: 2.0},
    "pi-4": {metrics.TEST_SAMPLES: 0.0},
}


def finished(folder: Path, measured: ending.Measured) -> tuple[Results, FleetAccess]:
    recipe = with_settings(Recipe(name="toy"), ["source=fleet", "broker.port=1999", "broker.fleet=barn"])
    with Results.create(folder, recipe) as results:
        results.append_round(RoundMetrics(round=1, final=True, clients=measured))
        results.write_devices([{"device": device} for device in [*measured, "pi-9"]])
    access = FleetAccess(
        partial(_not_connected), "barn", folder / "releases", str(folder / "registry.sqlite")
    )
    return results, access


def _not_connected(*_: object, **__: object) -> None:
    raise AssertionError


def test_the_result_has_its_n_gain_and_release_and_names_who_was_not_measured(tmp_path: Path) -> None:
    results, access = finished(tmp_path, MEASURED)
    (results.path / "report.html").touch()
    with closing(Database.open(access.registry)) as db:
        rollouts.record_release(db, ReleaseRecord("barn", 4, results.id, 1, "m", "x", 9))
        record = rollouts.get(db, rollouts.begin(db, "barn", 4))
        assert record is not None
        assert ending.lines(results, access)[0].endswith(
            "release 4 is not in service: its roll-out is running"
        )
        rollouts.advance(db, record, state="completed")
    said = ending.lines(results, access)
    assert said[0] == (
        "result: personal models 85.0 %, mean accuracy of 2 devices; +15.0 points over training on its own data alone"
        " (95 % interval -48.5 to +78.5, n = 2); release 4 is in service"
    )
    assert said[1] == (
        "not measured: pi-3 (2 of 8 scenes); pi-4 (0 of 8 scenes: a class counts from its second scene on); pi-9 (no report)"
    )
    assert said[2] == f"report: {results.path}/report.html"


def test_without_a_figure_it_says_so(tmp_path: Path) -> None:
    results, access = finished(tmp_path, {})
    assert ending.lines(results, access)[:2] == [
        "result: no device measured the accuracy of a personal model; no release",
        "not measured: pi-9 (no report)",
    ]
    alone = {"pi-1": MEASURED["pi-1"] | {metrics.LOCAL_ONLY: float("nan")}}
    assert ending.accuracy(alone).endswith(
        "; gain not measured: no device measured another model on the same samples"
    )


@pytest.mark.parametrize(
    ("words", "more"), [("fleet list", {}), ("server up", {}), ("server run", {"resume": "runs/barn 1"})]
)
def test_the_next_command_exists_with_its_options(tmp_path: Path, words: str, more: dict[str, str]) -> None:
    results, access = finished(tmp_path, {})
    command = shlex.split(ending.command(words, results, access, **more))
    given = [part for name, value in more.items() for part in (f"--{name}", value)]
    assert command[:1] + command[3:] == [
        *["edge-fl", *given, "--port", "1999", "--fleet", "barn"],
        *["--home", str(tmp_path / "releases"), "--database", str(tmp_path / "registry.sqlite")],
    ]
    app = cli.load(metadata.entry_points(group=cli.ENTRY_POINTS))
    group = typer.main.get_command(app.root).commands[command[1]]
    found = group.commands[command[2]]
    found.make_context("edge-fl", command[3:])
