"""A small sample of the study: trials, federations, head-only clients, evidence, claims; interrupted and continued."""

from pathlib import Path

import numpy as np
import pytest

from edge_fl import metrics
from edge_fl.console import tables
from edge_fl.files import npz
from edge_fl_lab import recommend
from edge_fl_lab.compare.cell_runs import CellResult
from tools.study import cli, findings, images, runs, settings
from tools.study.settings import Setting
from tools.study.work import Run

METHODS = ("local", "fedavg", "fedavg+ft", "fedrep", "fedproto", "dualfed")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "ROUNDS", 1)
    monkeypatch.setattr(settings, "EPOCHS", 1)
    monkeypatch.setattr(settings, "SIZES", ((6, 20),))


@pytest.mark.usefixtures("short")
def test_a_sample_of_the_study_ends_in_evidence_that_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--datasets", "digits", "--methods", ",".join(METHODS), "--seeds", "1", "--trials", "1"]
    cli.main([*options, "--out", str(tmp_path), "--minutes", "0"])
    assert capsys.readouterr().out.startswith("paused")
    cli.main([*options, "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "| 8 | DualFed: both heads above the global one |" in shown
    found = recommend.load(tmp_path / "evidence.json")
    assert set(found.full) == set(METHODS)
    assert set(found.head) == {
        "pixels",
        "fedavg",
        "fedavg+ft",
        "fedrep",
        "dualfed",
    }  # local and fedproto export nothing
    assert [setting.partition for setting in found.settings] == list(settings.PARTITIONS["digits"])
    assert recommend.recommend(found, "head", 6, 20).method in found.head
    stored = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*.json")}
    cli.main([*options, "--out", str(tmp_path)])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*.json")} == stored


def test_each_dataset_has_three_partitions_and_every_size() -> None:
    every = settings.settings()
    assert len(every) == 15
    for name in settings.IMAGES:
        own = [setting for setting in every if setting.dataset == name]
        assert len({setting.partition for setting in own}) == 3
        assert {(setting.clients, setting.samples) for setting in own} == set(settings.SIZES)


def test_a_federation_has_the_clients_and_about_the_images_of_its_setting() -> None:
    setting = Setting("digits", "dirichlet-clients:0.5", 12, 50)
    study = runs.cell_runs.prepare(settings.cell(setting, Path(), 0, "fedavg"))
    assert (len(study.data()), len(study.unseen_data())) == (12, 4)
    assert np.mean([len(data.train) for data in study.data().values()]) == pytest.approx(50, abs=3)


def test_images_are_reduced_by_averaging_blocks(tmp_path: Path) -> None:
    x = np.zeros((2, 28, 28), np.uint8)
    x[0, :2, :2] = [[0, 100], [200, 100]]
    y = np.array([3, 4])
    npz.write(tmp_path / "mnist.npz", {"x": x, "y": y})
    images.reduced(tmp_path, tmp_path / "small", ("digits", "mnist"))
    small = npz.read(tmp_path / "small" / "mnist.npz")
    assert small["x"].shape == (2, 1, 14, 14)
    assert small["x"][small["y"] == 3][0, 0, 0].tolist() == [100, *[0] * 13]


def finished(a: float, b: float, dataset: str, seed: int) -> list[Run]:
    setting = Setting(dataset, "iid", 6, 20)
    cell = settings.cell(setting, Path(), seed, "fedavg")
    blank = CellResult(cell.key, "", cell.recipe)
    made = {"fedcrl": a, "fedproto": b}
    return [
        Run(setting, seed, name, replace_clients(blank, {metrics.PERSONAL_AFTER: value}))
        for name, value in made.items()
    ]


def replace_clients(result: CellResult, report: dict[str, float]) -> CellResult:
    return runs.msgspec.structs.replace(result, clients={"c000": report})


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ([0.02, 0.03, 0.02], [0.03, 0.02, 0.03], "holds"),
        ([0.02, 0.03, 0.02], [-0.2, 0.2, -0.1], "holds only on digits"),
        ([-0.2, 0.2, -0.1], [-0.03, 0.0, 0.02], "does not hold: the interval includes 0"),
        ([-0.02, -0.03, -0.02], [-0.03, -0.02, -0.01], "does not hold: the reverse does"),
    ],
)
def test_a_verdict_follows_from_the_intervals(first: list[float], second: list[float], words: str) -> None:
    runs_ = [
        run
        for dataset, differences in (("digits", first), ("mnist", second))
        for seed, difference in enumerate(differences)
        for run in finished(0.5 + difference, 0.5, dataset, seed)
    ]
    [verdict] = [v for v in findings.verdicts(runs_) if v.claim.text == "FedCRL above FedProto"]
    assert verdict.words == words
    assert verdict.overall is not None and verdict.overall.n == 6


@pytest.mark.parametrize("tier", ["full", "head"])
def test_the_documented_accuracies_are_those_of_the_shipped_evidence(tier: recommend.Tier) -> None:
    page = (Path(__file__).parents[3] / "docs" / "choosing-a-method.md").read_text()
    lines = tables.markdown(cli.accuracies(recommend.load(), tier)).strip().splitlines()
    assert "\n".join(line for line in lines if line.startswith("|")) in page


def test_every_claim_is_documented_with_its_command() -> None:
    page = (Path(__file__).parents[3] / "docs" / "choosing-a-method.md").read_text()
    for number, claim in enumerate(findings.CLAIMS, 1):
        [row] = [line for line in page.splitlines() if line.startswith(f"| {number} | {claim.text} |")]
        assert claim.command in row


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--datasets digit", "unknown dataset 'digit'"),
        ("--methods fedrepp", "method 'fedrepp': unknown"),
        ("--datasets mnist --data nowhere", "no folder nowhere"),
    ],
)
def test_wrong_input_starts_nothing(
    typed: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([*typed.split(), "--out", str(tmp_path / "out")])
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
