"""Networks have the sizes of their papers."""

import pytest
import torch

from edge_fl.config import ModelConfig
from edge_fl.inputs import InputSpec
from edge_fl.learn import tree
from edge_fl.models import build_net


@pytest.mark.parametrize(
    ("options", "parameters", "features"), [({}, 3_206_976, 1024), ({"width": 0.25}, 213_072, 256)]
)
def test_mobilenet_v1_has_the_parameters_of_its_paper(
    options: dict[str, float], parameters: int, features: int
) -> None:
    """4.2 M and 0.5 M with 1000 classes (arXiv:1704.04861, Table 6)."""
    net = build_net(ModelConfig("mobilenet-v1", options), InputSpec((3, 32, 32)), 10)
    extractor = net.extractor.init()
    assert sum(t.numel() for t in tree.parameters(extractor).values()) == parameters
    assert net.extractor.frozen(extractor, torch.zeros(2, 3, 32, 32)).shape == (2, features)
