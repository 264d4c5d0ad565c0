"""A method of a user's own file or class: in commands, recipes and Python, in child processes, and what is said of a wrong name."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_fl import cli
from edge_fl.errors import ConfigError, EdgeFLError, MethodError
from edge_fl.learn import tree
from edge_fl.methods.fedavg import FedAvg
from edge_fl_lab.compare import sources
from edge_fl_lab.research import compare, run
from edge_fl_server.runs.results import Results
from edge_fl_server.training.engines import processes

METHOD = """
from dataclasses import dataclass
from edge_fl.methods.contract.method import SHARED_MODEL, Method, hyper

@dataclass(frozen=True)
class Gentle(Method):
    \"\"\"Takes a part of its step.\"\"\"

    step: float = hyper(0.5, "share of the step", low=0, high=1)
    title, citation, family = "Gentle", "ours", "global model"
    has_global, parts = True, SHARED_MODEL

    def local_update(self, down, own, data):
        new = self.train(self.loss, down, data)
        return {part: {k: down[part][k] + self.step * (t - down[part][k]) for k, t in new[part].items()} for part in new}, own
"""
RNG = np.random.default_rng(0)
LABELS = RNG.permutation(np.arange(90) % 3)
IMAGES = (RNG.integers(0, 90, (90, 8, 8)) + 60 * LABELS[:, None, None]).astype(np.uint8)
SMALL = ["--dataset", "digits", "--clients", "3", "--rounds", "1"]
SMALL += ["--set", "data.fraction=0.2", "--set", "model.options={feature_dim=8, width=4}"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `mild.py`, and the same method in `deep/er/soft.py`; no process has imported them."""
    processes.end(processes.cores())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("mild", "deep", "deep.er", "deep.er.soft", "deep.pooled"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "deep/er").mkdir(parents=True)
    for name in ("mild.py", "deep/er/soft.py"):
        (tmp_path / name).write_text(METHOD)
    return tmp_path


def simulated(*arguments: str) -> Results:
    """The results of `edge-fl simulate`."""
    before = {*Path("runs").glob("*-*")}
    assert cli.main(["simulate", *SMALL, *arguments]) == 0
    (new,) = {*Path("runs").glob("*-*")} - before
    return Results.open(new)


def accuracies(results: Results) -> object:
    return results.rounds()[-1].clients


@pytest.mark.parametrize("name", ["mild:Gentle", "mild.py:Gentle", "deep/er/soft.py:Gentle"])
def test_a_method_is_named_by_its_module_or_file_with_options_in_every_command(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["methods", "show", name]) == 0
    shown = capsys.readouterr().out
    assert "Takes a part of its step." in shown and "step = 0.5  (0 to 1)" in shown
    labelled = simulated("--method", f"{name}:step=0.25")
    assert labelled.recipe().method.options == {"step": 0.25}
    (folder / "own.toml").write_text(f'[method]\nname = "{name}"\noptions = {{step = 0.25}}\n')
    assert accuracies(simulated("--recipe", "own.toml")) == accuracies(labelled)
    with_ft = simulated("--method", f"{name}+ft:step=0.25:ft_epochs=1")
    assert with_ft.recipe().method.options == {"step": 0.25, "ft_epochs": 1}
    command = ["compare", "--methods", f"{name}:step=0.25,fedrep", "--datasets", "digits", "--clients", "3"]
    command += ["--rounds", "1", "--seeds", "1", "--jobs", "2", "--set", "data.fraction=0.2"]
    assert cli.main(command) == 0
    assert f"{name}:step=0.25" in capsys.readouterr().out


def test_the_processes_of_a_pool_import_a_file_below_the_working_folder(folder: Path) -> None:
    (folder / "deep/pooled.py").write_text(METHOD)
    pool, alone = (
        simulated("--method", "deep/pooled.py:Gentle", "--set", f"engine={engine}")
        for engine in ("pool", "sequential")
    )
    assert accuracies(pool) == accuracies(alone)


def test_step_1_is_fedavg_and_a_class_is_the_same_as_its_name(folder: Path) -> None:
    sys.path.append(str(folder))
    from mild import Gentle  # type: ignore[import-not-found]

    options = {"clients": 3, "rounds": 2, "settings": {"model.options": {"feature_dim": 8, "width": 4}}}
    by_class = run(Gentle, IMAGES, LABELS, **options)
    assert by_class.method == "mild:Gentle" and by_class.engine == "sequential"
    for same in ("mild:Gentle", "mild.py:Gentle:step=0.5"):
        assert tree.same(run(same, IMAGES, LABELS, **options).trained.shared, by_class.trained.shared)
    whole = run("mild:Gentle:step=1", IMAGES, LABELS, **options)
    fedavg = run(FedAvg, IMAGES, LABELS, **options)
    assert whole.accuracy == pytest.approx(fedavg.accuracy)
    table = compare([Gentle, "mild:Gentle:step=0.25", "fedrep"], IMAGES, LABELS, seeds=1, **options)
    assert {"mild:Gentle", "mild:Gentle:step=0.25", "fedrep", "fedavg"} <= {
        row["method"] for row in table.rows()
    }


