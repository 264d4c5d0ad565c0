"""SphereFed: a fixed orthonormal head, calibrated in closed form at the end (docs/methods-global.md, "SphereFed")."""

import pytest
import torch

from edge_fl.errors import MethodError
from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl_server.training import rounds
from edge_fl_server.training.engines.simulated import SequentialClients
from tests.edge_fl.methods import toy


def closed(method: Method, shared: Parts) -> Parts:
    """The shared parts after the final personalisation of all clients."""
    updates = []
    for id, client in toy.clients().items():
        down = steps.broadcast(method, shared, id)
        updates.append(client.personalise(method, 2, down, steps.start_own(method, id))[0])
    return steps.finalise(method, shared, iter(updates))


def test_the_heads_rows_are_orthonormal_and_the_same_for_all() -> None:
    weight = toy.method("spherefed").net.head.init()["weight"]
    assert torch.allclose(weight @ weight.T, torch.eye(10), atol=1e-6)
    assert torch.equal(toy.method("spherefed").net.head.init()["weight"], weight)
    assert toy.method("spherefed").net.head.init().keys() == {"weight"}


def test_fewer_features_than_classes_are_refused() -> None:
    few = toy.build_net(toy.ModelConfig("cnn-tiny", {"feature_dim": 4, "width": 4}), toy.INPUT, 10, 0)
    with pytest.raises(MethodError, match="4 features for 10 classes"):
        toy.method("spherefed", few)


def test_logits_lie_between_minus_one_and_one() -> None:
    run = toy.federate(toy.method("spherefed"))
    assert all(run.predict(client).abs().max() <= 1 + 1e-6 for client in run.clients)


def test_the_head_is_constant_and_not_sent_until_it_is_calibrated() -> None:
    run = toy.federate(toy.method("spherefed"))
    start = run.method.net.head.init()
    assert all(tree.same(shared["head"], start) for shared in run.history)
    assert all(update.parts.keys() == {"extractor"} for updates in run.updates for update in updates.values())
    assert all(down.keys() == {"extractor"} for downs in run.downs for down in downs.values())
    shared = closed(run.method, run.shared)
    assert not tree.same(shared["head"], start)
    assert tree.same(steps.broadcast(run.method, shared, "c0"), shared)
    assert tree.same(shared["extractor"], run.shared["extractor"])


def test_the_loss_is_the_mean_over_samples_and_classes() -> None:
    """One full batch moves against the gradient of that mean."""
    method, data = toy.method("spherefed", toy.flat_net()), toy.batches(batch_size=64)
    start = steps.start(method)["extractor"]
    held = {name: t.clone().requires_grad_() for name, t in start.items()}
    z = method.net.extractor(held, data.x.float() / 255)
    logits = z / z.norm(dim=1, keepdim=True) @ method.net.head.init()["weight"].T
    ((logits - torch.eye(10)[data.y]) ** 2).mean().backward()
    up, _ = method.local_update({"extractor": start}, {}, data)
    for name, t in held.items():
        assert t.grad is not None
        assert torch.allclose(up["extractor"][name], start[name] - 0.05 * t.grad, atol=1e-6)


def test_calibration_from_the_clients_sums_is_centralised_ridge_regression() -> None:
    run = toy.federate(toy.method("spherefed"))
    found = closed(run.method, run.shared)["head"]["weight"]
    batches = [client.batches(2) for client in run.clients.values()]
    z = torch.cat([run.method.features(run.shared, data.x.float() / 255) for data in batches]).double()
    labels = torch.eye(10, dtype=torch.float64)[torch.cat([data.y for data in batches])]
    expected = torch.linalg.solve(z.T @ z + 1e-3 * torch.eye(12), z.T @ labels).T
    assert (z @ found.T.double() - z @ expected.T).abs().max() <= 1e-5


def test_a_client_sends_its_sums_once_and_those_who_send_none_do_not_count() -> None:
    method = toy.method("spherefed")
    shared, data = steps.start(method), toy.batches()
    up, _ = steps.personalise(method, steps.broadcast(method, shared, "c0"), {}, data)
    assert {name: tuple(t.shape) for name, t in up["sums"].items()} == {"gram": (12, 12), "moment": (12, 10)}
    assert torch.isclose(up["sums"]["gram"].trace(), torch.tensor(37.0))  # unit features of 37 samples
    alone = steps.finalise(method, shared, [Update("c0", 37, up)])
    both = steps.finalise(method, shared, [Update("c0", 37, up), Update("c1", 21, {})])
    assert tree.same(alone, both)
    assert steps.finalise(method, shared, []) is shared


def test_final_accuracies_are_those_of_the_calibrated_head() -> None:
    run = toy.federate(toy.method("spherefed"))
    shared, metrics = rounds.final_personalisation(
        run.method, SequentialClients(run.clients, run.method), run.shared, 2
    )
    client = run.clients["c0"]
    right = steps.predict_global(run.method, shared, run.images("c0")).argmax(1).numpy() == client.data.test.y
    assert metrics["c0"]["global.test_acc"] == metrics["c0"]["personal.test_acc.after"] == right.mean()
    assert metrics["c0"]["personal.test_acc.before"] < right.mean()
