"""A comparison runs a cell again when its inputs changed, says why, and keeps all others."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import edge_fl
from edge_fl import cli
from edge_fl.errors import DataError, MethodError
from edge_fl.files import npz
from edge_fl.methods import METHODS
from edge_fl_lab.compare import cell_runs, comparison, sources
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.grid import Cell, cells
from edge_fl_server.recipes.recipe import Recipe, with_settings

ROOT = Path(edge_fl.__file__).parent.parent
TINY = with_settings(
    Recipe(name="tiny"),
    ["data.clients=3", "data.fraction=0.2", "rounds=1", "model.options={feature_dim=8, width=4}"],
)


def test_every_place_whose_code_affects_numbers_exists() -> None:
    assert not [place for place in sources.PLACES if not (ROOT / "server" / place).exists()]


def written(folder: Path) -> dict[str, int]:
    """When the newest result of each cell was written."""
    found = sorted((path.stat().st_mtime_ns, path.stem) for path in (folder / "cells").glob("*.json"))
    return {stem.partition("-")[0]: at for at, stem in found}


def forget() -> None:
    """Forget what a process remembers of sources and data, as a new process does."""
    for remembered in (sources._of_files, sources.of_framework, cell_runs._data, cell_runs._dataset):
        remembered.cache_clear()


KILLED = """
import os, signal, sys
from edge_fl.cli import main
from edge_fl_lab.compare import cell_runs

count, write = 0, cell_runs.write

def write_some(result, folder):
    global count
    write(result, folder)
    count += 1
    if count == 2:
        os.kill(os.getpid(), signal.SIGKILL)

cell_runs.write = write_some
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_editing_a_method_reruns_exactly_its_cells_and_a_killed_comparison_keeps_its_finished_ones(
    tmp_path: Path,
) -> None:
    for folder in ("edge_fl", "server", "devices", "broker"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path / "out"
    text = "compare --methods fedrep,ditto --datasets digits --clients 3 --rounds 1 --seeds 2 --set data.fraction=0.2"
    command = [sys.executable, "-m", "edge_fl", *text.split(), "--out", str(out)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(tmp_path / name) for name in ("", "server", "devices", "broker")),
        "OMP_NUM_THREADS": "1",
    }

    def again() -> tuple[dict[str, int], str]:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return written(out), done.stderr

    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *command[3:]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        timeout=300,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    kept = written(out)
    assert len(kept) == 2
    whole, _ = again()
    assert len(whole) == 10 and {key: whole[key] for key in kept} == kept
    method = tmp_path / "edge_fl" / "methods" / "fedrep.py"
    original = method.read_text()
    method.write_text(f'{original}\n# edited\n"""and more"""\n')
    assert again()[0] == whole
    method.write_text(f"{original}\nEDITED = True\n")
    edited, said = again()
    changed = {key for key in whole if edited[key] != whole[key]}
    recipe = with_settings(Recipe(name="compare"), ["data.clients=3", "data.fraction=0.2", "rounds=1"])
    assert changed == {cell.key for cell in cells(recipe, ["fedrep"], seeds=2) if cell.label == "fedrep"}
    assert "rerun of 2 cells: source of method fedrep changed" in said
    assert again()[0] == edited
    method.write_text(original)
    reverted, said = again()
    assert (
        reverted == edited
        and f"10 cells taken from {out}/cells, 2 from before a change that was undone" in said
    )


def test_other_data_another_engine_and_an_edited_model_of_the_user_run_a_cell_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "widths.py").write_text("WIDTH = 4\n")
    (tmp_path / "own.py").write_text(
        "from edge_fl.models.cnn import tiny\nfrom widths import WIDTH\n"
        "def build(input):\n    return tiny(input, width=WIDTH, feature_dim=8)\n"
    )
    rng = np.random.default_rng(0)
    squares = {"x": rng.integers(0, 99, (60, 8, 8)).astype(np.uint8), "y": np.arange(60) % 3}
    npz.write(tmp_path / "squares.npz", squares)
    settings = ["data.clients=2", "rounds=1", "data.dataset=squares", f'data.data_dir="{tmp_path}"']
    recipe = with_settings(Recipe(name="tiny"), [*settings, "model.name=own:build"])
    (cell,) = (cell for cell in cells(recipe, []) if cell.label == "local")
    out = tmp_path / "out"

    def reasons(cell: Cell = cell) -> str:
        forget()
        before = written(out)
        (result,) = comparison.run([cell], out).values()
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rerun")]
        assert bool(said) == (before != written(out)) or not before
        assert result.engine == cell.recipe.engine.replace("auto", "sequential")
        return "; ".join(said)

    assert reasons() == reasons() == ""
    (tmp_path / "widths.py").write_text("WIDTH = 6\n")
    assert reasons() == "rerun of 1 cell: source of model own:build changed"
    npz.write(tmp_path / "squares.npz", {**squares, "x": squares["x"] + 1})
    assert reasons() == "rerun of 1 cell: data of squares changed"
    vector = Cell(cell.label, with_settings(cell.recipe, ["engine=vector"]))
    assert reasons(vector) == "rerun of 1 cell: engine changed"
    assert reasons(vector) == ""
    forget()
    comparison.run([cell], out)  # the first engine again
    assert (
        "1 cell taken from" in (said := capsys.readouterr().err) and "before a change that was undone" in said
    )


