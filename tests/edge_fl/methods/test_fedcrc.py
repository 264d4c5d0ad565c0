"""FedCRC: three stages that each train one part, and a moving average of the global head (docs/methods-personal-heads.md, "FedCRC")."""

import pytest
import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update, lerp, weighted_mean
from edge_fl.learn.batches import Batch
from edge_fl.learn.fit import fit
from edge_fl.learn.losses import cross_entropy, kl
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from tests.edge_fl.methods import toy


def one_update(method: Method) -> tuple[Parts, Parts, Parts, Parts]:
    """(down, own before, up, own after) of the first client."""
    down, own = steps.broadcast(method, steps.start(method), "c0"), steps.start_own(method, "c0")
    return down, own, *method.local_update(down, own, toy.batches())


def test_with_tau_one_the_global_head_never_moves_while_the_extractor_does() -> None:
    run = toy.federate(toy.method("fedcrc", tau=1.0))
    assert tree.same(run.shared["global_head"], run.history[0]["global_head"])
    assert not tree.same(run.shared["extractor"], run.history[0]["extractor"])


def test_with_tau_zero_the_global_head_is_the_mean_of_the_clients() -> None:
    run = toy.federate(toy.method("fedcrc", tau=0.0), rounds=1)
    mean = weighted_mean({}, run.updates[0].values())
    assert tree.same(run.shared["global_head"], mean["global_head"])


def test_the_global_head_is_a_moving_average() -> None:
    run = toy.federate(toy.method("fedcrc"), rounds=1)
    mean = weighted_mean({}, run.updates[0].values())
    assert tree.same(
        run.shared["global_head"], lerp(run.history[0]["global_head"], mean["global_head"], 0.99)
    )
    assert tree.same(run.shared["extractor"], mean["extractor"])


def test_every_stage_moves_its_part_alone() -> None:
    method, data = toy.method("fedcrc"), toy.batches()
    down, own, up, new = one_update(method)
    # the extractor is what stage 1 made of it under the received head, BatchNorm included: stages 2 and 3 left it alone
    f = method.fit_extractor(down["extractor"], down["global_head"], data, stage="s1", name="global_head")
    assert tree.same(up["extractor"], f)
    # the personal head is what stage 2 made of it: stage 3 left it alone
    z = data.features(method.net.extractor, f)
    assert tree.same(new["head"], method.train(method.head_loss, own["head"], z, stage="s2", epochs=1))
    # and each stage did something
    assert not tree.same(new["head"], own["head"])
    assert not tree.same(up["global_head"], down["global_head"])


def test_the_global_head_has_one_epoch_and_no_gradient_from_an_equal_teacher() -> None:
    method, data = toy.method("fedcrc", epochs=0), toy.batches(batch_size=100)  # one batch: one step
    down, own = steps.start(method), steps.start_own(method, "c0")
    up, new = method.local_update(down, own, data)
    assert tree.same(up["extractor"], down["extractor"])
    assert tree.same(new["head"], own["head"])
    z = data.features(method.net.extractor, down["extractor"])
    alone = method.train(method.head_loss, down["global_head"], z, stage="s3", epochs=1)
    assert not tree.same(alone, down["global_head"])
    assert all(torch.allclose(up["global_head"][name], alone[name], atol=1e-7) for name in alone)


def test_the_personal_head_is_not_sent_and_starts_equal_to_the_global_one() -> None:
    run = toy.federate(toy.method("fedcrc"))
    travelled = {name for downs in run.downs for down in downs.values() for name in down}
    travelled |= {name for updates in run.updates for update in updates.values() for name in update.parts}
    assert travelled == {"extractor", "global_head"}
    start = steps.start_own(run.method, "c0")["head"]
    assert tree.same(start, run.history[0]["global_head"])


def test_the_personal_head_continues_from_the_clients_last_one() -> None:
    method = toy.method("fedcrc", tau=1.0)
    down, own, _, new = one_update(method)
    again = method.local_update(down, new, toy.batches())[1]
    assert not tree.same(again["head"], new["head"])
    assert not tree.same(again["head"], method.local_update(down, own, toy.batches())[1]["head"])


def test_one_client_and_tau_zero_make_the_server_state_the_clients() -> None:
    only = {"c0": toy.clients()["c0"]}
    run = toy.federate(toy.method("fedcrc", tau=0.0), rounds=1, cohort=lambda _: only, data=only)
    assert tree.same(run.shared, run.updates[0]["c0"].parts)


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_the_personal_head_just_trained_teaches_the_global_one(order: str) -> None:
    method = toy.method("fedcrc", kl=order)
    down, _, up, new = one_update(method)

    def imitation(h: Params, batch: Batch) -> Tensor:
        student, teacher = (
            batch.x @ h["weight"].T + h["bias"],
            batch.x @ new["head"]["weight"].T + new["head"]["bias"],
        )
        taught = kl(student, teacher) if order == "forward" else kl(teacher, student)
        return cross_entropy(student, batch.y) + taught

    z = toy.batches().features(method.net.extractor, up["extractor"])
    expected = fit(imitation, down["global_head"], z, stage="s3", epochs=1, optimiser=method.optimiser)
    assert all(torch.allclose(up["global_head"][name], expected[name], atol=1e-6) for name in expected)


def test_the_personal_head_is_refitted_on_the_final_extractor_unless_the_option_is_off() -> None:
    assert toy.method("fedcrc").refresh_personal
    for refresh in (False, True):
        run = toy.federate(toy.method("fedcrc", refresh_personal=refresh), rounds=1)
        down = steps.broadcast(run.method, run.shared, "c0")
        own = steps.personalise(run.method, down, run.own["c0"], toy.batches())[1]
        assert tree.same(own, run.own["c0"]) != refresh


def test_a_head_only_device_moves_the_global_head_and_nothing_else() -> None:
    run = toy.federate(toy.method("fedcrc", tau=0.0), rounds=1)
    full = list(run.updates[0].values())
    ones = {name: torch.ones_like(t) for name, t in run.shared["global_head"].items()}
    mixed = steps.aggregate(run.method, run.history[0], [*full, Update("h0", 1000, {"global_head": ones})])
    assert tree.same(mixed["extractor"], run.shared["extractor"])
    assert not tree.same(mixed["global_head"], run.shared["global_head"])
