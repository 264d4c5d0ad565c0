"""FedCRL: class means are sent, heads are not, and the contrastive loss sets the mix (docs/methods-personal-models.md, "FedCRL")."""

from dataclasses import replace

import pytest
import torch

from edge_fl.config import PrivacyConfig
from edge_fl.learn import tree
from edge_fl.learn.losses import prototype_contrast
from edge_fl.learn.optimiser import Adam, Sgd
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps
from edge_fl.methods.fedcrl import FedCRL
from tests.edge_fl.methods import toy


def fedcrl(**options: object) -> FedCRL:
    method = toy.method("fedcrl", toy.flat_net(), **options)
    assert isinstance(method, FedCRL)
    return method


def after_a_round(method: FedCRL, rounds: int = 1) -> tuple[Parts, Parts]:
    """(down, own) of the first client for the next round."""
    run = toy.federate(method, rounds)
    return steps.broadcast(method, run.shared, "c0"), run.own["c0"]


def test_without_gamma_nothing_of_the_global_extractor_comes_in() -> None:
    down, own = after_a_round(fedcrl(gamma=0.0))
    still = fedcrl(gamma=0.0, epochs=0)
    assert still.mix(down, own, toy.batches()) == 1
    assert not tree.same(own["personal_extractor"], down["extractor"])
    assert tree.same(
        still.local_update(down, own, toy.batches())[1]["personal_extractor"], own["personal_extractor"]
    )


def test_endless_misfit_brings_in_the_global_extractor_whole() -> None:
    down, own = after_a_round(fedcrl())
    still = fedcrl(gamma=1e9, epochs=0)
    assert still.mix(down, own, toy.batches()) == 0
    assert tree.same(still.local_update(down, own, toy.batches())[1]["personal_extractor"], down["extractor"])


def test_the_mixture_is_linear_in_the_weight_of_the_misfit() -> None:
    down, own = after_a_round(fedcrl())
    still = fedcrl(epochs=0)
    mix = still.mix(down, own, toy.batches())
    z = toy.batches().features(still.net.extractor, own["personal_extractor"])
    assert torch.isclose(mix, torch.exp(-0.8 * prototype_contrast(z.x, z.y, down["prototypes"], 0.1)))
    mixed = still.local_update(down, own, toy.batches())[1]["personal_extractor"]
    for name, t in mixed.items():
        assert torch.equal(t, mix * own["personal_extractor"][name] + (1 - mix) * down["extractor"][name])


def test_misfit_is_the_mean_over_the_samples_of_the_last_training() -> None:
    down, own = after_a_round(fedcrl())
    frozen = fedcrl(optimiser=Sgd(0.0), gamma=0.0)  # nothing moves, so every batch sees the same extractor
    _, new = frozen.local_update(down, own, toy.batches())
    z = toy.batches().features(frozen.net.extractor, own["personal_extractor"])
    assert torch.isclose(new["history"]["misfit"], prototype_contrast(z.x, z.y, down["prototypes"], 0.1))


def test_misfit_of_one_sample_with_a_prototype_is_known() -> None:
    down, own = after_a_round(fedcrl())
    data = toy.batches(toy.PAIR)
    assert data.y[0] != data.y[1]
    only = (torch.arange(10) == data.y[0]).float()
    down = {**down, "prototypes": {**down["prototypes"], "count": only}}
    _, new = fedcrl(optimiser=Sgd(0.0), gamma=0.0).local_update(down, own, data)
    z = data.features(fedcrl().net.extractor, own["personal_extractor"])
    assert torch.isclose(new["history"]["misfit"], prototype_contrast(z.x, z.y, down["prototypes"], 0.1))
    assert new["history"]["misfit"] >= 0


@pytest.mark.parametrize(("probe", "follows"), [("train", True), ("eval", False)])
def test_the_stored_loss_sets_the_mixing_weight_unless_it_is_measured_anew(probe: str, follows: bool) -> None:
    method = fedcrl(reg_probe=probe)
    down, own = after_a_round(method, rounds=2)
    assert own["history"]["misfit"] >= 0
    pretended = {**own, "history": {**own["history"], "misfit": torch.tensor(123.0)}}
    same = method.mix(down, own, toy.batches()) == method.mix(down, pretended, toy.batches())
    assert bool(same) != follows


