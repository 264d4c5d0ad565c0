"""The comparison with PFLlib: two methods on a checkout if there is one, and the script's own errors and verdicts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from edge_fl.methods import METHODS
from tests.differential.cases import CASES
from tests.differential.pfllib import Outcome, different, main

ROOT = Path(__file__).parents[2]
CHECKOUT = os.environ.get("EDGE_FL_PFLLIB", "")
EQUAL_AS_PUBLISHED = {
    "local",
    "fedavg",
    "fedper",
    "fedrep",
    "ditto",
    "moon",
    "lg-fedavg",
    "fed-rod",
    "fedala",
    "fedbabu",
    "scaffold",
    "fedntd",
}


@pytest.mark.skipif(
    not CHECKOUT, reason="needs a checkout of PFLlib: set EDGE_FL_PFLLIB to its folder (docs/pfllib.md)"
)
def test_a_method_equals_pfllib_and_another_one_does_after_the_repair() -> None:
    command = [sys.executable, "-m", "tests.differential.pfllib", CHECKOUT, "--methods", "fedrep,fedgh"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert ["FedRep", "equal", "5", "rounds", "x", "180", "test", "images"] in lines
    assert ["FedGH", "differs,", "repaired:", "equal", "5", "rounds", "x", "180", "test", "images"] in lines
    assert lines[-1] == ["2", "of", "2", "comparisons", "are", "equal"]


def test_every_method_is_one_of_ours_and_the_required_ones_need_no_change() -> None:
    assert {case.name for case in CASES} <= set(METHODS)
    assert {case.name for case in CASES if not case.changes} >= EQUAL_AS_PUBLISHED


def test_equal_means_the_same_images_in_every_round() -> None:
    case = next(case for case in CASES if case.name == "fedgh")
    ours = [torch.tensor([True, False, True])] * 2
    as_many = [ours[0], torch.tensor([True, True, False])]
    assert different(ours, as_many) == 2
    assert Outcome(case, ours, as_many, ours).equal
    assert not Outcome(case, ours, ours, as_many).equal
    assert (
        Outcome(case, ours, as_many, ours).lines()[0].split()
        == "FedGH differs, repaired: equal 2 rounds x 3 test images".split()
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((".",), "no folder system/flcore/servers, expected a checkout of PFLlib"),
        ((".", "--methods", "fedreq"), "--methods: 'fedreq', expected some of local,fedavg"),
    ],
)
def test_a_wrong_argument_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]
