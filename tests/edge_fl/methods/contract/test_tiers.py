"""Head plans (docs/methods-on-devices.md, "Device tiers"): a stage called native is the method's own, with its own numbers."""

import numpy as np
import pytest

from edge_fl import heads
from edge_fl.learn.tree import to_arrays
from edge_fl.methods import names
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.tiers import head_plan
from tests.edge_fl.methods import toy

CONVERGED = {"repper"}  # its paper fits these heads to convergence


@pytest.mark.parametrize("name", names())
def test_only_a_method_that_fits_converged_heads_is_native_with_one(name: str) -> None:
    tier = toy.method(name).head_tier
    assert tier.kind != "native" or tier.way != "own" or name in CONVERGED


def test_fedetf_trains_the_frame_as_in_final_personalisation() -> None:
    """With frozen projection, equal batches and no bias: the device's head is s times the personal frame."""
    method = toy.method("fedetf", alternations=2, ft_epochs=3, frame_lr=0.2, projection_lr=0.0)
    run = toy.federate(method, rounds=1)
    plan = head_plan(method, batch_size=64, serves="way")
    assert (plan.way, plan.lr, plan.epochs, plan.momentum, plan.min_steps) == ("tuned", 0.2, 6, 0.0, 0)
    down = steps.broadcast(method, run.shared, "c0")
    data = toy.batches("c0", round=2, batch_size=64)
    _, own = method.personalise(down, {}, data)
    trained = {name: own[f"personal_{name}"] for name in ("extractor", "projection")}
    z = data.mapped(lambda x: method.features(trained, x))
    extras = to_arrays({"head": method.net.head.init(), "scale": own["personal_scale"]})
    head = heads.fit("logistic", z.x.numpy(), z.y.numpy(), 10, unit_norm=True, plan=plan, extras=extras)
    expected = own["personal_scale"]["s"] * own["personal_head"]["weight"]
    assert np.allclose(head.to_arrays()["weights"], expected.numpy(), atol=1e-4)


def test_fedpac_runs_one_epoch_of_its_head_stage() -> None:
    method = toy.method("fedpac", epochs=3, head_lr=0.2)
    plan = head_plan(method, batch_size=8)
    assert (plan.way, plan.epochs, plan.min_steps, plan.batch_size) == ("tuned", 1, 0, 8)
    assert (plan.lr, plan.momentum, plan.weight_decay) == (0.2, 0.5, 5e-4)
