"""A sample of the gate table: false aborts at most 1 %, and gross harm stopped in the first stage. `make nightly` computes the whole."""

import numpy as np
import pytest

from edge_fl_server.recipes.recipe import RolloutConfig
from edge_fl_server.release.rollout.gates import Outcome
from edge_fl_server.release.rollout.stages import Stages, advanced, rank, with_outcome
from tools.bench import gates

IN_CI = {(10, 5), (20, 10), (70, 20)}
CASES = [
    pytest.param(
        devices,
        images,
        id=f"{devices}-{images}",
        marks=() if (devices, images) in IN_CI else pytest.mark.nightly,
    )
    for devices in gates.DEVICES
    for images in gates.IMAGES
]


@pytest.mark.parametrize(("devices", "images"), CASES)
def test_harmless_roll_outs_are_stopped_in_at_most_one_per_cent(devices: int, images: int) -> None:
    _, after = gates.rolled_out(devices, images, 0.0, gates.RUNS)
    assert after.aborted.mean() <= 0.01
    assert after.paused.mean() <= 0.01


@pytest.mark.parametrize(("devices", "images"), CASES)
def test_the_gates_stop_every_harm_before_those_of_before_and_gross_harm_in_the_first_stage(
    devices: int, images: int
) -> None:
    for harm in gates.HARMS:
        before, after = (end.reached.mean() for end in gates.rolled_out(devices, images, harm, 200))
        assert after <= before + 0.1
        if harm == 1.0 or (harm == 0.6 and images >= 20):
            assert after <= gates.stages(devices)[0] + 0.5


@pytest.mark.parametrize("harm", [0.0, 0.1, 0.6])
def test_a_simulated_roll_out_ends_as_the_products_does(harm: float) -> None:
    devices, images, runs = 20, 10, 60
    reports = gates.drawn(np.random.default_rng(3), runs, devices, images, harm)
    found = gates.ended(reports, gates.product, pooled=True)
    counts = gates.stages(devices)
    names = sorted(map("pi-{}".format, range(devices)), key=lambda name: rank(name, 1))
    shares = (*(rank(names[count], 1) for count in counts[:-1]), 1.0)
    for run in range(runs):
        at = Stages(1, RolloutConfig(stages=shares, success=0.01))
        for place, name in enumerate(names, 1):
            at = with_outcome(at, name, outcome(reports, run, place - 1))
            at = advanced(at, names, 0.0)
            if at.state != "running":
                break
        reached = next(count for count in counts if count >= place)
        ended = (at.state == "aborted", at.state == "paused", reached)
        assert ended == (found.aborted[run], found.paused[run], found.reached[run]), run


def outcome(reports: gates.Reports, run: int, place: int) -> Outcome:
    lost = int(reports.lost[run, place])
    if lost == gates.FAIL:
        return Outcome("enospc")
    slower = float(
        np.exp(
            np.random.default_rng(1).normal(0, gates.LATENCY, gates.LATENCIES)[reports.latency[run, place]]
        )
    )
    return Outcome("", reports.images, lost, int(reports.gained[run, place]), slower)


def test_the_command_prints_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    gates.main(["--runs", "20", "--harmful", "2"])
    printed = capsys.readouterr().out
    assert "| 5 | " in printed and "| 100 | 50 | " in printed
