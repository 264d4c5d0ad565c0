"""FedProto: only prototypes are sent (docs/methods-personal-models.md, "FedProto")."""

from dataclasses import replace

import pytest
import torch

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.optimiser import Sgd
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import toy

TWO = {"mean": torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "count": torch.tensor([3.0, 1.0])}
ONE = {"mean": torch.tensor([[0.0, 1.0], [0.0, 0.0]]), "count": torch.tensor([1.0, 0.0])}
NOTHING = {"prototypes": {"mean": torch.zeros(2, 2), "count": torch.zeros(2)}}


def aggregated(*sent: dict[str, torch.Tensor], **options: object) -> dict[str, torch.Tensor]:
    updates = [Update(f"c{place}", 9, {"prototypes": one}) for place, one in enumerate(sent)]
    return toy.method("fedproto", **options).aggregate(NOTHING, updates)["prototypes"]


def test_only_prototypes_and_counts_are_on_the_wire() -> None:
    run = toy.federate(toy.method("fedproto"))
    for updates in run.updates:
        for update in updates.values():
            assert {name: params.keys() for name, params in update.parts.items()} == {
                "prototypes": {"mean", "count"}
            }


def test_of_one_client_the_global_prototypes_are_its_own() -> None:
    assert torch.equal(aggregated(TWO)["mean"], TWO["mean"])


def test_clients_with_a_class_have_equal_weights_by_default() -> None:
    assert aggregated(TWO, ONE)["mean"].tolist() == [[0.5, 0.5], [0.0, 1.0]]
    assert aggregated(TWO, ONE, weighted=True)["mean"].tolist() == [[0.75, 0.25], [0.0, 1.0]]


def test_without_the_distance_it_is_local_to_the_bit() -> None:
    proto, local = toy.federate(toy.method("fedproto", lam=0.0)), toy.federate(toy.method("local"))
    for client, own in local.own.items():
        assert tree.same(proto.own[client], own)


def test_the_distance_pulls_features_to_their_prototype() -> None:
    method = toy.method("fedproto", toy.flat_net(), lam=5.0, epochs=3)
    data, own = toy.batches("c0"), steps.start_own(method, "c0")
    far = {"prototypes": {"mean": torch.full((10, 12), 2.0), "count": torch.ones(10)}}
    none = {"prototypes": {"mean": torch.full((10, 12), 2.0), "count": torch.zeros(10)}}
    drawn, free = (toy.train(method, down, own, data)[1] for down in (far, none))

    def distance(own: tree.Parts) -> float:
        z = data.features(method.net.extractor, own["extractor"]).x
        return float(((z - 2.0) ** 2).mean())

    assert distance(drawn) < 0.5 * distance(free)


def test_class_means_during_training_are_of_the_features_that_training_sees() -> None:
    settings = {
        "epochs": 1,
        "optimiser": Sgd(0.0),
    }  # the model stays, so that both means are of the same features
    during, after = (
        toy.federate(toy.method("fedproto", toy.flat_net(), means=means, **settings))
        .updates[1]["c0"]
        .parts["prototypes"]
        for means in ("during", "after")
    )
    assert torch.equal(during["count"], after["count"])
    assert torch.allclose(during["mean"], after["mean"], atol=1e-6) and float(after["mean"].abs().max()) > 0.1


@pytest.mark.parametrize("epochs", [1, 2])
def test_where_class_means_are_taken_does_not_change_the_training(epochs: int) -> None:
    method = toy.method("fedproto", epochs=epochs)
    data, own = toy.batches("c0"), steps.start_own(method, "c0")
    down = steps.start(method)
    (sent, after), (sent_during, during) = (
        toy.train(replace(method, means=means), down, own, data) for means in ("after", "during")
    )
    assert tree.same(after, during)
    apart = (sent["prototypes"]["mean"] - sent_during["prototypes"]["mean"]).abs().max()
    assert float(apart) > 1e-4, "features change while they are trained"


def test_the_nearest_known_prototype_decides() -> None:
    method = toy.method("fedproto", toy.flat_net())
    own = steps.start_own(method, "c0")
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    z = method.features(own, x)
    means = torch.zeros(10, 12)
    means[3], means[7] = z[0], z[1]
    known = {"mean": means, "count": torch.zeros(10).index_fill(0, torch.tensor([3, 7]), 1.0)}
    found = method.predict({**own, "prototypes": known}, x)
    assert found[:2].argmax(1).tolist() == [3, 7]
    assert set(found.argmax(1).tolist()) <= {3, 7}


def test_ten_classes_of_512_features_are_the_papers_5120_numbers() -> None:
    full = {"mean": torch.zeros(10, 512), "count": torch.ones(10)}
    assert toy.count({"mean": full["mean"]}) == 5120
