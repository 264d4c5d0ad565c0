"""FedRIR: stages, alternation inside the second, masked images, bound of mutual information (docs/methods-personal-models.md, "FedRIR")."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from edge_fl.config import ModelConfig
from edge_fl.inputs import InputSpec
from edge_fl.learn import tree
from edge_fl.learn.augment import hide_patches
from edge_fl.learn.batches import Batch
from edge_fl.learn.fit import descend, fit_from
from edge_fl.learn.losses import cross_entropy, gaussian_nll, vclub
from edge_fl.learn.optimiser import Adam, Sgd
from edge_fl.learn.random import fold, key_of, normal
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods import fedrir
from edge_fl.methods.contract import steps
from edge_fl.methods.fedrir import OBJECTIVES, FedRIR, explained
from edge_fl.models import build_net
from tests.edge_fl.methods import toy

S1 = ("specific_extractor", "decoder")


def method(**options: Any) -> FedRIR:
    made = toy.method("fedrir", **{"optimiser": Adam(1e-3), **options})
    assert isinstance(made, FedRIR)
    return made


def start(of: FedRIR, client: str = "c0") -> tuple[Parts, Parts]:
    """(down, own) as `local_update` gets them, BatchNorm memory put back."""
    own = of.init_own(client)
    return of.init_shared(), own


def test_only_the_extractor_is_sent_without_its_running_statistics() -> None:
    run = toy.federate(method())
    for updates in run.updates:
        for update in updates.values():
            assert update.parts.keys() == {"extractor", "extractor.export_norm"}
            assert not any("running" in name for name in update.parts["extractor"])
    for downs in run.downs:
        assert all(down.keys() == {"extractor"} for down in downs.values())
        assert not any("running" in name for down in downs.values() for name in down["extractor"])


def test_its_personal_networks_start_equal_on_all_clients() -> None:
    one, other = (method().init_own(client) for client in ("c0", "c1"))
    for part in (*S1, "estimator", "head"):
        assert tree.same(one[part], other[part]), part


def test_stage_one_moves_the_specific_extractor_and_the_decoder_and_stage_two_leaves_them() -> None:
    ours, data = method(), toy.batches()
    down, own = start(ours)
    up, new = ours.local_update(down, own, data)
    trained = {name: own[name] for name in S1}

    state = ours.optimiser.init(tree.parameters(trained))
    alone, _ = fit_from(
        state, ours.reconstruction, trained, data, stage="s1", epochs=1, optimiser=ours.optimiser
    )
    assert all(tree.same(new[name], alone[name]) for name in S1)  # BatchNorm statistics included
    assert not any(tree.same(new[name], own[name]) for name in (*S1, "estimator", "head"))
    assert not tree.same(up["extractor"], down["extractor"])


def test_the_estimator_steps_first_and_then_the_extractor_against_it() -> None:
    ours, data = method(id_weight=1.0), toy.batches(batch_size=100)  # one batch: one alternation
    (down, own), net, opt = start(ours), ours.net, ours.optimiser
    up, new = ours.local_update(down, own, data)
    batch = next(data.batches("s2", 1, norm=True))
    f_cs = net.specific_extractor.frozen(new["specific_extractor"], batch.x)[:, :12]
    seen = net.extractor(tree.clone(down["extractor"]), batch.x)

    def explain(q: Params, batch: Batch) -> Tensor:
        return gaussian_nll(seen, *net.estimator(q, f_cs).chunk(2, 1))

    q, _ = descend(explain, own["estimator"], opt.init(tree.parameters(own["estimator"])), batch, opt)
    assert tree.same(new["estimator"], q)  # stage 2b left it alone

    def separate(w: Parts, batch: Batch) -> Tensor:
        f_g = net.extractor(w["extractor"], batch.x)
        logits = net.head(w["head"], torch.cat([f_g, f_cs], dim=1))
        return cross_entropy(logits, batch.y) + vclub(f_g, *net.estimator(q, f_cs).chunk(2, 1)).clamp(min=0)

    w = tree.clone({"extractor": down["extractor"], "head": own["head"]})
    w, _ = descend(separate, w, opt.init(tree.parameters(w)), batch, opt)
    assert tree.same(up["extractor"], w["extractor"])  # stage 2a left it alone: BatchNorm has moved once
    assert tree.same(new["head"], w["head"])


@pytest.mark.parametrize("objective", ["joint_literal", "nll_joint"])
def test_a_joint_objective_moves_estimator_and_extractor_by_one_gradient_of_one_loss(objective: str) -> None:
    ours, data = method(id_objective=objective, id_weight=1.0), toy.batches(batch_size=100)  # one step
    (down, own), net, opt = start(ours), ours.net, ours.optimiser
    up, new = ours.local_update(down, own, data)
    batch = next(data.batches("s2", 1, norm=True))
    f_cs = net.specific_extractor.frozen(new["specific_extractor"], batch.x)[:, :12]

    def loss(w: Parts, batch: Batch) -> Tensor:
        f_g = net.extractor(w["extractor"], batch.x)
        error = cross_entropy(net.head(w["head"], torch.cat([f_g, f_cs], dim=1)), batch.y)
        if objective == "joint_literal":
            return error + vclub(f_g, *net.estimator(w["estimator"], f_cs).chunk(2, 1))
        return error + gaussian_nll(f_cs, *net.estimator(w["estimator"], f_g).chunk(2, 1))

    w = tree.clone({"extractor": down["extractor"], "head": own["head"], "estimator": own["estimator"]})
    w, _ = descend(loss, w, opt.init(tree.parameters(w)), batch, opt)
    assert tree.same({**up, "head": new["head"], "estimator": new["estimator"]}, w)


def test_the_estimator_s_networks_have_128_hidden_units() -> None:
    params = toy.method("fedrir").net.estimator.init()
    for network in ("mean", "log_variance"):
        shapes = [tuple(params[f"{network}.{layer}.weight"].shape) for layer in (0, 2)]
        assert shapes == [(128, 12), (12, 128)]


@pytest.mark.parametrize(
    ("side", "hidden", "patches"), [(28, 29, 49), (32, 38, 64), (64, 153, 256), (8, 2, 4)]
)
def test_a_share_of_the_patches_is_hidden_in_all_channels(side: int, hidden: int, patches: int) -> None:
    x = torch.ones(5, 3, side, side)
    before = x.clone()
    seen = hide_patches(x, key_of(1), 0.6, torch.zeros(3, 1, 1))
    grid = seen.unfold(2, 4, 4).unfold(3, 4, 4).flatten(2, 3).flatten(3)  # [B, C, patch, pixel]
    assert grid.shape[2] == patches
    assert torch.equal(grid.amin(3), grid.amax(3))  # whole patches
    assert torch.equal(grid[:, 0], grid[:, 2])  # all channels
    assert ((grid[:, 0, :, 0] == 0).sum(1) == hidden).all()
    assert not torch.equal(seen, seen[:1].expand_as(seen))  # each image draws its own
    assert torch.equal(x, before)


def test_pixels_beyond_the_last_whole_patch_are_never_hidden() -> None:
    seen = hide_patches(torch.ones(2, 1, 10, 9), key_of(1), 1.0, torch.zeros(1, 1, 1))
    assert seen[:, :, :8, :8].abs().max() == 0
    assert seen[:, :, 8:].min() == seen[:, :, :, 8:].min() == 1


def test_a_share_of_zero_hides_nothing() -> None:
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(hide_patches(x, key_of(1), 0.0, torch.zeros(1, 1, 1)), x)


@pytest.mark.parametrize(
    ("side", "channels", "size"), [(28, 1, 577_088), (32, 3, 873_600), (64, 3, 5_592_192)]
)
def test_the_networks_have_the_papers_sizes(side: int, channels: int, size: int) -> None:
    net = build_net(ModelConfig("cnn2-bn"), InputSpec((channels, side, side)), 10)
    assert sum(t.numel() for t in tree.parameters(net.extractor.init()).values()) == size
    specific, decoder = fedrir.specific_extractor(net), fedrir.Decoder(512, net.input)
    image = torch.zeros(2, channels, side, side)
    assert specific(image).shape == (2, 1024)
    flat = (
        size - sum(p.numel() for p in list(specific.parameters())[:-2]) - 512
    ) // 512  # inputs of the last layer
    # FC 1024 in place of FC 512
    assert sum(p.numel() for p in specific.parameters()) == size + 512 * (flat + 1)
    assert decoder(torch.zeros(2, 512)).shape == image.shape
    assert not any(
        isinstance(child, torch.nn.Sequential) and child is specific for child in specific.modules()
    )


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 30, 17)])
def test_the_decoder_fits_images_of_any_size(shape: tuple[int, int, int]) -> None:
    decoder = fedrir.Decoder(6, InputSpec(shape))
    assert decoder(torch.zeros(2, 6)).shape == (2, *shape)


def test_without_weight_the_extractor_sees_cross_entropy_alone() -> None:
    plain, weightless = (
        toy.federate(method(**options), rounds=2)
        for options in ({"id_objective": "none"}, {"id_weight": 0.0})
    )
    assert tree.same(plain.shared["extractor"], weightless.shared["extractor"])
    bounded = toy.federate(method(), rounds=2)
    assert not tree.same(plain.shared["extractor"], bounded.shared["extractor"])


def test_without_weight_stage_two_is_cross_entropy_on_both_features() -> None:
    ours, data = method(id_objective="none"), toy.batches()
    down, own = start(ours)
    up, new = ours.local_update(down, own, data)

    def loss(w: Parts, batch: Batch) -> Tensor:
        f_cs = ours.net.specific_extractor.frozen(new["specific_extractor"], batch.x)[:, :12]
        both = torch.cat([ours.net.extractor(w["extractor"], batch.x), f_cs], dim=1)
        return cross_entropy(ours.net.head(w["head"], both), batch.y)

    w = {"extractor": down["extractor"], "head": own["head"]}
    state = ours.optimiser.init(tree.parameters(w))
    alone, _ = fit_from(state, loss, w, data, stage="s2", epochs=1, optimiser=ours.optimiser)
    assert tree.same(up["extractor"], alone["extractor"])
    assert tree.same(new["head"], alone["head"])
    assert tree.same(new["estimator"], own["estimator"])


def test_the_clamped_bound_is_at_least_zero_and_zero_below() -> None:
    clamped, raw = method(), method(id_clamp=False)
    q = {"estimator": raw.net.estimator.init()}
    draw = torch.Generator().manual_seed(0)
    signs = set()
    for _ in range(20):
        f_g, f_cs = torch.randn(2, 8, 12, generator=draw)
        f_g.requires_grad_()
        value, bounded = (each.information(vclub, q, f_g, f_cs, None) for each in (raw, clamped))
        signs.add(bool(value > 0))
        assert bounded == value.clamp(min=0)
        gradients = torch.autograd.grad(bounded, f_g)[0]
        assert (gradients.abs().max() == 0) == bool(value < 0)
    assert signs == {True, False}


def test_every_objective_has_its_two_losses() -> None:
    net = method().net
    q = {"estimator": net.estimator.init()}
    f_g, f_cs = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(3))
    forth = net.estimator(q["estimator"], f_cs).chunk(2, 1)
    back = net.estimator(q["estimator"], f_g).chunk(2, 1)
    expected = {
        "vclub": (gaussian_nll(f_g, *forth), vclub(f_g, *forth)),
        "nll_joint": (gaussian_nll(f_cs, *back), gaussian_nll(f_cs, *back)),
        "joint_literal": (vclub(f_g, *forth), vclub(f_g, *forth)),
        "none": (torch.tensor(0.0), torch.tensor(0.0)),
    }
    for name, values in expected.items():
        ours = method(id_objective=name, id_clamp=False)
        found = [ours.information(loss, q, f_g, f_cs, None) for loss in OBJECTIVES[name]]
        assert all(torch.equal(a, b) for a, b in zip(found, values, strict=True))


def test_the_estimators_log_variance_stays_between_minus_one_and_one() -> None:
    net = method().net
    output = net.estimator(net.estimator.init(), 1e3 * torch.randn(4, 12))
    assert output[:, 12:].abs().max() <= 1
    assert output[:, :12].abs().max() > 1


def test_adam_continues_with_its_state_of_the_previous_round() -> None:
    run = toy.federate(method(), rounds=2)
    batches = -(-len(toy.batches()) // 8)
    for stage in ("s1_state", "q_state", "s2_state"):
        assert run.own["c0"][stage]["|2"] == 2 * batches  # steps taken, over both rounds
    fresh = {
        **run.own["c0"],
        **{stage: run.method.init_own("c0")[stage] for stage in ("s1_state", "s2_state")},
    }
    down = steps.broadcast(run.method, run.shared, "c0")
    went_on = toy.train(run.method, down, run.own["c0"], toy.batches(round=3))[0]
    assert not tree.same(went_on, toy.train(run.method, down, fresh, toy.batches(round=3))[0])


def test_running_statistics_stay_on_the_client_and_are_averaged_for_exports_only() -> None:
    run = toy.federate(method(), rounds=1)
    kept = [run.own[client]["extractor.norm"] for client in ("c0", "c4")]
    assert not tree.same(*kept)
    assert "extractor.export_norm" in run.shared
    assert "extractor.export_norm" not in steps.broadcast(run.method, run.shared, "c0")


def test_it_runs_under_sgd_too_and_keeps_its_velocity() -> None:
    run = toy.federate(method(optimiser=Sgd(1e-3, momentum=0.5), id_weight=0.01), rounds=1)
    assert run.own["c0"]["s2_state"].keys()
    assert run.predict("c0").isfinite().all()


def test_reconstruction_is_a_variational_autoencoder_of_normalised_images() -> None:
    net = method().net
    w = {"specific_extractor": net.specific_extractor.init(), "decoder": net.decoder.init()}
    batch = next(toy.batches().batches("s1", 1))
    seen = hide_patches(batch.x, fold(batch.key, 1), 0.6, torch.full((1, 1, 1), 0.3))
    mean, log_variance = net.specific_extractor(tree.clone(w["specific_extractor"]), seen).chunk(2, 1)
    z = mean + torch.exp(0.5 * log_variance) * normal(fold(batch.key, 2), *mean.shape)
    error = ((net.decoder(w["decoder"], z) - (batch.x - 0.3) / 0.4) ** 2).mean()
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
    found = method(kld_weight=0.1).reconstruction(tree.clone(w), batch)
    assert torch.isclose(found, error + 0.1 * divergence, rtol=1e-5)
    assert torch.isclose(method().reconstruction(tree.clone(w), batch), error, rtol=1e-5)


def test_it_reports_how_much_its_two_features_share() -> None:
    run = toy.federate(method(), rounds=1)
    reported = toy.clients()["c0"].evaluate(run.method, run.downs[0]["c0"], run.own["c0"])
    own = {**run.downs[0]["c0"], **run.own["c0"]}
    own["extractor"] = {**own["extractor"], **own["extractor.norm"]}
    z = toy.batches().features(run.method.net.extractor, own["extractor"]).x
    assert reported["fedrir.feature_std"] == pytest.approx(float(z.std(0, correction=0).mean()))
    assert reported["fedrir.vclub"] != 0
    assert 0 < reported["fedrir.r_squared"] < 1
    assert "fedrir.r_squared" not in toy.clients()[toy.PAIR].evaluate(
        run.method, run.downs[0][toy.PAIR], run.own[toy.PAIR]
    )


def test_it_reports_nothing_on_diverged_features() -> None:
    ours, client = method(), toy.clients()["c0"]
    down, own = steps.broadcast(ours, steps.start(ours), "c0"), steps.start_own(ours, "c0")
    huge = {name: torch.full_like(t, float("inf")) for name, t in down["extractor"].items()}
    assert not any(name.startswith("fedrir") for name in client.evaluate(ours, {"extractor": huge}, own))


def test_a_feature_that_is_linear_in_the_other_is_explained_whole() -> None:
    draw = torch.Generator().manual_seed(0)
    f_cs = torch.randn(200, 12, generator=draw)
    turned = f_cs @ torch.randn(12, 12, generator=draw) + 3
    noise = torch.randn(200, 12, generator=draw)
    assert explained(turned, f_cs) == pytest.approx(1, abs=1e-5)
    assert explained(noise, f_cs) < 0.15


def test_masking_changes_the_result_of_stage_one() -> None:
    whole, masked = (
        replace(method(), mask=share).local_update(*start(method()), toy.batches())[1]["decoder"]
        for share in (0.0, 0.6)
    )
    assert not tree.same(whole, masked)


def test_without_its_first_stage_the_specific_extractor_stays_as_drawn() -> None:
    ours, data = method(mcsl=False), toy.batches()
    down, own = start(ours)
    up, new = ours.local_update(down, own, data)
    assert all(tree.same(new[name], own[name]) for name in (*S1, "s1_state"))
    assert not tree.same(up["extractor"], down["extractor"])


def test_the_log_variance_of_the_estimator_may_end_in_relu() -> None:
    z = torch.linspace(-9, 9, 24).reshape(2, 12)
    found = {}
    for end in ("tanh", "relu"):
        net = method(id_variance=end).net
        found[end] = net.estimator.frozen(net.estimator.init(), z).chunk(2, dim=1)[1]
    assert found["tanh"].abs().max() <= 1 and found["tanh"].min() < 0
    assert found["relu"].min() == 0 < found["relu"].max()
