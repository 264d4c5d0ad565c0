"""Low-rank adapters: the part's only parameters, small, equal on all machines, and gone from the export."""

import sys

import numpy as np
import onnx
import pytest
import torch

from edge_fl.config import MethodConfig, MethodSpec, ModelConfig
from edge_fl.errors import MethodError
from edge_fl.inputs import InputSpec
from edge_fl.learn import tree
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl.models import build_net, frozen
from edge_fl.wire import tensors
from edge_fl_server.release import export
from edge_fl_server.release.onnx_session import Session
from tests.edge_fl.methods import toy

COLOUR = InputSpec((3, 32, 32), (0.5,), (0.5,))


def model(name: str, train: str, **options: int) -> ModelConfig:
    return ModelConfig(name, dict(options), "random" if ":" in name else "", train)  # type: ignore[arg-type]


def method(config: ModelConfig, name: str = "fedavg", input: InputSpec = COLOUR) -> Method:
    return build_method(MethodSpec(config, input, ["a", "b", "c"], MethodConfig(name), 0))


def test_only_adapters_travel_under_any_method_that_shares_the_extractor() -> None:
    for name in ("fedavg", "fedrep", "repper", "fedbn", "fedavg+ft"):
        net = build_net(model("cnn-tiny", "lora", width=4), toy.INPUT, toy.CLASSES)
        run = toy.federate(toy.method(name, net), rounds=1)
        sent = [update.parts["extractor"] for update in run.updates[0].values()]
        assert all(key.rpartition(".lora_")[1] for params in sent for key in params) and sent[0]
        assert not tree.same(run.history[0]["extractor"], run.history[1]["extractor"]), name
        x = torch.rand(2, *toy.INPUT.shape)
        assert not torch.equal(
            *(run.method.features({"extractor": parts["extractor"]}, x) for parts in run.history)
        )


def test_training_starts_from_the_frozen_network_with_seeded_adapters() -> None:
    adapted, frozen = (build_net(model("cnn-tiny", train), COLOUR, 3, seed=1) for train in ("lora", "none"))
    start = adapted.extractor.init()
    x = torch.rand(4, *COLOUR.shape)
    assert torch.equal(adapted.extractor(start, x), frozen.extractor({}, x))
    assert tree.same(start, build_net(model("cnn-tiny", "lora"), COLOUR, 3, seed=1).extractor.init())
    assert not tree.same(start, build_net(model("cnn-tiny", "lora"), COLOUR, 3, seed=2).extractor.init())


def test_an_update_of_efficientnet_lite0_is_below_2_percent() -> None:
    small, full = (
        len(
            tensors.pack(
                tree.to_arrays({"extractor": method(model("efficientnet-lite0", train)).net.extractor.init()})
            )
        )
        for train in ("lora", "all")
    )
    assert small < 0.02 * full


@pytest.mark.parametrize("name", ["fedavg", "fedavg+ft", "repper"])
def test_the_export_has_the_adapters_merged(name: str) -> None:
    """The same nodes as of the frozen network, the features of the adapted one."""
    adapted, frozen = (method(model("timm:test_efficientnet", train), name) for train in ("lora", "none"))
    generator = torch.Generator().manual_seed(3)
    shared = tree.map(lambda t: t + 0.1 * torch.randn(t.shape, generator=generator), steps.start(adapted))
    exported, plain = export.export(adapted, shared), export.export(frozen, steps.start(frozen))
    nodes = [
        [node.op_type for node in onnx.load_from_string(each.onnx).graph.node] for each in (exported, plain)
    ]
    assert nodes[0] == nodes[1]
    x = torch.rand(3, *COLOUR.shape, generator=generator)
    expected = steps.exported_features(adapted, shared, x).numpy()
    found = Session(exported.onnx).run(x.numpy())
    assert np.abs(found - expected).max() <= export.PARITY * np.abs(expected).max()
    before = Session(plain.onnx).run(x.numpy())
    assert np.abs(before - expected).max() > 0.01 * np.abs(expected).max()


def test_networks_without_layers_for_adapters_and_a_missing_extra_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = ModelConfig("cnn4", {"width": 4}, train="lora")
    with pytest.raises(MethodError, match="model cnn4: no linear layer or pointwise convolution"):
        build_net(nothing, COLOUR, 3)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MethodError, match=r"train = \"lora\": needs pip install 'edge-fl\[lora\]'"):
        build_net(model("cnn-tiny", "lora"), COLOUR, 3)


def test_merging_leaves_other_parameters() -> None:
    """A projector behind the adapted network keeps its trained values."""
    net = build_net(model("cnn-tiny", "lora"), COLOUR, 3).with_projector()
    params = tree.map(lambda t: t + 0.1 if t.is_floating_point() else t, net.extractor.init())
    merged, parts = frozen.merged(net, {"extractor": params})
    kept = {key: tensor for key, tensor in params.items() if frozen.ADAPTER not in key}
    assert tree.same(parts["extractor"], kept) and kept
    x = torch.rand(2, *COLOUR.shape)
    same = (merged.extractor.frozen(parts["extractor"], x), net.extractor.frozen(params, x))
    assert torch.allclose(*same, rtol=1e-4, atol=1e-5)
