"""FedBN: BatchNorm stays on the client (docs/methods-personal-models.md, "FedBN")."""

import pytest
import torch

from edge_fl.config import ModelConfig
from edge_fl.inputs import InputSpec
from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import weighted_mean
from edge_fl.methods.contract import norm, steps
from edge_fl.models import build_net
from edge_fl_server.release import export
from tests.edge_fl.methods import toy

TINY = {
    f"{kind}extractor.convolutions.{place}.{name}"
    for place in (1, 5)
    for kind, name in [
        ("", "weight"),
        ("", "bias"),
        ("buffer:", "running_mean"),
        ("buffer:", "running_var"),
        ("buffer:", "num_batches_tracked"),
    ]
}


def test_no_batchnorm_is_on_the_wire_but_for_the_export() -> None:
    run = toy.federate(toy.method("fedbn"))
    assert norm.kept(run.method, "extractor") == TINY
    for downs, updates in zip(run.downs, run.updates, strict=True):
        assert not any(TINY & params.keys() for down in downs.values() for params in down.values())
        for update in updates.values():
            assert update.parts.keys() == {"extractor", "head", "extractor.export_norm"}
            assert not TINY & update.parts["extractor"].keys()
            assert update.parts["extractor.export_norm"].keys() == TINY


def test_it_is_found_by_type_also_where_its_name_does_not_say_so() -> None:
    method = toy.method("fedbn", build_net(ModelConfig("resnet18"), InputSpec((3, 32, 32)), 10))
    kept = norm.kept(method, "extractor")
    assert "extractor.network.layer2.0.downsample.1.weight" in kept
    assert "extractor.network.layer2.0.downsample.0.weight" not in kept
    assert len(kept) == 20 * 5


def test_batchnorm_differs_by_client_and_all_else_is_equal_after_the_broadcast() -> None:
    run = toy.federate(toy.method("fedbn"))
    ours = [run.own[id]["extractor.norm"] for id in ("c0", "c4")]
    assert all(not ours[0][name].equal(ours[1][name]) for name in TINY if not name.endswith("tracked"))
    downs = [steps.broadcast(run.method, run.shared, id) for id in ("c0", "c4")]
    assert tree.same(*downs)


def test_the_same_image_is_seen_differently() -> None:
    run = toy.federate(toy.method("fedbn"))
    x = toy.batches().x[:3].float() / 255
    down = steps.broadcast(run.method, run.shared, "c0")
    assert not steps.predict(run.method, down, run.own["c0"], x).allclose(
        steps.predict(run.method, down, run.own["c4"], x)
    )


@pytest.mark.parametrize("weighting", ["uniform", "n"])
def test_clients_have_equal_weights_by_default(weighting: str) -> None:
    run = toy.federate(toy.method("fedbn", weighting=weighting), rounds=1)
    mean = weighted_mean({}, run.updates[0].values(), uniform=weighting == "uniform")
    assert tree.same(run.shared, mean)


def test_the_export_has_averaged_batchnorm() -> None:
    run = toy.federate(toy.method("fedbn"))
    averaged = run.shared["extractor.export_norm"]
    name = "buffer:extractor.convolutions.1.running_var"
    sent = torch.stack([u.parts["extractor.export_norm"][name] for u in run.updates[1].values()])
    assert averaged[name].allclose(sent.mean(0))
    x = toy.batches().x[:3].float() / 255
    whole = {"extractor": {**run.shared["extractor"], **averaged}}
    assert steps.exported_features(run.method, run.shared, x).equal(
        run.method.net.extractor.frozen(whole["extractor"], x)
    )
    assert export.export(run.method, run.shared).difference < 1e-4


@pytest.mark.parametrize(("images", "passes"), [(20, 30), (64, 30), (130, 30), (700, 33)])
def test_statistics_settle_in_thirty_batches_or_in_one_pass_over_more(images: int, passes: int) -> None:
    """Batches of 64, whole passes; 700 images are 11 batches, so three passes."""
    method = toy.method("fedbn")
    own, down = steps.start_own(method, "c0"), steps.broadcast(method, steps.start(method), "c0")
    x = torch.randint(
        0, 256, (images, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    settled = norm.estimated(method, down, own, x)["extractor.norm"]
    counted = {int(t) for name, t in settled.items() if name.endswith("num_batches_tracked")}
    assert counted == {passes}


@pytest.mark.parametrize("name", ["fedbn", "dualfed"])
def test_a_client_that_never_trained_predicts_with_statistics_of_its_own_images(name: str) -> None:
    run = toy.federate(toy.method(name), rounds=2, cohort=lambda number: ["c0", "c1"])
    down = steps.broadcast(run.method, run.shared, "c4")
    own = steps.newcomer(run.method, "c4", down, run.own["c4"], toy.batches("c4"))
    extractor = norm.restored(down, own)["extractor"]
    first = run.method.net.extractor.build().extractor.convolutions[0]
    first.load_state_dict({key: extractor[f"extractor.convolutions.0.{key}"] for key in ("weight", "bias")})
    z = first.requires_grad_(False)((toy.batches("c4").x.float() / 255 - 0.3) / 0.4)
    mean = extractor["buffer:extractor.convolutions.1.running_mean"]
    assert torch.allclose(mean, z.mean((0, 2, 3)), atol=0.05 * float(z.abs().max()))
    trained = steps.broadcast(run.method, run.shared, "c0"), run.own["c0"]
    assert steps.newcomer(run.method, "c0", *trained, toy.batches()) is run.own["c0"]
