"""Checkpoints: bit for bit, whole or passed over, and a resumed simulation equals one that was never interrupted."""

import pytest
import torch

from edge_fl.errors import ArtefactError
from edge_fl.learn.tree import same
from edge_fl.methods import build_method
from edge_fl_server.recipes.recipe import CohortConfig
from edge_fl_server.runs import checkpoint
from edge_fl_server.training import rounds
from edge_fl_server.training.engines.simulated import SequentialClients
from edge_fl_server.training.rounds import Plan

PLAN = Plan(5, 3, CohortConfig(participation=0.5))
SHARED = {"extractor": {"w": torch.randn(3, 2), "buffer:n": torch.tensor(7)}, "projection": {}}
OWN = {
    "sim-001": {"head": {"b": torch.tensor([1e-40, -0.0])}},
    "c000": {"extractor.norm": {"x": torch.ones(1)}},
}


def test_everything_comes_back_bit_for_bit(tmp_path):
    checkpoint.save(tmp_path, 2, PLAN, SHARED, OWN.items())
    found = checkpoint.load(tmp_path)
    assert (found.round, found.plan) == (2, PLAN)
    assert same(found.shared, SHARED)
    assert found.shared.keys() == SHARED.keys()
    assert found.own.keys() == OWN.keys()
    assert all(same(found.own[client], OWN[client]) for client in OWN)


def test_the_one_before_is_kept_and_no_more(tmp_path):
    for round in range(1, 5):
        checkpoint.save(tmp_path, round, PLAN, SHARED)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"round-0000{round}.{kind}" for round in (3, 4) for kind in ("json", "safetensors")]


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


TEARS = {
    "tensors cut": lambda folder: cut(folder / "round-00002.safetensors"),
    "tensors flipped": lambda folder: flip(folder / "round-00002.safetensors"),
    "tensors gone": lambda folder: (folder / "round-00002.safetensors").unlink(),
    "index cut": lambda folder: cut(folder / "round-00002.json"),
    "index not written": lambda folder: (folder / "round-00002.json").unlink(),
}


@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_one_is_passed_over_and_said(tmp_path, caplog, tear):
    for round in (1, 2):
        checkpoint.save(tmp_path, round, PLAN, {"extractor": {"w": torch.full((2,), float(round))}})
    TEARS[tear](tmp_path)
    found = checkpoint.load(tmp_path)
    assert found.round == 1
    assert found.shared["extractor"]["w"].tolist() == [1.0, 1.0]
    assert ("round-00002: damaged" in caplog.text) == (tear != "index not written")


def test_without_a_whole_one_nothing_is_resumed(tmp_path):
    checkpoint.save(tmp_path, 1, PLAN, SHARED)
    flip(tmp_path / "round-00001.safetensors")
    with pytest.raises(ArtefactError, match="no intact checkpoint"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("name", ["fedrep", "repper"])
def test_resuming_after_any_round_equals_an_undisturbed_run(stage, tmp_path, name):
    plan = Plan(3, seed=1, cohort=CohortConfig(participation=0.7))

    def fleet_of(method):
        return SequentialClients({id: stage.client(id) for id in ("c000", "c001", "c002")}, method)

    method = build_method(stage.spec(name))
    fleet = fleet_of(method)
    for result in rounds.run(method, fleet, plan):
        checkpoint.save(
            tmp_path / str(result.round), result.round, plan, result.shared, fleet.personal_state()
        )
    expected = rounds.final_personalisation(method, fleet, result.shared, 3)
    for after in (1, 2, 3):
        saved = checkpoint.load(tmp_path / str(after))
        method = build_method(stage.spec(name))
        fleet = fleet_of(method)
        fleet.restore(iter(saved.own.items()))
        shared = saved.shared
        for result in rounds.run(method, fleet, saved.plan, shared, first=after + 1):
            shared = result.shared
        found = rounds.final_personalisation(method, fleet, shared, 3)
        assert same(found[0], expected[0])
        assert found[1] == expected[1]
