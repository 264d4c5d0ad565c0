"""What a release says about heads follows from its method and network."""

import pytest

from edge_fl.config import MethodConfig, MethodSpec, ModelConfig
from edge_fl.inputs import InputSpec
from edge_fl.methods import build_method
from edge_fl_server.release import export


@pytest.mark.parametrize(
    ("method", "train", "way"),
    [
        ("fedavg", "all", "own"),
        ("fedavg", "none", "own"),
        ("fedrep", "none", "cosine"),
        ("pretrained", "all", "cosine"),
        ("fed-rod", "none", "tuned"),
    ],
)
def test_backbones_that_were_not_trained_as_a_whole_get_the_cosine_head(
    method: str, train: str, way: str
) -> None:
    model = ModelConfig("cnn-tiny", train=train)  # type: ignore[arg-type]
    spec = MethodSpec(model, InputSpec((1, 8, 8)), ["a", "b"], MethodConfig(method), 0)
    assert export.describe(build_method(spec), spec).heads.way == way
