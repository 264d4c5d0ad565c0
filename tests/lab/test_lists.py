"""Lists of methods, models, heads and datasets, also of installed packages; JSON of every research command; own heads in research."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_fl import cli, heads, methods, metrics
from edge_fl.data.datasets import DATASETS
from edge_fl.errors import ConfigError
from edge_fl.files import npz
from edge_fl.models import MODELS, backbones

SMALL = [
    "--clients",
    "3",
    "--rounds",
    "1",
    "--set",
    "data.fraction=0.2",
    "--set",
    "model.options={feature_dim=8, width=4}",
]
OWN = """
from edge_fl.heads.linear import Nearest
from edge_fl.methods.fedavg import FedAvg


class Own(Nearest):
    kind = "own"


class Method(FedAvg):
    citation = "ours"
"""
ENTRY_POINTS = """
[edge_fl.methods]
own-method = own_extension:Method
broken-method = own_extension:Missing
[edge_fl.heads]
own = own_extension:Own
broken = no_such_module:Head
"""
JSON_COMMANDS = (
    "simulate", "compare", "methods list", "methods show", "models list", "heads list", "datasets list", "recipes list",
    "runs list", "data download", "data convert", "plots", "newtask", "report",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module of the user."""
    (tmp_path / "own_extension.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path  # type: ignore[misc]
    sys.modules.pop("own_extension", None)


@pytest.fixture
def package(folder: Path) -> str:
    """The module as an installed package with entry points, two of which cannot be imported."""
    info = folder / "own_extension-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-extension\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return "own-extension"


def output(capsys: pytest.CaptureFixture[str], *command: str) -> Any:
    """The JSON that a command prints."""
    capsys.readouterr()
    assert cli.main([*command, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", JSON_COMMANDS)
def test_research_commands_print_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([*command.split(), "--help"])
    assert "--format" in capsys.readouterr().out


def test_lists_name_everything_built_in(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    npz.write(folder / "mine.npz", {"x": np.zeros((2, 4, 4), np.uint8), "y": np.array([0, 1])})
    assert [row["name"] for row in output(capsys, "methods", "list")] == methods.names()
    models = {row["name"]: row for row in output(capsys, "models", "list")}
    assert list(models) == [*MODELS, *backbones.NAMES] and models["cnn4"]["options"] == "width=64"
    assert models["efficientnet-lite0"]["weights"].endswith(backbones.LITE0_FILE)
    assert all(row["description"] for row in models.values())
    kinds = output(capsys, "heads", "list")
    assert [row["name"] for row in kinds] == list(heads.HEADS)
    assert all(row["description"] and row["package"] == "edge-fl" for row in kinds)
    datasets = {row["name"]: row for row in output(capsys, "datasets", "list", "--data-dir", ".")}
    assert list(datasets) == [*DATASETS, "mine"]
    available = [name for name, row in datasets.items() if row["available"]]
    assert available == ["digits", "mine"] and datasets["mine"]["where"] == "mine.npz"
    assert (
        datasets["cifar100"]["classes"] == 100 and "data download cifar100" in datasets["cifar100"]["where"]
    )
    assert datasets["pacs"]["domains"].startswith("art_painting")


def test_domains_and_files_in_the_data_folder_are_found(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("pacs-photo", "mnist"):
        npz.write(folder / f"{name}.npz", {"x": np.zeros((2, 4, 4), np.uint8), "y": np.array([0, 1])})
    datasets = {row["name"]: row for row in output(capsys, "datasets", "list", "--data-dir", ".")}
    assert datasets.keys() == DATASETS.keys()
    assert datasets["pacs"]["available"] and datasets["mnist"]["available"]


def test_methods_and_heads_of_installed_packages_are_listed(
    package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {row["name"]: row for row in output(capsys, "methods", "list")}
    assert rows["own-method"]["citation"] == "ours"
    assert f"own_extension:Missing of package {package}" in rows["broken-method"]["family"]
    kinds = {row["name"]: row for row in output(capsys, "heads", "list")}
    assert kinds["own"]["package"] == package
    assert "no_such_module:Head" in kinds["broken"]["description"]
    assert output(capsys, "methods", "show", "own-method")["citation"] == "ours"
    assert cli.main(["simulate", "--method", "broken-method"]) == 4
    assert "expected the entry point own_extension:Missing" in capsys.readouterr().err


def test_the_json_of_a_method_has_its_hyper_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    found = output(capsys, "methods", "show", "fedcrc")
    tau = next(hyper for hyper in found["hyper_parameters"] if hyper["name"] == "tau")
    assert tau["default"] == 0.99 and (tau["low"], tau["high"]) == (0, 1)
    assert found["bytes_down"] > 0 and found["egress"][0]["tier"]


def test_own_heads_are_fitted_by_simulate_compare_and_newtask(
    package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["--head", "own", "--head", "own_extension:Own", "--head", "nearest"]
    rows = output(capsys, "simulate", "--method", "fedrep", *SMALL, *names)
    means = {row["metric"]: row["mean"] for row in rows}
    assert means[metrics.of_head("own")] == means[metrics.of_head("nearest")] > 0.5
    compared = output(capsys, "compare", "--methods", "fedrep", "--seeds", "1", *SMALL, *names[:2])
    numbers = {row["method"]: row["numbers"] for row in compared["rows"]}
    assert numbers["fedrep"][metrics.of_head("own")]["mean"] == means[metrics.of_head("own")]
    assert metrics.of_head("own") not in numbers["local"]
    (run,) = Path("runs").glob("simulate-*")
    fitted = output(
        capsys, "newtask", str(run), "--dataset", "digits", "--clients", "3", "--head", "own_extension:Own"
    )
    assert [row["iterations"] for row in fitted] == [None] and fitted[0]["mean"] > 0.3


def test_a_recipe_names_heads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.toml").write_text('heads = ["own_extension:Own"]\n')
    rows = output(capsys, "simulate", "--recipe", "own.toml", *SMALL)
    assert metrics.of_head("own") in {row["metric"] for row in rows}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("svn", r"did you mean 'svm'"),
        ("own_extension:No", "cannot be imported"),
        ("no_such_module:Own", "cannot be imported"),
        ("own_extension:Method", r"expected a subclass of edge_fl\.heads\.FittableHead"),
        (":x", "cannot be imported"),
    ],
)
def test_wrong_heads_start_nothing(
    name: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=message):
        heads.resolve(name)
    for command in (["simulate"], ["compare", "--methods", "fedrep"]):
        assert cli.main([*command, "--head", name]) == 4
    assert not Path("runs").exists()


def test_devices_do_not_import_modules_that_a_head_file_names(folder: Path) -> None:
    with pytest.raises(ConfigError, match="unknown"):
        heads.find("own_extension:Own")
    assert "own_extension" not in sys.modules
