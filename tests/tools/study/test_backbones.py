"""A tiny sample of the study of backbones, on made-up pictures of four domains."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from edge_fl.config import ModelConfig
from edge_fl.data import datasets
from edge_fl.files import npz
from edge_fl.inputs import InputSpec
from tools.study import backbone_cells, backbones
from tools.study.backbone_cells import Study

DOMAINS, CLASSES, OF_A_CLASS = datasets.DOMAINS["pacs"], 7, 6


def tiny(input: InputSpec, size: int) -> nn.Module:
    """In place of a pretrained network."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten())
    network.feature_dim = network(torch.zeros(1, *input.shape)).shape[1]  # type: ignore[assignment]
    return network


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every class has a grey level; the domains differ by noise."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(CLASSES), OF_A_CLASS)
    for number, domain in enumerate(DOMAINS):
        x = 30 * y[:, None, None, None] + rng.integers(0, 5 + number, (len(y), 40, 40, 3))
        npz.write(tmp_path / f"pacs-{domain}.npz", {"x": x.astype(np.uint8), "y": y})
    monkeypatch.setattr(backbone_cells, "TEST", 14)
    short = {row: replace(each, rounds=1, rounds_of_all=1) for row, each in backbones.TRAINING.items()}
    monkeypatch.setattr(backbones, "TRAINING", short)
    return tmp_path


def test_a_sample_of_the_study_ends_in_tables(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = data / "out"
    backbone = f"{tiny.__module__}:{tiny.__name__}"
    options = ["--data", str(data), "--out", str(out), "--rows", "pixels,frozen,lora"]
    options += ["--seeds", "1", "--backbone", backbone]
    backbones.main([*options, "--minutes", "0"])
    assert capsys.readouterr().out.startswith("paused")
    backbones.main([*options, "--labels", "1"])
    shown = capsys.readouterr().out
    lines = {tuple(cell.strip() for cell in line.split("|")[1:3]): line for line in shown.splitlines()}
    for row in ("pixels", "frozen", "lora"):
        assert (backbones.TITLES[row].format(224), f"{backbones.HEADS[row]} (default)") in lines
    assert float(lines["pixels (16x16)", "logistic (default)"].split("|")[3].split("±")[0]) > 80
    stored = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    backbones.main([*options, "--labels", "1"])
    assert capsys.readouterr().out == shown
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == stored


def test_all_numbers_of_labels_have_the_same_test_pictures(data: Path) -> None:
    dataset = datasets.load("pacs", data)
    study = Study(dataset, data, ModelConfig())
    few, every = study.split(1, seed=0), study.split(0, seed=0)
    assert tuple(few) == DOMAINS
    for number, domain in enumerate(DOMAINS):
        (train, test), (more, same) = few[domain], every[domain]
        assert np.array_equal(test, same)
        assert len(test) == backbone_cells.TEST
        assert set(train) < set(more)
        assert np.bincount(dataset.samples.y[train]).max() == 1
        assert dataset.domains is not None
        assert set(np.flatnonzero(dataset.domains == number)) == {*more, *test}
        assert not {*more} & {*test}
    assert not np.array_equal(study.split(1, seed=1)[DOMAINS[0]][1], few[DOMAINS[0]][1])