WRONG = {
    "mild:Gentel": "has no attribute 'Gentel'.*did you mean 'Gentle'",
    "mlid:Gentle": "No module named 'mlid'",
    "mlid.py:Gentle": r"no file mlid\.py",
    "/etc/../mild.py:Gentle": r"no file /etc",
    "mild:Gentle:steps=1": "unknown hyper-parameter 'steps'.*did you mean 'step'",
    "mild:Gentle:step=2": "step = 2, expected 0 to 1",
    "mild:dataclass": "method 'mild:dataclass': function, expected a subclass of edge_fl.methods.contract.method.Method",
    "random.py:Gentle": r"there is another module 'random', .*random\.py; expected a name of its own",
    "broken:Gentle": r'broken\.py:2, "undefined\(\)": NameError: name \'undefined\' is not defined',
    "unfinished:Gentle": r"unfinished\.py:1: SyntaxError: ",
    "thawed:Gentle": r"thawed\.py:\d+, \"@dataclass\": TypeError: cannot inherit non-frozen dataclass",
    "undecorated:Gentle": r"no dataclass, expected @dataclass\(frozen=True\) above class Gentle",
    "bare:Gentle": "class Gentle has no title, citation, family, parts",
    "listed:Gentle": r"parts = \['head'\], expected a dict",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_name_or_class_is_one_line_with_the_place(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = re.split(r"[:.]", name)[0]
    if module != "random":
        monkeypatch.delitem(sys.modules, module, raising=False)
    (folder / "random.py").write_text(METHOD)
    (folder / "broken.py").write_text("\nundefined()\n")
    (folder / "unfinished.py").write_text("def f(:\n")
    (folder / "thawed.py").write_text(METHOD.replace("(frozen=True)", ""))
    (folder / "undecorated.py").write_text(METHOD.replace("@dataclass(frozen=True)", ""))
    bare = re.sub(r"    (title|has_global), .*\n", "", METHOD)
    (folder / "bare.py").write_text(bare)
    (folder / "listed.py").write_text(METHOD.replace("= True, SHARED_MODEL", '= True, ["head"]'))
    assert cli.main(["simulate", *SMALL, "--method", name]) == 4
    said = capsys.readouterr().err
    assert re.search(WRONG[name], said) and said.count("\n") == 1, said
    with pytest.raises(EdgeFLError, match=WRONG[name]):
        run(name, IMAGES, LABELS, clients=3)
    assert cli.main(["compare", "--methods", f"{name},fedrep", "--datasets", "digits", "--clients", "3"]) == 4
    assert re.search(WRONG[name], capsys.readouterr().err)
    assert not Path("runs").exists()


SCRIPT = """
import sys
import numpy as np
from edge_fl_lab.research import compare, run
{method}
rng = np.random.default_rng(0)
labels = rng.integers(0, 3, 90)
images = rng.random((90, 1, 8, 8)) / 2 + labels[:, None, None, None] / 8
result = run(Gentle, images, labels, clients=3, rounds=1)
print(result.engine, result.method)
for engine in ("pool", "ray"):
    try:
        run(Gentle, images, labels, clients=3, engine=engine)
    except Exception as error:
        print(error)
try:
    compare([Gentle], images, labels, clients=3, jobs=2)
except Exception as error:
    print(error)
compare([Gentle], images, labels, clients=3, rounds=1, seeds=1, folder="kept", progress=True)
"""


def test_a_method_of_a_script_runs_in_its_own_process_and_is_run_again_after_a_change(folder: Path) -> None:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(method=METHOD))

    def executed() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=200)

    done = executed()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "sequential __main__:Gentle"
    for line, where in zip(lines[1:], ["engine 'pool'", "engine 'ray'", "jobs = 2"], strict=True):
        assert (
            f"method Gentle is defined in this script or notebook, which the processes of {where} cannot import"
            in line
        )
    assert "4 cells to run, 0 already done" in done.stderr
    assert "0 cells to run, 4 already done" in executed().stderr
    script.write_text(SCRIPT.format(method=METHOD.replace("self.step *", "0.1 * self.step *")))
    assert "1 cells to run, 3 already done" in executed().stderr


def test_a_class_that_no_module_has_by_its_name_is_refused(folder: Path) -> None:
    sys.path.append(str(folder))
    import mild  # type: ignore[import-not-found]

    class Inner(FedAvg):
        pass

    with pytest.raises(
        MethodError, match="method Inner: defined inside a function; expected at the top level"
    ):
        run(Inner, IMAGES, LABELS, clients=3)
    with pytest.raises(MethodError, match="model Inner: defined inside a function"):
        run("fedavg", IMAGES, LABELS, clients=3, model=Inner)
    before, mild.Gentle = mild.Gentle, FedAvg
    with pytest.raises(MethodError, match="method Gentle: its module has another object under this name now"):
        run(before, IMAGES, LABELS, clients=3)


def test_the_source_of_an_own_file_counts_as_its_methods(folder: Path) -> None:
    sys.path.append(str(folder))
    found = [sources.imported((name,)) for name in ("mild", "deep.er.soft")]
    assert [[*source] for source in found] == [["mild"], ["deep.er.soft"]]


def test_engines_with_processes_refuse_methods_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "Gentle", FedAvg, raising=False)
    with pytest.raises(ConfigError, match=r"method Gentle .*engine 'pool'"):
        compare(["__main__:Gentle"], IMAGES, LABELS, settings={"engine": "pool"})
