"""FedPer: the last layers are personal (docs/methods-personal-heads.md, "FedPer"). Its limits FedAvg and Local: see test_identities.py."""

from edge_fl.learn import tree
from edge_fl.methods.contract import steps
from edge_fl.wire import tensors
from edge_fl_server.mqtt.updates import validation
from tests.edge_fl.methods import toy


def test_the_head_is_never_on_the_wire_and_differs_by_client() -> None:
    run = toy.federate(toy.method("fedper"))
    assert all(update.parts.keys() == {"extractor"} for updates in run.updates for update in updates.values())
    assert not tree.same(run.own["c0"]["head"], run.own["c4"]["head"])


def test_two_personal_layers_take_the_extractors_last_along() -> None:
    method = toy.method("fedper", personal_layers=2)
    run = toy.federate(method)
    last = {"extractor.linear.weight", "extractor.linear.bias"}
    assert run.own["c0"]["extractor"].keys() == last
    assert not last & run.shared["extractor"].keys()
    whole = tree.merge(steps.broadcast(method, run.shared, "c0"), run.own["c0"])
    assert whole["extractor"].keys() == method.net.extractor.init().keys()
    assert not method.exports  # the server has no complete extractor


def test_batchnorm_belongs_to_the_layer_before_it() -> None:
    run = toy.federate(toy.method("fedper", personal_layers=3), rounds=1)
    kept = run.own["c0"]["extractor"].keys()
    assert {name.rpartition(".")[0].removeprefix("buffer:") for name in kept} == {
        "extractor.convolutions.4",
        "extractor.convolutions.5",
        "extractor.linear",
    }


def test_an_update_of_some_layers_is_what_the_server_takes() -> None:
    method = toy.method("fedper", personal_layers=2)
    sent = toy.federate(method, rounds=1).updates[0]["c0"].parts
    taken = validation.parts_of(
        tensors.pack(tree.to_arrays(sent)), validation.expected_of(method, whole=True)
    )
    assert tree.same(taken, sent)
