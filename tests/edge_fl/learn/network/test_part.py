"""Parts: pure functions of their parameters, in training and in inference behaviour."""

import pytest
import torch
from torch import nn

from edge_fl.config import ModelConfig
from edge_fl.errors import MethodError
from edge_fl.inputs import InputSpec
from edge_fl.learn import tree
from edge_fl.learn.network.part import Net, Part, personal, shared
from edge_fl.models import build_net
from tests.edge_fl.methods import toy

IMAGES = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_training_moves_the_statistics_that_came_in_and_frozen_leaves_them() -> None:
    extractor = toy.net().extractor
    params = extractor.init()
    before = tree.clone(params)
    extractor.frozen(params, IMAGES)
    assert tree.same(params, before)
    extractor(params, IMAGES)
    moved = {name for name, t in params.items() if not t.equal(before[name])}
    assert moved == extractor.norm_statistics
    assert tree.same(extractor.init(), before)


def test_frozen_treats_an_image_alone_as_among_others_and_lets_gradients_through() -> None:
    extractor = toy.net().extractor
    params = extractor.init()
    assert extractor.frozen(params, IMAGES)[:1].allclose(extractor.frozen(params, IMAGES[:1]), atol=1e-6)
    assert not extractor(tree.clone(params), IMAGES)[:1].allclose(
        extractor(tree.clone(params), IMAGES[:2])[:1], atol=1e-3
    )
    x = IMAGES.clone().requires_grad_()
    extractor.frozen(params, x).sum().backward()
    assert x.grad is not None


def test_a_part_holds_no_weights_that_a_call_could_change() -> None:
    head = toy.net().head
    z = torch.ones(2, 12)
    zero = tree.map(torch.zeros_like, head.init())
    assert head(zero, z).abs().max() == 0
    assert head(head.init(), z).abs().max() > 0


def test_start_values_come_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = toy.net(seed=4)
    state = torch.random.get_rng_state()
    torch.rand(3)
    other = toy.net(seed=4)
    for name in ("extractor", "head"):
        assert tree.same(one.parts[name].init(), other.parts[name].init())
    assert not tree.same(one.head.init(), toy.net(seed=5).head.init())
    assert not tree.same(one.head.init("c0"), one.head.init("c1"))
    assert tree.same(one.head.init("c0"), other.head.init("c0"))
    torch.random.set_rng_state(state)
    drawn = torch.rand(1)
    torch.random.set_rng_state(state)
    toy.net(seed=6).head.init("salt")
    assert torch.rand(1).equal(drawn)  # nothing global was drawn


def test_init_gives_fresh_tensors_each_time() -> None:
    head = toy.net().head
    head.init()["weight"].zero_()
    assert head.init()["weight"].abs().max() > 0


def test_batchnorm_is_found_by_type() -> None:
    resnet = build_net(ModelConfig("resnet18"), InputSpec((3, 32, 32)), 10).extractor
    assert "extractor.network.layer2.0.downsample.1.weight" in resnet.norm
    assert "buffer:extractor.network.layer2.0.downsample.1.running_mean" in resnet.norm_statistics
    assert resnet.norm_statistics < resnet.norm
    assert len(resnet.layers) == 20
    assert frozenset().union(*resnet.layers) == resnet.init().keys()


def test_the_top_of_a_net_is_counted_from_the_head() -> None:
    net = toy.net()
    assert net.top(0) == {}
    assert net.top(1) == {"head": {"weight", "bias"}}
    assert net.top(2)["extractor"] == {"extractor.linear.weight", "extractor.linear.bias"}
    everything = {name: net.parts[name].init().keys() for name in ("extractor", "head")}
    assert net.top(4) == net.top(99) == everything


def test_a_method_adds_parts_once_and_may_bring_its_own_head() -> None:
    def narrow(net: Net, method: object) -> nn.Module:
        return nn.Linear(net.feature_dim, 3)

    net = toy.net()
    assert net.with_added("prototypes", shared(), None) is net
    added = net.with_added("head", shared(narrow), None)
    assert added.head.init()["weight"].shape == (3, 12)
    assert added.with_added("head", shared(narrow), None) is added
    twin = net.with_added("personal_head", personal(like="head"), None)
    assert tree.same(twin.personal_head.init(), net.head.init())
    assert "personal_head" not in net.parts


def test_a_net_names_the_part_it_lacks() -> None:
    with pytest.raises(AttributeError, match="no part 'projector'"):
        toy.net().projector  # noqa: B018
    with pytest.raises(MethodError, match="1 class, expected at least 2"):
        build_net(ModelConfig("cnn-tiny"), toy.INPUT, 1)


def test_constants_of_a_module_are_no_state() -> None:
    params = toy.net().extractor.init()
    assert not any("mean" in name and "running" not in name for name in params)
    part = Part("x", lambda: nn.BatchNorm1d(3), 0)
    assert part.init().keys() == {
        "weight",
        "bias",
        "buffer:running_mean",
        "buffer:running_var",
        "buffer:num_batches_tracked",
    }


class Counted(nn.Module):
    """A layer that counts its calls."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.calls += 1
        return self.layer(x)


def test_the_same_tensors_on_the_same_x_are_computed_once_in_a_block() -> None:
    part = Part("extractor", Counted, 0)
    params, other, x = part.init(), part.init(), torch.rand(5, 4)
    Counted.calls = 0
    with part.reused():
        first, again = part.frozen(params, x), part.frozen(dict(params), x)
        assert again is first and Counted.calls == 1
        assert torch.equal(part.frozen(other, x), first) and torch.equal(
            part.frozen(params, x.clone()), first
        )
        assert Counted.calls == 3  # other tensors, and another x, are computed
    assert torch.equal(part.frozen(params, x), first) and Counted.calls == 4
