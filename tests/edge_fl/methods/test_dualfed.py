"""DualFed: two stages, two heads combined, equal client weights (docs/methods-personal-heads.md, "DualFed")."""

from typing import Any

import pytest
import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import weighted_mean
from edge_fl.learn.batches import Batch
from edge_fl.learn.fit import fit
from edge_fl.learn.losses import cross_entropy, supcon, unit
from edge_fl.learn.objective import CrossEntropy
from edge_fl.learn.tree import Parts
from edge_fl.methods import dualfed as dualfed_module
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from tests.edge_fl.methods import toy

FIRST = ("extractor", "projector", "head")


def dualfed(**options: Any) -> Method:
    return toy.method("dualfed", **{"contrast": 2.0, "temperature": 0.2, **options})


def one_update(method: Method) -> tuple[Parts, Parts, Parts, Parts]:
    """(down, own before, up, own after) of the first client."""
    down, own = method.init_shared(), method.init_own("c0")
    return down, own, *method.local_update(down, own, toy.batches())


def test_projectors_start_equal_on_all_clients_and_heads_as_the_global_one() -> None:
    method = dualfed()
    one, other = method.init_own("c0"), method.init_own("c1")
    assert tree.same(one["projector"], other["projector"])
    assert tree.same(one["head"], other["head"])
    assert tree.same(one["head"], method.init_shared()["global_head"])


@pytest.mark.parametrize("contrast", [0.0, 2.0])
def test_stage_one_is_the_personal_loss_plus_contrast_and_leaves_the_global_head(contrast: float) -> None:
    method = dualfed(contrast=contrast)
    down, own, up, new = one_update(method)
    net = method.net

    def loss(w: Parts, batch: Batch) -> Tensor:
        u = net.projector(w["projector"], net.extractor(w["extractor"], batch.x))
        added = contrast * supcon(unit(u), batch.y, 0.2) if contrast else 0.0
        return added + cross_entropy(net.head(w["head"], u), batch.y)

    start = {"extractor": down["extractor"], **own}
    alone = fit(loss, start, toy.batches(), stage="s1", epochs=1, optimiser=method.optimiser)
    assert all(close({**up, **new}[name], alone[name]) for name in FIRST)
    assert not any(close(alone[name], start[name]) for name in FIRST)


def close(a: Any, b: Any) -> bool:
    return all(torch.allclose(a[name].float(), b[name].float(), atol=1e-6) for name in a)


def test_stage_two_moves_the_global_head_alone() -> None:
    method = dualfed()
    down, _, up, _ = one_update(method)
    z = toy.batches().features(method.net.extractor, up["extractor"])
    alone = method.train(method.head_loss, down["global_head"], z, stage="s2", epochs=1)
    assert close(up["global_head"], alone)
    assert not close(up["global_head"], down["global_head"])


@pytest.mark.parametrize("frozen_bn", ["eval", "train"])
def test_stage_two_moves_running_statistics_only_as_the_official_code_does(frozen_bn: str) -> None:
    method = dualfed(frozen_bn=frozen_bn)
    steps_taken = one_update(method)[2]["extractor"]["buffer:extractor.convolutions.1.num_batches_tracked"]
    batches = len(list(toy.batches().batches("s1", 1, norm=True)))
    assert steps_taken == (2 * batches if frozen_bn == "train" else batches)
    eval_, train = (one_update(dualfed(frozen_bn=mode))[2]["extractor"] for mode in ("eval", "train"))
    assert all(torch.equal(eval_[name], train[name]) for name in eval_ if not name.startswith(tree.BUFFER))


def test_simultaneous_training_lets_the_global_loss_into_the_encoder() -> None:
    staged, together = (one_update(dualfed(training=training))[2] for training in ("stages", "simultaneous"))
    assert not close(staged["extractor"], together["extractor"])
    method = dualfed(training="simultaneous")
    down, own, up, new = one_update(method)
    net = method.net

    def loss(w: Parts, batch: Batch) -> Tensor:
        z = net.extractor(w["extractor"], batch.x)
        u = net.projector(w["projector"], z)
        contrast = 2.0 * supcon(unit(u), batch.y, 0.2)
        personal = cross_entropy(net.head(w["head"], u), batch.y)
        return contrast + personal + cross_entropy(net.global_head(w["global_head"], z), batch.y)

    alone = fit(loss, {**down, **own}, toy.batches(), stage="s1", epochs=1, optimiser=method.optimiser)
    assert all(close({**up, **new}[name], alone[name]) for name in alone)


def test_projector_head_and_running_statistics_are_never_sent() -> None:
    run = toy.federate(dualfed())
    for updates in run.updates:
        for update in updates.values():
            assert update.parts.keys() == {"extractor", "global_head", "extractor.export_norm"}
            assert not any(name.startswith(tree.BUFFER) for name in update.parts["extractor"])
    for downs in run.downs:
        for down in downs.values():
            assert down.keys() == {"extractor", "global_head"}
            assert not any(name.startswith(tree.BUFFER) for name in down["extractor"])


