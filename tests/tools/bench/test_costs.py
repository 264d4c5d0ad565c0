"""The costs behind the hours of `edge-fl recipes list` can be measured again."""

import json
from pathlib import Path

import pytest

from edge_fl.config import ModelConfig
from edge_fl_server.recipes.hours import COSTS
from tools.bench import costs


def test_a_larger_network_costs_more_and_a_method_is_measured_against_fedavg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = costs.seconds(ModelConfig("cnn-tiny"), (1, 8, 8), 32)
    large = costs.seconds(ModelConfig("cnn2"), (3, 32, 32), 32)
    assert 0 < 2 * small[0] < large[0] and 0 < small[1] < large[1]
    monkeypatch.setattr(costs, "NETWORK", "cnn-tiny")
    monkeypatch.setattr(costs, "COSTS", tmp_path / "costs.json")
    costs.main(["ditto"])
    before, after = json.loads(COSTS.read_bytes()), json.loads((tmp_path / "costs.json").read_bytes())
    assert 1.2 < after["methods"].pop("ditto")["train"] < 4
    assert before["methods"].pop("ditto") and after == before
