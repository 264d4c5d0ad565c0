"""Three lines of Python run FedRep with the pool engine: in a script next to a `server.py`, and in a notebook."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[3] / "docs" / "notebook.ipynb"
ARRAYS = """
import numpy as np
rng = np.random.default_rng(0)
labels = rng.integers(0, 3, 150)
images = rng.random((150, 1, 8, 8)) / 2 + labels[:, None, None, None] / 8
"""
THREE_LINES = """
from edge_fl_lab.research import run
result = run("fedrep", images, labels, clients=3, rounds=2, engine="pool")
print(result.accuracy)
"""
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
nbformat.write(notebook, "executed.ipynb")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a `server.py`."""
    (tmp_path / "server.py").write_text("raise SystemExit('imported by mistake')\n")
    return tmp_path


def python(folder: Path, *arguments: str) -> str:
    """Run Python in a folder; its output."""
    home = {
        "HOME": str(folder),
        "IPYTHONDIR": str(folder / ".ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder / ".jupyter"),
    }
    command = [sys.executable, *arguments]
    environment = {**os.environ, **home, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def outputs(notebook: Path) -> dict[str, str]:
    """Output of each code cell as text, by its last line."""
    found = {}
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            texts = [o.get("text") or o.get("data", {}).get("text/plain", []) for o in cell["outputs"]]
            found["".join(cell["source"]).splitlines()[-1]] = "".join(line for text in texts for line in text)
    return found


def test_a_script_without_a_main_guard_runs_the_pool_next_to_a_server_py(folder: Path) -> None:
    (folder / "script.py").write_text(ARRAYS + THREE_LINES + "print(result.engine)\n")
    accuracy, engine = python(folder, "script.py").splitlines()
    assert accuracy.startswith("[") and len(accuracy.split()) >= 3 and engine == "pool"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_notebook_runs_with_the_pool_next_to_a_server_py(folder: Path) -> None:
    (folder / "notebook.ipynb").write_bytes(NOTEBOOK.read_bytes())
    python(folder, "-c", EXECUTE, "notebook.ipynb")
    fresh, stored = outputs(folder / "executed.ipynb"), outputs(NOTEBOOK)
    assert fresh.keys() == stored.keys() and "engine: pool" in fresh["result"]
    assert all(stored.values()) and all(fresh.values())
    assert fresh["list(result.metrics)"] == stored["list(result.metrics)"]


METHOD = """
from dataclasses import dataclass
from edge_fl.methods.contract.method import SHARED_MODEL, Method
@dataclass(frozen=True)
class Own(Method):
    title, citation, family = "Own", "ours", "global model"
    has_global, parts = True, SHARED_MODEL
    def local_update(self, down, own, data):
        return trained(self, down, data), own
"""
HELPER = """
def trained(method, down, data):
    return method.train(method.loss, down, data, epochs=%d)
"""
COMPARED = """
from edge_fl_lab.research import compare
compare([Own], images, labels, clients=3, rounds=1, seeds=1, folder="kept", progress=True) and None
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_method_of_a_notebook_is_run_again_after_a_change_of_the_cells_that_define_it(folder: Path) -> None:
    sources = [ARRAYS, METHOD, HELPER % 1, COMPARED, COMPARED + "# again", HELPER % 2, COMPARED + "# changed"]
    cells = [
        {
            "cell_type": "code",
            "id": f"c{n}",
            "source": source,
            "execution_count": None,
            "metadata": {},
            "outputs": [],
        }
        for n, source in enumerate(sources)
    ]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    notebook = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (folder / "notebook.ipynb").write_text(json.dumps(notebook))
    python(folder, "-c", EXECUTE, "notebook.ipynb")
    said = " ".join(outputs(folder / "executed.ipynb").values())
    assert [line.strip() for line in said.splitlines() if "cells to run" in line] == [
        "4 cells to run, 0 already done",
        "0 cells to run, 4 already done",
        "1 cells to run, 3 already done",
    ]


def test_the_stored_notebook_is_small_and_was_executed_in_order() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert NOTEBOOK.stat().st_size < 20_000


def test_without_torch_the_import_names_the_extra(folder: Path) -> None:
    code = """
import sys
sys.modules["torch"] = None
try:
    import edge_fl_lab.research
except ImportError as error:
    print(error)
"""
    line = "edge_fl_lab.research needs pip install 'edge-fl[server]' (torch is not installed)"
    assert python(folder, "-c", code).splitlines() == [line]