def test_clients_weigh_the_same_whatever_they_have() -> None:
    run = toy.federate(dualfed(), rounds=1)
    equal = weighted_mean({}, run.updates[0].values(), uniform=True)
    assert tree.same(run.shared["extractor"], equal["extractor"])
    assert tree.same(run.shared["global_head"], equal["global_head"])
    assert not tree.same(run.shared["extractor"], weighted_mean({}, run.updates[0].values())["extractor"])


LOCAL, GLOBAL = [-1.5, 2.0, 2.3], [1.2, -0.3, -4.3]


@pytest.mark.parametrize(
    ("ensemble", "votes", "winner"),
    [
        ("prob", [0.827540, 0.601976, 0.570484], 0),
        ("logit", [-0.3, 1.7, -2.0], 1),
        ("personal", LOCAL, 2),
    ],
)
def test_the_ensemble_adds_probabilities_by_default(ensemble: str, votes: list[float], winner: int) -> None:
    method = dualfed(ensemble=ensemble)
    parts = {**method.init_shared(), **method.init_own("c0")}
    for head, logits in (("head", LOCAL), ("global_head", GLOBAL)):
        # three of the ten classes can be voted for
        parts[head] = {"weight": torch.zeros(10, 12), "bias": torch.tensor(logits + [-1e9] * 7)}
    found = method.predict(parts, torch.zeros(1, 1, 8, 8))
    assert torch.allclose(found[0, :3], torch.tensor(votes), atol=1e-5)
    assert found.argmax() == winner


def test_the_global_head_looks_at_the_encoder_and_the_personal_one_at_the_projector() -> None:
    run = toy.federate(dualfed(), rounds=1)
    net, x = run.method.net, run.images("c0")
    f = {**run.shared["extractor"], **run.own["c0"]["extractor.norm"]}
    z = net.extractor.frozen(f, x)
    p = net.head.frozen(run.own["c0"]["head"], net.projector.frozen(run.own["c0"]["projector"], z))
    g = net.global_head.frozen(run.shared["global_head"], z)
    assert torch.allclose(run.predict("c0"), p.softmax(1) + g.softmax(1))


def test_on_a_client_the_global_model_runs_with_the_clients_own_statistics() -> None:
    run = toy.federate(dualfed(), rounds=1)
    client, own = run.clients["c0"], run.own["c0"]
    down = steps.broadcast(run.method, run.shared, "c0")
    z = run.method.net.extractor.frozen({**down["extractor"], **own["extractor.norm"]}, run.images("c0"))
    right = run.method.net.global_head.frozen(down["global_head"], z).argmax(1).numpy() == client.data.test.y
    assert client.evaluate(run.method, down, own)["global.test_acc"] == right.mean()


def test_the_projector_narrows_to_half() -> None:
    shapes = {
        name: tuple(t.shape) for name, t in dualfed().init_own("c0")["projector"].items() if t.ndim == 2
    }
    assert shapes == {"0.weight": (6, 12), "3.weight": (12, 6)}


@pytest.mark.parametrize("personal", dualfed_module.PERSONAL_PARTS)
def test_any_parts_of_table_7_may_be_personal(personal: str) -> None:
    run = toy.federate(dualfed(personal_parts=personal), rounds=1)
    shared = {"extractor", "projector", "head", "global_head"} - {*personal.split("+")}
    assert run.downs[0]["c0"].keys() == shared
    assert {name.partition(".")[0] for name in run.updates[0]["c0"].parts} == shared
    assert (
        run.method.has_global
        == ("global_head" in shared)
        == (run.method.predict_global(run.shared, run.images("c0")) is not None)
    )
    assert run.predict("c0").isfinite().all()


@pytest.mark.parametrize("personal", ["projector+head", "head"])
def test_the_global_head_may_see_the_personal_or_the_shared_projection(personal: str) -> None:
    """DualFed-P and DualFed-G, Table 6."""
    method = dualfed(global_input="projector", personal_parts=personal, ensemble="logit")
    down, _, up, kept = one_update(method)
    net, data, w = method.net, toy.batches(), {**up, **kept}
    z = data.mapped(lambda x: net.projector.frozen(w["projector"], net.extractor.frozen(w["extractor"], x)))
    loss = CrossEntropy({"global_head": net.global_head})
    expected = fit(loss, down["global_head"], z, stage="s2", epochs=1, optimiser=method.optimiser)
    assert all(torch.allclose(up["global_head"][key], t, atol=1e-6) for key, t in expected.items())
    both = net.head.frozen(w["head"], z.x) + net.global_head.frozen(w["global_head"], z.x)
    assert torch.allclose(method.predict(w, data.x.float() / 255), both, atol=1e-5)
    assert (method.has_global, method.head_tier.kind) == (personal == "head", "none")
