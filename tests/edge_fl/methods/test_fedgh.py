"""FedGH: clients send class means, the server trains the head on them (docs/methods-personal-models.md, "FedGH")."""

import torch

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import toy


def test_no_parameter_is_ever_uploaded() -> None:
    run = toy.federate(toy.method("fedgh"))
    for updates in run.updates:
        for update in updates.values():
            assert {name: params.keys() for name, params in update.parts.items()} == {
                "prototypes": {"mean", "count"}
            }


def test_the_servers_head_moves_when_means_arrive_and_only_then() -> None:
    method = toy.method("fedgh")
    shared = steps.start(method)
    means = {"mean": torch.ones(2, 12), "count": torch.zeros(10).index_fill(0, torch.tensor([0, 4]), 5.0)}
    moved = method.aggregate(shared, [Update("c0", 10, {"prototypes": means})])
    assert not tree.same(moved["head"], shared["head"])
    assert tree.same(method.aggregate(shared, [])["head"], shared["head"])


def test_a_pass_over_the_means_lowers_their_loss() -> None:
    method = toy.method("fedgh", server_lr=0.5)
    shared = steps.start(method)
    generator = torch.Generator().manual_seed(0)
    means = {"mean": torch.randn(10, 12, generator=generator), "count": torch.ones(10)}
    update = Update("c0", 10, {"prototypes": means})

    def loss(head: tree.Params) -> float:
        return float(
            torch.nn.functional.cross_entropy(method.net.head(head, means["mean"]), torch.arange(10))
        )

    assert loss(method.aggregate(shared, [update])["head"]) < loss(shared["head"])


def test_the_servers_head_is_not_an_alias_of_a_clients() -> None:
    run = toy.federate(toy.method("fedgh"))
    ours = {tensor.data_ptr() for tensor in run.shared["head"].values()}
    for updates in run.updates:
        for update in updates.values():
            assert not ours & {tensor.data_ptr() for tensor in update.parts["prototypes"].values()}


def test_extractors_differ_and_are_not_sent() -> None:
    run = toy.federate(toy.method("fedgh"))
    assert not tree.same(run.own["c0"]["extractor"], run.own["c4"]["extractor"])
    assert "extractor" not in steps.broadcast(toy.method("fedgh"), run.shared, "c0")
