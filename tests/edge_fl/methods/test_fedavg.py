"""FedAvg (docs/methods-global.md, "FedAvg"). That one client is plain SGD: see tests/edge_fl/learn/test_fit.py."""

from dataclasses import replace

from edge_fl.learn import tree
from edge_fl.methods.contract import steps
from tests.edge_fl.methods import toy


def test_without_epochs_nothing_changes() -> None:
    run = toy.federate(toy.method("fedavg", epochs=0))
    assert tree.same(run.shared, run.history[0])


def test_with_one_client_the_server_has_what_it_sent() -> None:
    run = toy.federate(toy.method("fedavg"), cohort=lambda number: ["c0"])
    assert tree.same(run.shared, run.updates[-1]["c0"].parts)


def test_clients_with_equal_data_and_seeds_send_what_the_server_then_has() -> None:
    method, shared = toy.method("fedavg"), steps.start(toy.method("fedavg"))
    update, _ = toy.clients()["c0"].train(method, 1, steps.broadcast(method, shared, "c0"), {})
    twins = [replace(update, client=f"c{i}", samples=samples) for i, samples in enumerate((37, 5, 211))]
    assert tree.same(steps.aggregate(method, shared, twins), update.parts)
