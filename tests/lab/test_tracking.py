"""A viewer that was asked for has the rounds as the run's own file has them; one that cannot be had is told before anything starts."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from edge_fl import cli
from edge_fl.errors import ConfigError, RunError
from edge_fl.metrics import Summary
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.runs import round_metrics
from edge_fl_server.runs.results import Results
from edge_fl_server.runs.round_metrics import RoundMetrics
from tests.sample import sample

SUMMARY = Summary(0.5, 0.4, 0.25, 0.125, 4)
ROUND = RoundMetrics(
    round=1, selected=tuple("abcd"), responded=tuple("abc"), seconds=2.0, bytes_down=7, bytes_up=9
)
SMALL = ["data.fraction=0.2", "model.options={feature_dim=8, width=4}", "evaluate_every=1"]

# A child whose interpreter lacks the package named first; the rest is the command.
WITHOUT = """
import sys

class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"{name} is banned", name=name)

sys.meta_path.insert(0, Ban())
from edge_fl import cli
sys.exit(cli.main(sys.argv[2:]))
"""


def events(run: Path) -> dict[str, dict[int, float]]:
    """Each scalar's values by step, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    return {tag: {e.step: e.value for e in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def written(run: Path) -> dict[str, dict[int, float]]:
    """The same from round_metrics.jsonl, in the event files' 32 bits."""
    found: dict[str, dict[int, float]] = {}
    for line in round_metrics.lines(run / round_metrics.FILE):
        for name, value in round_metrics.scalars(line).items():
            found.setdefault(name, {})[line.round] = float(np.float32(value))
    return found


def test_a_line_becomes_named_numbers() -> None:
    metrics = {"personal.test_acc.before": Summary(0.5, 0.4, 0.25, 0.125, 4)}
    assert round_metrics.scalars(replace(ROUND, metrics=metrics)) == {
        "round/selected": 4,
        "round/responded": 3,
        "round/seconds": 2,
        "round/bytes_down": 7,
        "round/bytes_up": 9,
        "personal.test_acc.before/mean": 0.5,
        "personal.test_acc.before/std": 0.25,
        "personal.test_acc.before/bottom_decile": 0.125,
    }


def test_the_closing_step_stands_apart_and_what_was_not_measured_has_no_name() -> None:
    nan = float("nan")
    line = RoundMetrics(
        round=3,
        final=True,
        metrics={"a": Summary(0.5, 0.5, 0.0, 0.5, 1), "b": Summary(nan, nan, nan, nan, 0)},
    )
    assert round_metrics.scalars(line) == {
        "final/a/mean": 0.5,
        "final/a/std": 0.0,
        "final/a/bottom_decile": 0.5,
    }


def test_tensorboard_reads_what_a_simulation_wrote(tmp_path: Path) -> None:
    command = ["simulate", "--method", "fedper", "--clients", "3", "--rounds", "2", "--runs", str(tmp_path)]
    settings = [word for setting in SMALL for word in ("--set", setting)]
    assert cli.main([*command, *settings, "--track", "tensorboard"]) == 0
    (run,) = tmp_path.iterdir()
    found = events(run)
    assert found == written(run)
    assert set(found["personal.test_acc.before/bottom_decile"]) == set(found["round/bytes_up"]) == {1, 2}
    assert "final/personal.test_acc.after/mean" in found


def test_rounds_that_come_again_after_a_resume_replace_the_old(tmp_path: Path) -> None:
    openers = round_metrics.find(["tensorboard"])
    results = Results.create(tmp_path, Recipe())
    results.track(openers)
    for number in (1, 2, 3):
        results.append_round(replace(ROUND, round=number, metrics={"global.test_acc": SUMMARY}))
    results.close()
    with Results.resume(results.path, after=1) as again:
        again.track(openers, after=1)
        again.append_round(replace(ROUND, round=2, seconds=5.0))
    assert events(results.path) == written(results.path)
    assert events(results.path)["round/seconds"] == {1: 2.0, 2: 5.0}


def test_mlflow_reads_what_a_run_wrote(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="an extra of its own: edge-fl[mlflow]")
    from mlflow import MlflowClient

    with Results.create(tmp_path, Recipe()) as results:
        results.track(round_metrics.find(["mlflow"]))
        for number in (1, 2):
            results.append_round(
                replace(ROUND, round=number, seconds=number / 4, metrics={"global.test_acc": SUMMARY})
            )
    client = MlflowClient(f"sqlite:///{results.path}/mlflow/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name(results.id).experiment_id])
    assert run.data.metrics == round_metrics.scalars(
        round_metrics.lines(results.path / round_metrics.FILE)[-1]
    )
    history = client.get_metric_history(run.info.run_id, "round/seconds")
    assert {metric.step: metric.value for metric in history} == {1: 0.25, 2: 0.5}


@pytest.mark.parametrize(
    "case",
    sample(
        ["simulate mlflow", "server run demo tensorboard", "simulate tensorboard", "server run demo mlflow"],
        ["simulate mlflow", "server run demo tensorboard"],
    ),
)
def test_a_package_that_is_not_there_is_named_with_its_extra(case: str, tmp_path: Path) -> None:
    *command, name = case.split()
    extra = {"tensorboard": "track", "mlflow": "mlflow"}[name]
    child = subprocess.run(
        [sys.executable, "-c", WITHOUT, name, *command, "--track", name, "--runs", str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    assert child.returncode == 4, child.stderr
    assert child.stderr.splitlines()[-1] == (
        f"edge-fl: --track {name}: {name} is not installed; needs pip install 'edge-fl[{extra}]'; nothing was changed"
    )
    assert not list(tmp_path.iterdir())


def test_an_unknown_tracker_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--track tensorbord: unknown tracker .did you mean 'tensorboard'"):
        round_metrics.find(["tensorbord"])


class Broken:
    """A tracker whose disk is full."""

    def note(self, step: int, scalars: Mapping[str, float]) -> None:
        raise OSError("no space")

    def close(self) -> None:
        raise AssertionError("it was let go before")


def test_a_tracker_that_fails_is_let_go_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Results.create(tmp_path, Recipe()) as results:
        results.track({"broken": lambda folder, after: Broken()})
        results.append_round(ROUND)
        results.append_round(replace(ROUND, round=2))
    assert [record.round for record in Results.open(results.path).rounds()] == [1, 2]
    assert [record.message for record in caplog.records] == [
        "broken failed to write (no space); the run continues without it"
    ]


def test_a_tracker_that_cannot_begin_ends_the_run(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match="tensorboard cannot write there"),
        Results.create(tmp_path, Recipe()) as run,
    ):
        (run.path / "tensorboard").write_text("a file, where a folder is to be")
        run.track(round_metrics.find(["tensorboard"]))
    assert Results.open(run.path).state().state == "failed"
