"""Random kernels: the same on every machine, small, for windows of any length."""

import numpy as np
import pytest
import torch

from edge_fl.config import MethodConfig, MethodSpec, ModelConfig
from edge_fl.errors import MethodError
from edge_fl.inputs import InputSpec
from edge_fl.learn.random import key_of
from edge_fl.methods import PRETRAINED, build_method
from edge_fl.methods.contract import steps
from edge_fl.models import build_net, kernels, with_pinned_weights
from edge_fl_server.release import export
from edge_fl_server.release.onnx_session import Session

SIX = InputSpec((6, 200), (0.0,) * 6, (1.0,) * 6, "CT", "float32", rate=50.0, hop=100)
EXPECTED = [[1.440485, -0.371108, 2.226716, 0.131630], [-1.440485, 0.101372, 0.277379, -0.188609]]
MODEL = with_pinned_weights(ModelConfig("random-kernels"))


def windows(count: int, input: InputSpec) -> np.ndarray:
    return kernels.synthetic(count, *input.shape, key_of(1)).astype(np.float32)


def test_they_are_the_same_on_every_machine() -> None:
    net, x = build_net(MODEL, SIX, 2), torch.from_numpy(windows(2, SIX))
    z = net.extractor.frozen({}, x).numpy()
    assert net.extractor.init() == {} and MODEL.train == "none"
    assert z[:, [0, 6, 500, 999]] == pytest.approx(np.array(EXPECTED), abs=1e-4)
    other = build_net(ModelConfig("random-kernels", {"seed": 1}), SIX, 2).extractor.frozen({}, x).numpy()
    assert not np.allclose(z, other, atol=0.1)


def test_a_release_is_below_64_kb_and_has_the_features_of_torch() -> None:
    spec = MethodSpec(MODEL, SIX, ["a", "b"], MethodConfig(PRETRAINED), 0)
    method = build_method(spec)
    exported = export.export(method, steps.start(method))
    assert len(exported.onnx) < 64_000 and exported.feature_dim == 1000
    x = windows(20, SIX)
    expected = steps.exported_features(method, steps.start(method), torch.from_numpy(x)).numpy()
    assert np.abs(Session(exported.onnx).run(x) - expected).max() < 1e-4


@pytest.mark.parametrize("shape", [(1, 16), (1, 17), (20, 64), (3, 4096)])
def test_they_take_windows_of_any_length_and_what_they_find_does_not_vanish(shape: tuple[int, int]) -> None:
    input = InputSpec(shape, (0.0,), (1.0,), "CT", "float32", rate=10.0, hop=shape[1])
    module = kernels.RandomKernels(input)
    z = module(torch.from_numpy(windows(30, input)))
    assert z.shape == (30, 1000) and z.isfinite().all()
    assert (z.std(dim=0) > 0.2).float().mean() > 0.9
    assert max(module.dilations) * (kernels.LENGTH - 1) < max(shape[1], kernels.LENGTH)


def test_other_samples_and_sizes_are_refused() -> None:
    with pytest.raises(MethodError, match=r"input \[1, 8, 8\] CHW, expected \[C, T\] CT"):
        build_net(ModelConfig("random-kernels"), InputSpec((1, 8, 8)), 2)
    with pytest.raises(MethodError, match="feature_dim 6, expected 7 to 4096"):
        build_net(ModelConfig("random-kernels", {"feature_dim": 6}), SIX, 2)
