"""LG-FedAvg: shared head, personal extractors (docs/methods-personal-models.md, "LG-FedAvg")."""

from edge_fl.learn import tree
from tests.edge_fl.methods import toy


def test_the_extractor_is_never_sent_and_differs_by_client() -> None:
    run = toy.federate(toy.method("lg-fedavg"))
    assert all(update.parts.keys() == {"head"} for updates in run.updates for update in updates.values())
    assert all(shared.keys() == {"head"} for shared in run.history)
    assert not tree.same(run.own["c0"]["extractor"], run.own["c4"]["extractor"])


def test_the_head_is_the_same_on_all_clients_after_the_broadcast_and_moves() -> None:
    run = toy.federate(toy.method("lg-fedavg"))
    heads = [down["head"] for down in run.downs[1].values()]
    assert all(tree.same(head, heads[0]) for head in heads)
    assert not tree.same(run.downs[0]["c0"]["head"], heads[0])


def test_more_kept_layers_share_the_extractors_last_ones() -> None:
    method = toy.method("lg-fedavg", num_layers_keep=2)
    run = toy.federate(method)
    assert run.shared["extractor"].keys() == {"extractor.linear.weight", "extractor.linear.bias"}
    assert not run.own["c0"]["extractor"].keys() & run.shared["extractor"].keys()
    assert not method.exports
