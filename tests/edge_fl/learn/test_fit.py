"""The batch loop against a plain torch loop, and what it must not change."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import descend, fit, fit_from, gradient, scan
from edge_fl.learn.optimiser import Adam, Optimiser, Sgd
from edge_fl.learn.tree import Params
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import toy

TORCH = {
    Sgd(0.05): lambda p: torch.optim.SGD(p, 0.05),
    Sgd(0.05, 1e-2, momentum=0.9): lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2),
    Adam(0.003): lambda p: torch.optim.Adam(p, 0.003),
}


def points(number: int = 5) -> Batches:
    """Numbers 0, 1, ... as features, one to a batch."""
    return Batches.of(
        torch.arange(number).float()[:, None], torch.arange(number), classes=number, batch_size=1
    )


def distance(w: Params, batch: Batch) -> Tensor:
    return 0.5 * ((w["w"] - batch.x) ** 2).mean()


@pytest.mark.parametrize("optimiser", TORCH, ids=str)
def test_fedavg_with_one_client_is_a_plain_torch_loop(optimiser: Optimiser) -> None:
    # no BatchNorm for Adam: a bias before one has no gradient, and Adam makes a step of the rounding error
    norm = isinstance(optimiser, Sgd)
    method = toy.method("fedavg", toy.net(norm=norm), optimiser=optimiser, epochs=3)
    shared, rounds = steps.start(method), 2
    module = nn.Sequential(copy.deepcopy(method.net.extractor.build()), method.net.head.build())
    for number, part in enumerate(("extractor", "head")):
        state = {name.removeprefix(tree.BUFFER): t.clone() for name, t in shared[part].items()}
        module[number].load_state_dict(state, strict=True)
    module.train()
    for number in range(1, rounds + 1):
        data = toy.batches("c0", round=number)
        update, _ = toy.clients()["c0"].train(method, number, steps.broadcast(method, shared, "c0"), {})
        shared = steps.aggregate(method, shared, [update])

        torch_optimiser = TORCH[optimiser](list(module.parameters()))
        images = data.x.float() / 255
        for epoch in data.order("train", 3, norm=norm):
            for rows in epoch:
                torch_optimiser.zero_grad()
                F.cross_entropy(module(images[rows]), data.y[rows]).backward()
                torch_optimiser.step()
    for number, part in enumerate(("extractor", "head")):
        for name, tensor in module[number].state_dict().items():
            ours = shared[part].get(name, shared[part].get(tree.BUFFER + name))
            assert ours is not None
            assert (ours - tensor).abs().max() < (1e-6 if norm else 1e-5), name


def test_the_input_is_untouched_and_the_result_owns_its_memory() -> None:
    params = {"w": torch.tensor(7.0), "buffer:n": torch.tensor(3.0)}
    given = tree.clone(params)
    trained = fit(distance, params, points(), stage="s", epochs=2, optimiser=Sgd(0.1))
    assert tree.same(params, given)
    assert not tree.same(trained, params)
    assert tree.same(fit(distance, params, points(), stage="s", epochs=0, optimiser=Sgd(0.1)), params)
    trained["w"].add_(1)
    trained["buffer:n"].add_(1)
    assert tree.same(params, given)


def test_only_the_argument_trains_and_buffers_are_not_stepped() -> None:
    fixed, params = torch.tensor(2.0), {"w": torch.tensor(1.0), "buffer:n": torch.tensor(3.0)}

    def loss(w: Params, batch: Batch) -> Tensor:
        return (w["w"] * fixed * batch.x).mean() + w["buffer:n"] * 9

    one_batch = replace(points(4), batch_size=4)
    trained = fit(loss, params, one_batch, stage="s", epochs=1, optimiser=Sgd(0.1))
    assert trained["w"] == pytest.approx(1 - 0.1 * 2 * 1.5)
    assert trained["buffer:n"] == 3.0
    assert fixed == 2.0


def test_a_leaf_that_the_loss_does_not_use_keeps_its_value() -> None:
    params = {"a": {"w": torch.tensor(1.0)}, "b": {"w": torch.tensor(5.0)}}
    grads = gradient(lambda p, batch: distance(p["a"], batch), params, next(points().batches("s", 1)))
    assert grads[("b", "w")] == 0.0
    trained = fit(lambda p, b: distance(p["a"], b), params, points(), stage="s", epochs=1, optimiser=Sgd(0.1))
    assert trained["b"]["w"] == 5.0
    constant = gradient(lambda p, batch: torch.tensor(3.0), params, next(points().batches("s", 1)))
    assert all(grad == 0 for grad in constant.values())


def test_an_optimisers_state_is_fresh_or_continued() -> None:
    optimiser, params = Adam(0.1), {"w": torch.tensor(9.0)}
    start = optimiser.init(tree.parameters(params))
    stage = {"stage": "s", "epochs": 1, "optimiser": optimiser}
    once, state = fit_from(start, distance, params, points(), **stage)
    assert tree.same(once, fit(distance, params, points(), **stage))
    onwards, _ = fit_from(state, distance, once, points(), **stage)
    afresh = fit(distance, once, points(), **stage)
    assert not tree.same(onwards, afresh)
    # one stage of two epochs is two stages of one, but for the order of the second
    same_order = Batches.of(torch.ones(4, 1), torch.zeros(4), classes=1, batch_size=1)
    half, state = fit_from(start, distance, params, same_order, **stage)
    whole = fit(distance, params, same_order, **{**stage, "epochs": 2})
    assert tree.same(fit_from(state, distance, half, same_order, **stage)[0], whole)


def test_scan_carries_any_tree_and_stops_at_its_limit() -> None:
    def step(carry: tuple[dict[str, Tensor], int, None], batch: Batch) -> tuple[dict[str, Tensor], int, None]:
        return {"sum": carry[0]["sum"] + batch.x.sum()}, carry[1] + 1, None

    start = ({"sum": torch.tensor(0.0)}, 0, None)
    found, steps, nothing = scan(step, start, points(), stage="s", epochs=2)
    assert (found["sum"], steps, nothing) == (20.0, 10, None)
    assert scan(step, start, points(), stage="s", epochs=2, limit=3)[1] == 3
    # BatchNorm cannot train on one sample
    assert scan(step, start, points(1), stage="s", epochs=2, norm=True)[1] == 0
    assert start[0]["sum"] == 0.0


def test_gradients_flow_into_nothing_that_comes_out() -> None:
    params = {"w": torch.tensor(1.0)}
    trained = fit(distance, params, points(), stage="s", epochs=1, optimiser=Sgd(0.1))
    assert not trained["w"].requires_grad
    stepped, _ = descend(distance, params, {}, next(points().batches("s", 1)), Sgd(0.1))
    assert not stepped["w"].requires_grad


def test_batchnorm_statistics_move_in_training_and_come_back_with_the_parameters() -> None:
    method = toy.method("fedavg")
    shared = steps.start(method)
    trained, _ = method.local_update(shared, {}, toy.batches())
    name = "buffer:extractor.convolutions.1.num_batches_tracked"
    expected = len(list(toy.batches().batches("train", 1, norm=True)))
    assert trained["extractor"][name] == expected == np.ceil(len(toy.batches()) / 8)
    assert shared["extractor"][name] == 0


class Square(torch.autograd.Function):
    """x**2 in the style that vmap does not support."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def test_in_a_plain_loop_a_loss_may_use_functions_that_vmap_does_not_support() -> None:
    batch = next(toy.batches().batches("train", 1))
    found = gradient(lambda w, batch: Square.apply(w["a"]).sum(), {"a": torch.tensor([3.0])}, batch)
    assert {path: t.tolist() for path, t in found.items()} == {("a",): [6.0]}
