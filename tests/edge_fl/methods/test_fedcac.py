"""FedCAC: critical values are shared with similar clients only (docs/methods-personal-models.md, "FedCAC")."""

import pytest
import torch

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods import fedcac
from edge_fl.methods.contract import steps
from edge_fl.methods.fedcac import collaborators, critical
from tests.edge_fl.methods import toy


def model(*values: float) -> Parts:
    return {"extractor": {"w": torch.tensor(values)}, "head": {"b": torch.tensor([0.0])}}


def mask(*values: int) -> Params:
    return {"w": torch.tensor(values, dtype=torch.bool)}


def test_critical_values_are_those_of_the_largest_change_times_value() -> None:
    before = model(1.0, 1.0, 4.0, 2.0)
    after = model(1.5, 0.1, 4.2, 2.0)  # |change * value|: 0.75, 0.09, 0.84, 0
    assert critical(before, after, 0.5)["extractor/w"].tolist() == [True, False, True, False]
    assert critical(before, after, 1.0)["extractor/w"].tolist() == [True, True, True, False]
    assert not critical(before, after, 0.0)["extractor/w"].any()
    assert not critical(before, before, 1.0)["extractor/w"].any()


def test_collaborators_are_those_above_a_threshold_that_rises_to_the_largest_overlap() -> None:
    masks = [mask(1, 1, 0, 0), mask(1, 1, 0, 0), mask(1, 0, 1, 0), mask(0, 0, 1, 1)]
    # overlaps of 0: 1, 0.5, 0; of 2: 0.5, 0.5, 0.5; of 3: 0, 0, 0.5; their mean is 0.42
    everyone = [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 1, 1]]
    assert collaborators(masks, 0.0).int().tolist() == everyone
    assert collaborators(masks, 0.2).int().tolist() == [
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
    ]
    assert collaborators(masks, 1.01).int().tolist() == torch.eye(4).int().tolist()
    assert collaborators(masks[:1], 0.0).tolist() == [[True]]


def test_a_round_equals_a_loop_over_clients() -> None:
    method = toy.method("fedcac", tau=0.5, beta=2.0)
    run = toy.federate(method)
    sent, downs, total = run.updates[1], run.downs[1], sum(u.samples for u in run.updates[1].values())
    ids = sorted(sent)
    flat = {}
    for id in ids:
        marks = []
        for path, value in sorted(tree.parameters(sent[id].parts).items()):
            change = value - tree.leaves(downs[id])[path]
            weight = ((change * value).abs() * (change.abs() > 1e-6 * value.abs())).flatten()
            marks.append((weight >= weight.sort(descending=True).values[len(weight) // 2 - 1]) & (weight > 0))
        flat[id] = torch.cat(marks).double()
    overlap = {
        (i, j): 1 - float((flat[i] - flat[j]).abs().sum() / (2 * flat[i].sum()))
        for i in ids
        for j in ids
        if i != j
    }
    mean, largest = sum(overlap.values()) / len(overlap), max(overlap.values())
    for i in ids:
        chosen = [i, *(j for j in ids if j != i and overlap[i, j] >= mean + 2 / 2.0 * (largest - mean))]
        received, at = steps.broadcast(method, run.shared, i), 0
        for path, value in sorted(tree.parameters(sent[i].parts).items()):
            marks, at = flat[i][at : at + value.numel()].reshape(value.shape) > 0, at + value.numel()
            mine = sum(tree.leaves(sent[j].parts)[path] for j in chosen) / len(chosen)
            everyones = sum(u.samples / total * tree.leaves(u.parts)[path] for u in sent.values())
            assert torch.allclose(tree.leaves(received)[path], torch.where(marks, mine, everyones), atol=1e-6)


def test_without_critical_values_it_is_fedavg() -> None:
    run, plain = (
        toy.federate(toy.method(name, **more)) for name, more in (("fedcac", {"tau": 0.0}), ("fedavg", {}))
    )
    for name in ("extractor", "head"):
        assert tree.same(steps.broadcast(run.method, run.shared, "c0")[name], plain.shared[name])


def test_clients_without_collaborators_keep_their_critical_values() -> None:
    method = toy.method("fedcac", tau=1.0, beta=1.0)
    run = toy.federate(method, rounds=2)
    trained = run.updates[1]["c4"].parts
    masks = critical(run.downs[1]["c4"], trained, 1.0)
    received = steps.broadcast(method, run.shared, "c4")
    for name, value in fedcac.named(trained).items():
        assert torch.equal(fedcac.named(received)[name][masks[name]], value[masks[name]])


def test_a_client_that_never_took_part_gets_the_mean_and_an_absent_one_keeps_its_mask() -> None:
    method = toy.method("fedcac")
    run = toy.federate(method, rounds=2, cohort=lambda number: ["c0", "c4"] if number == 1 else ["c0"])
    assert tree.same(
        steps.broadcast(method, run.shared, "c1"), {n: run.shared[n] for n in ("extractor", "head")}
    )
    kept = [run.history[n]["critical"]["c4/head/weight"] for n in (1, 2)]
    assert torch.equal(*kept)


def test_only_models_travel() -> None:
    run = toy.federate(toy.method("fedcac"))
    for round in (0, 1):
        assert all(d.keys() == {"extractor", "head"} for d in run.downs[round].values())
        assert all(u.parts.keys() == {"extractor", "head"} for u in run.updates[round].values())


@pytest.mark.parametrize("round", [1, 7])
def test_the_threshold_follows_the_round(round: int) -> None:
    assert toy.method("fedcac").at(round).round == round  # type: ignore[attr-defined]
    alone = Update("a", 1, toy.federate(toy.method("fedcac"), rounds=1).updates[0]["c0"].parts)
    method = toy.method("fedcac").at(round)
    shared = method.aggregate(steps.start(method), [alone])
    assert tree.same(shared["extractor"], alone.parts["extractor"])


def test_an_update_without_a_head_is_not_mixed() -> None:
    run = toy.federate(toy.method("fedcac"), rounds=1)
    partial = Update("c0", 5, {"extractor": run.updates[0]["c0"].parts["extractor"]})
    new = run.method.aggregate(run.shared, [partial])
    assert tree.same(new["extractor"], partial.parts["extractor"]) and tree.same(
        new["mixed"], run.shared["mixed"]
    )


def test_a_change_within_rounding_is_none() -> None:
    after = model(1.0 + 2e-7, 1.001, 3.0, 3.0)
    assert critical(model(1.0, 1.0, 3.0, 3.0), after, 0.5)["extractor/w"].tolist() == [
        False,
        True,
        False,
        False,
    ]
