"""Networks have the sizes of their papers, and take samples of every size that they say."""

import pytest
import torch

from edge_fl.config import ModelConfig
from edge_fl.inputs import InputSpec
from edge_fl.learn import tree
from edge_fl.models import build_net, with_pinned_weights


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


@pytest.mark.parametrize("shape", [(1, 8), (6, 16), (3, 200), (2, 4096)])
@pytest.mark.parametrize("norm", [True, False])
def test_cnn1d_takes_windows_of_any_length(shape: tuple[int, int], norm: bool) -> None:
    input = InputSpec(shape, (1.0,), (2.0,), "CT", "float32", rate=10.0, hop=shape[1])
    net = build_net(ModelConfig("cnn1d", {"norm": norm}), input, 3)
    z = net.extractor.frozen(net.extractor.init(), torch.randn(2, *shape))
    assert z.shape == (2, 64) and z.isfinite().all() and not z[0].equal(z[1])


def test_rows_of_a_table_are_standardised_by_column() -> None:
    input = InputSpec((3,), (1.0, 10.0, 100.0), (1.0, 2.0, 4.0), "F", "float32")
    rows = torch.tensor([[2.0, 14.0, 108.0], [1.0, 10.0, 100.0]])
    identity = build_net(with_pinned_weights(ModelConfig("identity")), input, 2).extractor
    assert identity.init() == {} and identity.frozen({}, rows).tolist() == [[1, 2, 2], [0, 0, 0]]
    mlp = build_net(ModelConfig("mlp"), input, 2).extractor
    assert mlp.chain and mlp.frozen(mlp.init(), rows).shape == (2, 64)
