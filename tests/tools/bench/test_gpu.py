"""The GPU benchmark at tiny sizes on the CPU: every item runs and states what it would measure."""

import importlib.util
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from edge_fl.errors import InputError
from edge_fl.methods import build_method
from edge_fl_server.training.studies import Study
from tools.bench import cli
from tools.bench.accelerator import items, limits, pfllib, published, quickstart, rounds, steps
from tools.bench.accelerator.scale import TINY
from tools.bench.figures import Figure, Report

CHECKOUT = os.environ.get("EDGE_FL_PFLLIB", "")
PFLLIB_NEEDS = ("calmsize", "cvxpy", "h5py")


def measured(name: str, checkout: Path | None = None) -> list[Figure]:
    failed: list[str] = []
    found = list(items.figures([name], 1, TINY, checkout, failed))
    assert not failed and found
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if name == "rounds" else ()) for name in items.ITEMS],
)
@pytest.mark.timeout(300)
def test_without_a_gpu_an_item_runs_and_states_what_it_would_measure(name: str) -> None:
    first, *others = measured(name)
    assert first.notes["on a GPU"] == items.ITEMS[name].goal
    assert all(figure.verdict == "" and figure.found > 0 for figure in (first, *others)), (
        "a result is claimed"
    )


def test_the_goals_name_the_targets() -> None:
    goals = {name: item.goal for name, item in items.ITEMS.items()}
    assert f"at least {quickstart.TARGET:g}x" in goals["quick-start"]
    assert f"at most {published.TARGET_S:g} s" in goals["published"]
    for target, _ in rounds.federations(TINY).values():
        assert not target or f" {target:g}x for" in goals["rounds"]


def test_the_report_says_that_its_numbers_are_not_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["--gpu", "memory", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "the numbers are not results" in printed.splitlines()[0]
    report = msgspec.json.decode((tmp_path / "bench.json").read_bytes(), type=Report)
    assert report.remark == items.NO_GPU and len(report.figures) == 1
    assert "the numbers are not results" in (tmp_path / "bench.txt").read_text()


def test_an_item_that_fails_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--gpu", "quick-start", "memory", "--pfllib", str(tmp_path), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="failed: quick-start"):
        cli.main(arguments)
    seen = capsys.readouterr()
    assert "expected a checkout of PFLlib" in seen.err and "memory cnn2" in seen.out


def test_a_round_of_the_vectorised_engine_is_compared_with_the_plain_loop() -> None:
    name, (target, study) = next(iter(rounds.federations(TINY).items()))
    found = rounds.compared(name, target, study(), 1, TINY)
    assert target and found.comparable and found.verdict in ("reached", "missed")
    assert float(found.notes["peak MB"]) > 0 and len(found.notes) == rounds.SHOWN + 1


def test_the_stacked_step_computes_what_single_steps_do() -> None:
    step = steps.StackedStep("cnn2", TINY)
    after = step()
    for place in range(TINY.clients):
        alone = step.single(place)
        assert all(torch.allclose(after[name][place], alone[name], atol=1e-6) for name in after)
    assert not torch.equal(after["head.bias"], step.params["head.bias"]), "nothing was trained"


def test_traffic_counts_what_operators_read_and_write_and_no_views() -> None:
    a, b = torch.ones(100), torch.ones(100)
    with limits.Traffic() as traffic:
        (a.view(10, 10).t() + b.view(10, 10)).add_(1.0)
        torch.ones(1).expand(50) * 2.0
    assert traffic.operators == 4, "add, add_, ones, mul"
    assert traffic.bytes == 3 * 400 + 2 * 400 + 4 + (4 + 200), "an expanded value is read once"


def test_the_nearest_limit_is_the_longest_time() -> None:
    found = limits.explained("cnn2", 1, TINY)
    times = {name: float(found.notes[f"ms by {name}"]) for name in ("launches", "bandwidth", "FLOP")}
    nearest = max(times, key=lambda name: times[name])
    assert found.what.endswith(f"nearest limit: {nearest}")
    assert found.value == pytest.approx(100 * times[nearest] / float(found.notes["step ms"]))


def test_blazefls_network_has_as_many_parameters_as_the_tutorials() -> None:
    study = published.study(*TINY.published)
    assert sum(t.numel() for t in network(study)) == 62_006
    assert study.recipe.method.batch_size == 50


def test_the_quick_start_has_pfllibs_split_and_network() -> None:
    study = quickstart.study(3, 240)
    assert sum(map(len, study.split.train)) == pytest.approx(180, abs=3)
    assert sum(t.numel() for t in network(study)) == 582_026, "PFLlib's FedAvgCNN for one channel"


def test_phases_separate_rounds_with_and_without_evaluation() -> None:
    evaluated, trained = quickstart.phases([[9, 5, 1, 7, 3]], first=1)
    assert (evaluated.clock, trained.clock) == ([6], [2])
    evaluated, trained = quickstart.phases([[9, 1, 5, 3, 7]], first=0)
    assert (evaluated.clock, trained.clock) == ([6], [2])


def test_pfllib_gets_normalised_images_of_every_client(tmp_path: Path) -> None:
    study = quickstart.study(3, 240)
    pfllib.write(study, tmp_path)
    rows = study.split.test[2]
    content = np.load(tmp_path / "test" / "2.npz", allow_pickle=True)["data"].tolist()
    assert content["x"].dtype == np.float32 and content["x"].shape == (len(rows), 1, 28, 28)
    (mean,), (std,) = study.spec.input.mean, study.spec.input.std
    assert np.allclose(content["x"] * std + mean, study.dataset.samples.x[rows] / 255, atol=1e-6)
    assert (content["y"] == study.dataset.samples.y[rows]).all()


def test_a_folder_without_pfllib_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a checkout of PFLlib"):
        pfllib.train(tmp_path, quickstart.study(3, 240), "cpu", 1, 1)


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="needs a checkout of PFLlib: set EDGE_FL_PFLLIB to its folder")
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PFLLIB_NEEDS),
    reason=f"PFLlib needs {', '.join(PFLLIB_NEEDS)}",
)
def test_the_quick_start_is_compared_with_pfllib() -> None:
    (found,) = measured("quick-start", Path(CHECKOUT))
    assert found.sides.keys() == {"PFLlib", "vector"} and found.theirs == "PFLlib"
    assert 0 < float(found.notes["PFLlib's accuracy"]) <= 1
    assert len(found.ratios) == 1 and found.found == found.ratios[0]


def network(study: Study) -> list[torch.Tensor]:
    """All parameters of a study's network."""
    net = build_method(study.spec).net
    return [tensor for part in net.parts.values() for tensor in part.init().values()]