CODE = """
from dataclasses import dataclass

@dataclass
class Step:
    size: int = 3

def run(step, times=1):
    total = 0
    for _ in range(times):
        total += step.size
    return total
"""


def hashed(folder: Path, source: str) -> str:
    path = folder / "some.py"
    path.write_text(source)
    return sources._hash([path])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("\n\n", "\n# a remark\n"),
        ("size: int = 3", 'size: int = (\n        3\n    )\n    """How long."""'),
        ("times=1):", 'times=1):\n    """Run."""'),
        ("step, times=1)", 'step: "Step", times: int = 1) -> int'),
        ("total = 0", "total: int = 0"),
        ("from dataclasses", "from __future__ import annotations\nfrom typing import Any\nfrom dataclasses"),
        ("@dataclass\n", "if TYPE_CHECKING:\n    import torch\n\n@dataclass\n"),
        ("    return total", "    pass\n    return total"),
    ],
)
def test_what_has_no_effect_when_code_runs_is_no_change(tmp_path: Path, before: str, after: str) -> None:
    changed = CODE.replace(before, after)
    assert changed != CODE and hashed(tmp_path, changed) == hashed(tmp_path, CODE)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("size: int", "size: float"),  # read by dataclasses
        ("    size: int = 3", "    size = 3"),
        ("= 3", "= True"),
        ("total = 0", "total = 0.0"),
        ("total = 0", "total = None"),
        ("times=1", "times=2"),
        ("+=", "-="),
        ("return total", "return"),
    ],
)
def test_what_has_an_effect_is_a_change(tmp_path: Path, before: str, after: str) -> None:
    changed = CODE.replace(before, after)
    assert changed != CODE and hashed(tmp_path, changed) != hashed(tmp_path, CODE)


def test_the_results_of_earlier_inputs_are_kept_but_not_all_of_them(tmp_path: Path) -> None:
    (cell, *_) = cells(TINY, [])
    (tmp_path / "cells").mkdir()
    versions = [{"source": str(number)} for number in range(cell_runs.VERSIONS + 1)]

    def found(inputs: dict[str, str]) -> float:
        stored = cell_runs.read(cell, tmp_path, inputs)
        assert stored
        return stored.seconds

    def result(number: int) -> CellResult:
        return CellResult(
            cell.key, cell.label, cell.recipe, inputs=versions[number], seconds=float(number + 1)
        )

    cell_runs.write(result(0), tmp_path)
    (first,) = (tmp_path / "cells").iterdir()
    first.with_suffix(".npz").touch()
    for number in range(1, len(versions)):
        os.utime(first, ns=(0, 0))
        assert found(versions[0]) == 1
        cell_runs.write(result(number), tmp_path)
        assert found(versions[number]) == number + 1
    assert found(versions[0]) == len(versions), "the oldest is gone, the newest says what changed"
    assert found(versions[1]) == 2
    assert not first.exists() and not first.with_suffix(".npz").exists()


def test_a_result_without_its_inputs_is_run_again(tmp_path: Path) -> None:
    (cell, *_) = cells(TINY, [])
    cell_runs.write(CellResult(cell.key, cell.label, cell.recipe), tmp_path)
    assert comparison.run([cell], tmp_path)[cell.key].last


def test_the_source_of_a_method_is_its_file_and_those_that_it_imports() -> None:
    assert sources.imported(("edge_fl.methods.fedrep",)).keys() == {"edge_fl.methods.fedrep"}
    assert "edge_fl.models.normalise" in sources.imported(("edge_fl.methods.fedrir",))
    for method in METHODS.values():
        assert method.__module__ in sources.imported((method.__module__,))


def test_invalid_models_methods_and_data_are_reported_before_the_first_cell(tmp_path: Path) -> None:
    def run(*settings: str, methods: tuple[str, ...] = ()) -> None:
        comparison.run(cells(with_settings(TINY, settings), list(methods), seeds=2), tmp_path / "out")

    with pytest.raises(MethodError, match="did you mean 'cnn-tiny'"):
        run("model.name=cnn-tinny")
    with pytest.raises(MethodError, match="unknown option 'widht'"):
        run("model.options.widht=3")
    with pytest.raises(MethodError, match="head"):
        run(methods=("repper:head=svn",))
    with pytest.raises(MethodError, match="which noise does not cover"):
        run(methods=("fedprox", "fedprox:privacy.noise_multiplier=1.0:privacy.budget=0.001"))
    with pytest.raises(DataError, match="expected 2 or more; use fewer clients"):
        run("data.clients=200", "data.partition=iid")
    assert not (tmp_path / "out").exists()


def test_research_commands_refuse_a_fleet(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command in (["simulate"], ["compare", "--methods", "fedrep", "--out", str(tmp_path / "out")]):
        for source in ("fleet", "hybrid"):
            assert cli.main([*command, "--set", f"source={source}"]) == 4
            assert f"source = '{source}'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
