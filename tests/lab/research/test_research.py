"""The Python API: runs and comparisons on arrays, with the numbers of the commands; wrong input starts nothing."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from edge_fl import cli, metrics
from edge_fl.data import partition
from edge_fl.errors import ConfigError, EdgeFLError
from edge_fl.inputs import InputSpec
from edge_fl_lab import trained
from edge_fl_lab.research import Result, compare, run
from edge_fl_server.runs.results import Results

SMALL = {"model.options": {"feature_dim": 8, "width": 4}, "method.batch_size": 16}
N = 120
RNG = np.random.default_rng(0)
LABELS = RNG.permutation(np.arange(N) % 3)
IMAGES = (RNG.integers(0, 90, (N, 8, 8)) + 60 * LABELS[:, None, None]).astype(np.uint8)
CLIENTS = np.arange(N) % 3


def small(method: str = "fedrep", *data: Any, **options: Any) -> Result:
    """A run of two rounds on the arrays above, unless `data` says otherwise."""
    settings = {**SMALL, **options.pop("settings", {})}
    return run(
        method, *(data or (IMAGES, LABELS)), **{"clients": 3, "rounds": 2, **options}, settings=settings
    )


class Tiny(nn.Module):
    """A model of this module, given as a class."""

    def __init__(self, input: InputSpec) -> None:
        super().__init__()
        self.feature_dim = input.height * input.width
        self.flatten = nn.Flatten()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.flatten(x)
        return found


def test_metrics_are_arrays_and_rows_of_every_client_and_evaluated_round() -> None:
    result = small(settings={"evaluate_every": 2})
    assert result.clients == ("c000", "c001", "c002")
    assert result.accuracy is result.metrics[metrics.PERSONAL_AFTER]
    assert result.accuracy.shape == (3,) and result.accuracy.dtype == np.float64
    rows = result.rows()
    assert {row["round"] for row in rows} == {2} and {row["client"] for row in rows} == set(result.clients)
    after = [row["value"] for row in rows if row["metric"] == metrics.PERSONAL_AFTER]
    assert after == result.accuracy.tolist()
    assert len({(row["client"], row["round"], row["metric"]) for row in rows}) == len(rows)
    assert [row["round"] for row in result.rounds] == [1, 2]
    assert result.rounds[1][metrics.PERSONAL_BEFORE] == result.metrics[metrics.PERSONAL_BEFORE].mean()
    assert result.summary[metrics.PERSONAL_AFTER].mean == pytest.approx(result.accuracy.mean())
    assert "fedrep: mean accuracy" in repr(result) and result.folder is None and result.note == ""


def test_predictions_of_the_trained_model_give_the_reported_accuracy() -> None:
    for method in ("fedrep", "fedavg+ft", "ditto"):
        result = small(method)
        for client, data in result.trained.study.data().items():
            right = (result.predict(client, data.test.x) == data.test.y).mean()
            assert right == result.accuracy[result.clients.index(client)]
    with pytest.raises(EdgeFLError, match=r"client 'c009' did not train \(did you mean 'c00"):
        result.predict("c009", IMAGES)
    with pytest.raises(EdgeFLError, match=r"pictures of \[1, 4, 8\], expected \[1, 8, 8\]"):
        result.predict("c000", IMAGES[:, :4])


def test_the_numbers_are_those_of_simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--clients", "4", "--rounds", "2", "--set", "seed=1", "--set", "data.fraction=0.2"]
    command = ["simulate", "--method", "fedrep", *options, "--runs", str(tmp_path), "--format", "json"]
    assert cli.main(command) == 0
    shown = {
        row["metric"]: row["mean"] for row in json.loads(capsys.readouterr().out) if row["round"] == "last"
    }
    result = run("fedrep", "digits", clients=4, rounds=2, seed=1, settings=["data.fraction=0.2"])
    assert {name: summary.mean for name, summary in result.summary.items()} == shown


def test_a_folder_holds_a_run_with_its_data_and_the_same_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test = (IMAGES[:30], LABELS[:30], CLIENTS[:30])
    given = {"test": test, "clients": CLIENTS[30:], "settings": {"data.shots": 9}}
    arrays = (IMAGES[30:], LABELS[30:])
    result = small("fedrep", *arrays, **given, folder=tmp_path)
    assert capsys.readouterr() == ("", "")
    assert result.folder is not None and result.folder.parent == tmp_path
    assert (result.folder / "report.html").is_file()
    assert Results.open(result.folder).state().state == "completed"
    assert result.accuracy.tolist() == small("fedrep", *arrays, **given).accuracy.tolist()
    again = trained.load(Results.open(result.folder))
    assert again.study.fingerprint() == result.trained.study.fingerprint()
    assert again.personal.keys() == result.trained.personal.keys()


def test_separate_test_samples_are_never_trained_on() -> None:
    result = small("fedavg", IMAGES[30:], LABELS[30:], test=(IMAGES[:30], LABELS[:30]), partition="iid")
    split = result.trained.study.split
    assert sorted(np.concatenate(split.test)) == list(range(90, 120))
    assert sorted(np.concatenate([*split.train, *split.validation])) == list(range(90))


def test_clients_are_given_by_number_name_split_or_file(tmp_path: Path) -> None:
    numbered = small(clients=CLIENTS, rounds=0)
    split = numbered.trained.study.split
    for client, *rows in zip(range(3), split.train, split.validation, split.test, strict=True):
        assert set(CLIENTS[np.concatenate(rows)]) == {client}
    names = small(clients=np.array(["b", "a", "c"])[CLIENTS], rounds=0)
    assert names.clients == ("a", "b", "c")
    split.write_csv(tmp_path / "split.csv")
    for given in (split, tmp_path / "split.csv"):
        assert small(clients=given, rounds=0).trained.study.split.fingerprint() == split.fingerprint()


def test_floats_give_the_same_run_as_their_grey_levels() -> None:
    one, other = small(), small("fedrep", (IMAGES / 255)[:, None], list(LABELS))
    assert one.accuracy.tolist() == other.accuracy.tolist()


def test_settings_models_options_and_heads_reach_the_run() -> None:
    result = small(
        "fedcrc:tau=0.9",
        model=Tiny,
        partition="iid",
        settings={"model.options": {}, "heads": ["svm"], "cohort": {"participation": 0.5}},
    )
    recipe = result.trained.recipe
    assert recipe.method.options == {"tau": 0.9} and recipe.model.name == f"{__name__}:Tiny"
    assert recipe.data.partition == "iid" and result.rounds[0]["clients"] == 1
    assert np.isfinite(result.metrics[metrics.of_head("svm")]).all()
    assert small(recipe="demo", rounds=1).trained.recipe.method.name == "fedrep"


def test_a_comparison_has_rows_of_every_method_seed_and_client(tmp_path: Path) -> None:
    given = {"clients": CLIENTS, "rounds": 1, "seeds": 2, "settings": SMALL, "folder": tmp_path}
    comparison = compare(["fedrep"], IMAGES, LABELS, **given)
    assert [row["method"] for row in comparison.table] == ["local", "fedavg", "fedavg+ft", "fedrep"]
    after = [row for row in comparison.rows() if row["metric"] == metrics.PERSONAL_AFTER]
    assert len(after) == 4 * 2 * 3
    mean = np.mean([row["value"] for row in after if row["method"] == "fedrep"])
    assert comparison.table[3][metrics.PERSONAL_AFTER] == pytest.approx(mean)
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert compare(["fedrep"], IMAGES, LABELS, **given).table == comparison.table
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()} == stored


def test_few_recordings_of_named_clients_leave_no_class_untrained() -> None:
    """Two recordings of each class: one would often be drawn for tests, and the other one for validation."""
    labels, recordings = np.repeat(np.arange(6), 10), np.repeat(np.arange(12), 5)
    input = InputSpec((2, 16), axes="CT", dtype="float32", rate=8, hop=16)
    windows, clients = RNG.normal(size=(60, 2, 16)).astype(np.float32), np.zeros(60, int)
    for seed in range(5):
        given: dict[str, Any] = {"input": input, "groups": recordings, "clients": clients, "seed": seed}
        study = run("local", windows, labels, rounds=1, engine="sequential", **given).trained.study
        assert {*labels[study.split.train[0]]} == {*range(6)}, seed


def test_windows_of_a_series_run_by_recording_and_come_back_from_the_folder(tmp_path: Path) -> None:
    input = InputSpec((2, 16), axes="CT", dtype="float32", rate=8, hop=16)
    windows = (RNG.normal(0, 0.3, (N, 2, 16)) + LABELS[:, None, None]).astype(np.float32)
    recordings = np.arange(N) // 4
    settings = {"model.options": {"feature_dim": 8, "width": 4}, "method.batch_size": 16}
    options: dict[str, Any] = {"clients": 3, "rounds": 2, "settings": settings, "folder": tmp_path}
    result = run("fedrep", windows, LABELS, input=input, groups=recordings, **options)
    study = result.trained.study
    assert study.recipe.model.name == "cnn1d" and study.dataset.given == input
    for number in range(3):
        sets = [set(recordings[part[number]]) for part in (study.split.train, study.split.test)]
        assert not sets[0] & sets[1]
    (client, data), *_ = study.data().items()
    found = result.predict(client, data.test.x)
    assert (found == data.test.y).mean() == result.accuracy[result.clients.index(client)]
    with pytest.raises(EdgeFLError, match=r"windows of \[2, 8\], expected \[2, 16\]"):
        result.predict(client, data.test.x[:, :, :8])
    with pytest.raises(EdgeFLError, match=r"windows of \[2, 8\], but the input says \[2, 16\]"):
        run("fedrep", windows[:, :, :8], LABELS, input=input)
    with pytest.raises(EdgeFLError, match=r"groups are .*expected 120 whole numbers or strings"):
        run("fedrep", windows, LABELS, input=input, groups=recordings[:-1])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "flat images": ({"images": IMAGES[:, 0]}, r"images of shape \[120, 8\], expected \[N, H, W\]"),
    "pixels": ({"images": IMAGES * 2.0}, r"float64 images range over .*, expected 0\.\.1"),
    "labels": ({"labels": LABELS[1:]}, "120 pictures but 119 labels, expected one label per picture"),
    "no labels": ({"labels": None}, "samples without labels, expected both"),
    "float labels": ({"labels": LABELS / 2}, r"labels are float64 \[120\], expected whole numbers"),
    "ragged": ({"images": [[1, 2], [3]], "labels": [0, 1]}, "expected samples of one shape"),
    "test": ({"test": (IMAGES,)}, r"test: 1 values, expected \(images, labels\)"),
    "test shape": ({"test": (IMAGES[:, :4], LABELS)}, r"\[1, 8, 8\] and \[1, 4, 8\], expected one shape"),
    "clients": ({"clients": CLIENTS[1:]}, r"clients: int64 \[119\], expected .* each of the 120 samples"),
    "test clients": ({"clients": CLIENTS, "test": (IMAGES, LABELS)}, r"test: no clients, expected \(images, labels, clients\)"),
    "client names": ({"clients": ["a/b"] * N}, "client 'a/b', expected 1 to 64 of A-Z"),
    "few samples": ({"clients": np.arange(N)}, "client c000: 1 samples, expected 2 or more"),
    "partition": ({"partition": "dirichlte:1"}, "did you mean 'dirichlet'"),
    "setting": ({"settings": {"cohort.fraction": 0.5}}, r"\[cohort\] unknown key 'fraction'"),
    "settings": ({"settings": "rounds=1"}, "expected a dict, or a list of 'key=value'"),
    "method": ({"method": "fedrap"}, "did you mean 'fedrep'"),
    "head": ({"settings": {"heads": ["smv"]}}, "did you mean 'svm'"),
    "name and labels": ({"images": "digits"}, "expected either a name or arrays"),
    "source": ({"settings": {"source": "fleet"}}, "source = 'fleet', expected simulated"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_input_is_one_line_and_starts_nothing(wrong: str, tmp_path: Path) -> None:
    change, message = WRONG[wrong]
    given = {"method": "fedrep", "images": IMAGES, "labels": LABELS, "folder": tmp_path / "runs"}
    with pytest.raises(EdgeFLError, match=message) as error:
        run(**{**given, **change})
    assert "\n" not in str(error.value) and error.value.exit_code == 4
    several = {**given, **change}
    with pytest.raises(EdgeFLError, match=message):
        compare([several.pop("method")], **several)
    assert not (tmp_path / "runs").exists()


def test_a_model_of_a_notebook_needs_an_engine_in_the_same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tiny, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Tiny", Tiny, raising=False)
    with pytest.raises(ConfigError, match=r"Tiny is defined in this script or notebook.*engine 'pool'"):
        small(model=Tiny, engine="pool")
    with pytest.raises(ConfigError, match="jobs = 2"):
        compare(["fedrep"], IMAGES, LABELS, model=Tiny, jobs=2)


def test_a_split_of_another_dataset_is_rejected() -> None:
    empty = np.empty(0, np.int64)
    split = partition.Split(9, ("a",), (np.arange(8),), (empty,), (np.array([8]),))
    with pytest.raises(EdgeFLError, match="a split of 9 samples for 120"):
        small(clients=split)


def test_gapped_labels_give_a_warning() -> None:
    with pytest.warns(UserWarning, match="arrays: no samples of 1 of 4 classes: 0"):
        small("fedrep", IMAGES, LABELS + 1, rounds=0)