def test_the_mixing_weight_is_reported() -> None:
    method = fedcrl()
    down, own = after_a_round(method)
    reported = toy.clients()["c0"].evaluate(method, down, own)["fedcrl.tau_mix"]
    assert reported == float(method.mix(down, own, toy.batches()))
    assert 0 < reported < 1
    noisy = replace(method, privacy=PrivacyConfig(noise_multiplier=1.0, clip=1.0))
    assert "fedcrl.tau_mix" not in toy.clients()["c0"].evaluate(noisy, down, own)


def test_misfit_is_unknown_before_there_are_prototypes() -> None:
    run = toy.federate(fedcrl(), rounds=1)
    assert all(own["history"]["misfit"] == -1 for own in run.own.values())
    assert all(own["history"]["trained"] == 1 for own in run.own.values())


def test_without_contrast_and_with_endless_gamma_it_is_fedper() -> None:
    settings = {"optimiser": Adam(0.003)}
    ours = toy.federate(toy.method("fedcrl", alpha=0.0, gamma=1e9, dropout=0.0, **settings), rounds=3)
    theirs = toy.federate(toy.method("fedper", **settings), rounds=3)
    assert tree.same(ours.shared["extractor"], theirs.shared["extractor"])
    assert all(tree.same(ours.own[client]["head"], theirs.own[client]["head"]) for client in ours.own)


def test_contrast_and_dropout_change_the_result() -> None:
    def learned(**options: object) -> Parts:
        return toy.federate(fedcrl(**options)).shared

    plain = learned(alpha=0.0, dropout=0.0)
    assert not tree.same(learned(alpha=1.0, dropout=0.0), plain)
    assert not tree.same(learned(alpha=0.0, dropout=0.3), plain)


def test_only_extractor_and_prototypes_of_present_classes_are_sent() -> None:
    run = toy.federate(fedcrl())
    for updates in run.updates:
        assert all(update.parts.keys() == {"extractor", "prototypes"} for update in updates.values())
    assert all(down.keys() == {"extractor", "prototypes"} for downs in run.downs for down in downs.values())
    assert run.updates[0][toy.SINGLE].parts["prototypes"]["mean"].shape == (1, 12)
    assert run.updates[0][toy.PAIR].parts["prototypes"]["mean"].shape == (2, 12)


def test_prototypes_are_means_of_the_trained_extractors_features_before_dropout() -> None:
    run = toy.federate(fedcrl(), rounds=1)
    update = run.updates[0][toy.SINGLE].parts
    z = toy.batches(toy.SINGLE).features(run.method.net.extractor, update["extractor"])
    assert torch.allclose(update["prototypes"]["mean"][0], z.x.mean(0), atol=1e-6)
    counts = sum(toy.batches(client).counts for client in run.clients)
    assert torch.equal(run.shared["prototypes"]["count"], torch.as_tensor(counts))


def test_a_client_that_never_took_part_predicts_with_the_global_extractor() -> None:
    run = toy.federate(fedcrl(), cohort=lambda _: ["c0", "c1"])
    features = run.method.net.extractor.frozen(run.shared["extractor"], run.images("c4"))
    assert torch.equal(run.predict("c4"), run.method.net.head.frozen(run.own["c4"]["head"], features))
    down = steps.broadcast(run.method, run.shared, "c4")
    # and starts from it when it does
    assert fedcrl(gamma=0.0).mix(down, run.own["c4"], toy.batches("c4")) == 0
    own = run.method.net.extractor.frozen(run.own["c0"]["personal_extractor"], run.images("c0"))
    assert torch.equal(run.predict("c0"), run.method.net.head.frozen(run.own["c0"]["head"], own))


def test_weights_are_clipped_only_with_the_option() -> None:
    down, own = after_a_round(fedcrl())
    before = tree.parameters({name: own[name] for name in ("personal_extractor", "head")})
    for clip in ("none", "grad_norm", "params01"):
        method = fedcrl(param_clip=clip, optimiser=Sgd(1.0), alpha=10.0, gamma=0.0)
        _, new = method.local_update(down, own, toy.batches(batch_size=100))  # one step
        after = tree.parameters({name: new[name] for name in ("personal_extractor", "head")})
        moved = torch.stack([((after[path] - before[path]) ** 2).sum() for path in after]).sum().sqrt()
        assert (moved <= 1.0001) == (clip == "grad_norm")
        assert all(t.min() >= 0 and t.max() <= 1 for t in after.values()) == (clip == "params01")
