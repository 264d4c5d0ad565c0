"""Every method runs on a frozen extractor; nothing of it travels or changes."""

import pytest
import torch

from edge_fl.config import ModelConfig
from edge_fl.methods import METHODS
from edge_fl.models import build_net
from tests.edge_fl.methods import toy

FROZEN = ModelConfig("cnn-tiny", {"feature_dim": 12, "width": 4}, train="none")


@pytest.mark.parametrize("name", sorted([*METHODS, "fedavg+ft"]))
def test_every_method_runs_on_a_frozen_extractor(name: str) -> None:
    net = build_net(FROZEN, toy.INPUT, toy.CLASSES)
    x = torch.rand(3, *toy.INPUT.shape)
    before = net.extractor({}, x)
    run = toy.federate(toy.method(name, net))
    sent = [update.parts for updates in run.updates for update in updates.values()]
    for parts in [*run.history, *sent, *(down for downs in run.downs for down in downs.values())]:
        assert not [key for part, params in parts.items() if part.startswith("extractor") for key in params]
    assert torch.equal(net.extractor({}, x), before)
    if run.method.predicts_early:
        assert run.predict("c0").shape == (len(run.images("c0")), toy.CLASSES)
