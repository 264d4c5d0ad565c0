"""`edge-fl simulate`: resumed runs, split files, options of another model or method, and the engine in results and report."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge_fl import cli
from edge_fl.files import npz
from edge_fl_server.orchestrate import run as orchestrator
from edge_fl_server.recipes.recipe import Recipe, with_settings
from edge_fl_server.runs.results import Results
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.engines import choice
from edge_fl_server.training.rounds import RoundResult, RunHooks

SMALL = ["data.clients=4", "data.fraction=0.2", "rounds=4", "model.options={feature_dim=8, width=4}"]


@pytest.fixture(autouse=True)
def all_runs_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too short to compare engines, however slow this machine is at the moment: "auto" is sequential in every run."""
    monkeypatch.setattr(choice, "SHORT_S", 1e9)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def simulate(*arguments: str) -> Path:
    """Simulate a small study; the folder of its results."""
    before = set(Path("runs").glob("simulate-*"))
    settings = [argument for setting in SMALL for argument in ("--set", setting)]
    assert cli.main(["simulate", *settings, *arguments]) == 0
    (new,) = set(Path("runs").glob("simulate-*")) - before
    return new


def test_a_simulation_starts_without_modules_that_it_does_not_need(folder: Path) -> None:
    slow = ("matplotlib", "onnx", "onnxruntime", "paho", "sqlalchemy", "torch._dynamo", "torchvision", "tuf")
    script = f"""
import sys
from edge_fl import cli
from edge_fl_server.training import rounds
def run(*arguments): print("imported:", [name for name in {slow!r} if name in sys.modules]); raise KeyboardInterrupt
rounds.run = run
cli.main({["simulate", *(argument for setting in SMALL for argument in ("--set", setting))]!r})
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert "imported: []" in ended.stdout, ended.stdout + ended.stderr


class Interrupt(RunHooks):
    """Ends a run after round 2, as Ctrl-C does."""

    def after_round(self, result: RoundResult, fleet: Clients) -> None:
        if result.round == 2:
            raise KeyboardInterrupt


def outcome(run: Path) -> dict[str, object]:
    """Everything that a run measured, except for durations, and its final state."""
    lines = [json.loads(line) for line in (run / "round_metrics.jsonl").read_text().splitlines()]
    (last,) = (run / "checkpoints").glob("*-final.safetensors")
    return {
        "rounds": [{**line, "seconds": None} for line in lines],
        "summary": (run / "metrics_summary.json").read_text(),
        "clients": (run / "devices.csv").read_text(),
        "final": last.read_bytes(),
        "state": Results.open(run).state(),
    }


@pytest.mark.parametrize(
    "settings",
    [
        ["method.name=fedrep", "engine=sequential", "cohort.participation=0.5", "data.unseen=1"],
        ["method.name=fedavg", "engine=vector", "cohort.buffer_size=2"],
        ["method.name=fedavg", "engine=auto"],
        pytest.param(["method.name=ditto", "engine=pool"], marks=pytest.mark.slow),
    ],
    ids=lambda settings: settings[1],
)
def test_a_resumed_simulation_is_bit_identical_to_an_undisturbed_one(
    folder: Path, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = simulate(*(argument for setting in settings for argument in ("--set", setting)))
    table = capsys.readouterr().out
    recipe = with_settings(Recipe(name="simulate"), [*SMALL, *settings])
    with pytest.raises(KeyboardInterrupt):
        orchestrator.run(recipe, hooks=Interrupt())
    (stopped,) = set(Path("runs").glob("simulate-*")) - {whole}
    assert Results.open(stopped).state().state == "stopped"
    capsys.readouterr()
    assert cli.main(["simulate", "--resume", str(stopped)]) == 0
    said = capsys.readouterr()
    assert "resumed after round" in said.err and said.out == table
    assert outcome(stopped) == outcome(whole)
    automatic = recipe.engine == "auto"
    assert (Results.open(stopped).manifest().engine_timing is not None) == automatic


def test_a_run_is_resumed_with_its_own_settings_and_data_only(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    npz.write(folder / "own.npz", npz_of(0))
    recipe = with_settings(
        Recipe(name="simulate"), ["data.dataset=own", "data.data_dir=.", "rounds=3", "data.clients=2"]
    )
    with pytest.raises(KeyboardInterrupt):
        orchestrator.run(recipe, hooks=Interrupt())
    (stopped,) = Path("runs").glob("simulate-*")
    assert cli.main(["simulate", "--resume", str(stopped), "--rounds", "9"]) == 4
    assert "takes all settings from the run" in capsys.readouterr().err
    npz.write(folder / "own.npz", npz_of(1))
    assert cli.main(["simulate", "--resume", str(stopped)]) == 4
    assert "began with other data or another split" in capsys.readouterr().err
    assert Results.open(stopped).state().state == "stopped"


def test_an_interrupted_simulation_says_how_to_continue_it(folder: Path) -> None:
    settings = [part for each in (*SMALL, "rounds=100000", "method.name=fedavg") for part in ("--set", each)]
    edge_fl = [sys.executable, "-m", "edge_fl"]
    with subprocess.Popen([*edge_fl, "simulate", *settings], stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr
        for line in child.stderr:
            if line.startswith("round 2/"):
                child.send_signal(signal.SIGTERM)
                break
        said = child.stderr.read()
    (run,) = Path("runs").glob("simulate-*")
    assert said.endswith(
        f"to continue this run: edge-fl simulate --resume {run}\nedge-fl: stopped by SIGTERM\n"
    )
    assert child.returncode == 143
    resumed = [*edge_fl, "simulate", "--resume", str(run)]
    with subprocess.Popen(resumed, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr
        assert next(line for line in child.stderr if line.startswith("resumed after round "))
        child.kill()


def npz_of(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.integers(0, 255, (40, 8, 8)).astype(np.uint8), "y": np.arange(40) % 2}


def test_another_model_or_method_does_not_inherit_options(folder: Path) -> None:
    demo = ["--recipe", "demo", "--rounds", "1", "--set", "data.fraction=0.2", "--clients", "3"]
    assert cli.main(["simulate", *demo, "--set", "method.name=ditto", "--model", "cnn-tiny"]) == 0
    (run,) = Path("runs").glob("demo-*")
    recipe = Results.open(run).recipe()
    assert recipe.method.options == {} and recipe.model.options == {"width": 32}  # the same model keeps them
    changed = with_settings(recipe, ["model.options.feature_dim=4", "model.name=cnn4"])
    assert changed.model.options == {"feature_dim": 4}


def test_the_engine_that_ran_is_in_results_and_report(folder: Path) -> None:
    run = simulate("--set", "engine=auto", "--rounds", "1")
    manifest = Results.open(run).manifest()
    assert manifest.engine == "sequential" and manifest.engine_timing and manifest.engine_timing.cores > 0
    report = (run / "report.html").read_text()
    assert "<dt>engine</dt>" in report or ">engine<" in report
    assert "too short to compare engines" in report
    named = Results.open(simulate("--set", "engine=vector", "--rounds", "1")).manifest()
    assert named.engine == "vector" and named.engine_timing is None


def test_a_saved_split_is_used_by_simulate_and_compare(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = simulate("--rounds", "1", "--save-split", "split.csv")
    assert Path("split.csv").read_text().startswith("sample,client,set\n0,")
    table = capsys.readouterr().out
    small = [argument for setting in SMALL[2:] for argument in ("--set", setting)]
    assert cli.main(["simulate", *small, "--rounds", "1", "--set", "data.split=split.csv"]) == 0
    assert capsys.readouterr().out == table
    (again,) = set(Path("runs").glob("simulate-*")) - {drawn}
    assert Results.open(again).recipe().data.clients == 4
    assert Results.open(again).manifest().data_hash == Results.open(drawn).manifest().data_hash
    command = [
        "compare",
        "--methods",
        "local",
        *small,
        "--rounds",
        "1",
        "--seeds",
        "1",
        "--set",
        "data.split=split.csv",
    ]
    assert cli.main(command) == 0
    assert "digits, split split, cnn-tiny" in capsys.readouterr().out


def test_a_wrong_split_starts_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("split.csv").write_text("sample,client,set\n0,a,train\n0,a,test\n")
    for command in (["simulate"], ["compare", "--methods", "local"]):
        assert cli.main([*command, "--set", "data.split=split.csv"]) == 4
        assert "split.csv line 3: sample 0 again" in capsys.readouterr().err
        assert cli.main([*command, "--set", "data.split=split.csv", "--clients", "3"]) == 4
        assert "the clients are those of data.split, split.csv" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_classes_without_training_samples_are_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = npz_of(0)
    npz.write(folder / "own.npz", {**content, "y": content["y"] * 2})
    command = ["simulate", "--dataset", "own", "--data-dir", ".", "--clients", "2", "--rounds", "0"]
    assert cli.main(command) == 0
    assert "own: no samples of 1 of 3 classes: 1" in capsys.readouterr().err


def test_stdout_is_for_results_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--dataset", "digits", "--clients", "3", "--rounds", "1", "--runs", str(tmp_path)]
    command = ["simulate", "--method", "fedavg", *small, "--format", "json"]
    assert cli.main(command) == 0
    shown = capsys.readouterr()
    assert {row["clients"] for row in json.loads(shown.out)} == {3} and "round 1/1" in shown.err
    assert cli.main(["--quiet", *command]) == 0
    quiet = capsys.readouterr()
    assert json.loads(quiet.out) and quiet.err == ""


@pytest.mark.parametrize("resumed", [False, True])
def test_the_printed_comparison_is_of_the_same_setting(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "ours.py").write_text(OURS)
    (folder / "base.toml").write_text('[data]\npartition = "pathological"\nclasses_per_client = 3\n')
    (folder / "data sets").mkdir()
    rng = np.random.default_rng(0)
    y = rng.permutation(np.arange(240) % 4)
    x = (rng.integers(0, 120, (240, 1, 8, 8)) + 30 * y[:, None, None, None]).astype(np.uint8)
    np.savez(folder / "data sets" / "squares.npz", x=x, y=y)
    given = ["--recipe", "base.toml", "--data-dir", "data sets", "--dataset", "squares", "--clients", "4"]
    given += ["--rounds", "3", "--model", "ours:Flat", "--set", "model.options={width=6}", "--set", "seed=5"]
    given += ["--set", "method.optimiser.lr=0.02", "--scale", "0.7", "--method", "ours:Ours:step=0.75"]
    assert cli.main(["simulate", *given]) == 0
    if resumed:  # a run that ended before its first round
        (run,) = Path("runs").iterdir()
        shutil.rmtree(run / "checkpoints")
        capsys.readouterr()
        assert cli.main(["simulate", "--resume", str(run)]) == 0
    (hint,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("with baselines: ")]
    (run,) = Path("runs").iterdir()
    command = shlex.split(hint.removeprefix("with baselines: "))
    assert command[0] == "edge-fl" and cli.main([*command[1:], "--seeds", "1"]) == 0
    cells = [json.loads(file.read_text()) for file in Path(command[-1]).glob("cells/*.json")]
    assert {cell["label"] for cell in cells} == {"ours:Ours", "local", "fedavg", "fedavg+ft"}
    (cell,) = [cell for cell in cells if cell["label"] == "ours:Ours"]
    found = Results.open(run)
    assert cell["recipe"]["method"]["options"] == {"step": 0.75}
    assert cell["recipe"]["data"] == json.loads(msgspec.json.encode(found.recipe().data))
    last = json.loads((run / "round_metrics.jsonl").read_text().splitlines()[-1])
    assert (
        last["final"]
        and cell["last"]["personal.test_acc.after"] == last["metrics"]["personal.test_acc.after"]
    )


OURS = """
from dataclasses import dataclass
from torch import nn
from edge_fl.methods.contract.method import SHARED_MODEL, Method, hyper

@dataclass(frozen=True)
class Ours(Method):
    step: float = hyper(0.5, "share of the step", low=0, high=1)
    title, citation, family = "Ours", "ours", "global model"
    parts = SHARED_MODEL

    def local_update(self, down, own, data):
        new = self.train(self.loss, down, data)
        return {p: {k: down[p][k] + self.step * (t - down[p][k]) for k, t in new[p].items()} for p in new}, own

class Flat(nn.Module):
    def __init__(self, input, width=4):
        super().__init__()
        self.feature_dim = width
        self.body = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(input.height * input.width, width), nn.ReLU())

    def forward(self, x):
        return self.body(x)
"""
