"""What a release's extras are for: heads found as their methods find them, and the parts that may go back, by the formulas."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edge_fl import heads
from edge_fl.errors import ArtefactError, RunError
from edge_fl.heads import HeadPlan, Tuned, descent, head_updates, linear
from edge_fl.heads.head import TrainingSet, standardisation
from edge_fl.heads.two_heads import Gated

RNG = np.random.default_rng(5)
Z = RNG.normal(size=(12, 3)).astype(np.float32)
Y: NDArray[np.int64] = np.arange(12) % 3
WEIGHT, BIAS = RNG.normal(size=(4, 3)).astype(np.float32), RNG.normal(size=4).astype(np.float32)
HEAD = {"weight": WEIGHT, "bias": BIAS}
POLICY = {
    "0.weight": RNG.normal(size=(6, 3)).astype(np.float32),
    "0.bias": RNG.normal(size=6).astype(np.float32),
    "1.weight": RNG.normal(size=6).astype(np.float32),
    "1.bias": RNG.normal(size=6).astype(np.float32),
}
EXTRAS = {"head": HEAD, "policy": POLICY}


def plan(**fields: object) -> HeadPlan:
    """Whole batches, so that their order does not matter."""
    return HeadPlan(**{"start": "head", "batch_size": 64, "lr": 0.1, **fields})  # type: ignore[arg-type]


def training_set(plan: HeadPlan, extras: object = EXTRAS, z: NDArray[np.float32] = Z) -> TrainingSet:
    return heads.training_set(z, Y, 4, False, "e" * 64, 0, False, plan, extras)  # type: ignore[arg-type]


def fitted(plan: HeadPlan, extras: object = EXTRAS) -> heads.Head:
    return heads.fit("logistic", Z, Y, 4, unit_norm=False, extractor="e" * 64, plan=plan, extras=extras)  # type: ignore[arg-type]


def in_torch(loss, steps: int = 1, lr: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
    """HEAD after plain descent on loss(weight, bias, z, y)."""
    w, b = (torch.tensor(t, requires_grad=True) for t in (WEIGHT, BIAS))
    for _ in range(steps):
        grads = torch.autograd.grad(loss(w, b, torch.tensor(Z), torch.tensor(Y)), (w, b))
        w, b = ((t - lr * g).detach().requires_grad_() for t, g in zip((w, b), grads, strict=True))
    return w.detach(), b.detach()


def entropy(w, b, z, y):  # type: ignore[no-untyped-def]
    return torch.nn.functional.cross_entropy(z @ w.T + b, y)


def close(
    found: descent.Weights | dict[str, NDArray[np.float32]], expected: tuple[torch.Tensor, torch.Tensor]
) -> bool:
    arrays = found if isinstance(found, dict) else found.arrays()
    return all(
        np.allclose(arrays[n], t, atol=1e-5) for n, t in zip(("weight", "bias"), expected, strict=True)
    )


def test_fine_tuning_is_torch_s_descent_from_the_received_head() -> None:
    head = fitted(plan(way="tuned", epochs=3))
    assert isinstance(head, Tuned) and close(head.raw(), in_torch(entropy, 3))


def test_no_epochs_leave_the_received_head_as_it_is() -> None:
    head = fitted(plan(way="tuned", epochs=0))
    assert (
        isinstance(head, Tuned) and np.array_equal(head.weights, WEIGHT) and np.array_equal(head.bias, BIAS)
    )


def test_a_pull_keeps_the_head_near_and_none_is_too_strong() -> None:
    far = [
        np.abs(fitted(plan(way="tuned", epochs=200, pull=pull)).to_arrays()["weights"] - WEIGHT).max()
        for pull in (0, 1, 1e6)
    ]
    assert far[0] > 2 * far[1] > 0 and far[2] < 1e-4
    found = descent.descend(descent.Weights(WEIGHT, BIAS), training_set(plan(epochs=3000, pull=2.0)))
    w, b = torch.tensor(found.weight, requires_grad=True), torch.tensor(found.bias, requires_grad=True)
    loss = entropy(w, b, torch.tensor(Z), torch.tensor(Y))
    away = ((w - torch.tensor(WEIGHT)) ** 2).sum() + ((b - torch.tensor(BIAS)) ** 2).sum()
    grads = torch.autograd.grad(loss + away, (w, b))  # λ/2 |h - h_w|² with λ = 2
    assert max(float(grad.abs().max()) for grad in grads) < 1e-3


def test_fed_rod_s_two_heads_are_one_that_starts_at_their_sum() -> None:
    def both(w, b, z, y):  # type: ignore[no-untyped-def]
        return torch.nn.functional.cross_entropy(z @ (w + torch.tensor(WEIGHT)).T + b + torch.tensor(BIAS), y)

    head = fitted(plan(way="tuned", times=2.0, epochs=3))
    w, b = in_torch(both, 3)
    assert isinstance(head, Tuned) and close(head.raw(), (w + torch.tensor(WEIGHT), b + torch.tensor(BIAS)))


def test_a_frame_is_trained_behind_its_scale() -> None:
    def scaled(w, b, z, y):  # type: ignore[no-untyped-def]
        return torch.nn.functional.cross_entropy(3 * z @ w.T, y)

    extras = {"head": {"weight": WEIGHT}, "scale": {"s": np.float32(3)}}
    head = fitted(plan(way="tuned", epochs=2, lr=0.01), extras)
    w, _ = in_torch_without_bias(scaled, 2, 0.01)
    assert np.allclose(head.to_arrays()["weights"], 3 * w, atol=1e-5) and not head.to_arrays()["bias"].any()


def in_torch_without_bias(loss, steps: int, lr: float) -> tuple[torch.Tensor, None]:  # type: ignore[no-untyped-def]
    w = torch.tensor(WEIGHT, requires_grad=True)
    for _ in range(steps):
        (grad,) = torch.autograd.grad(loss(w, None, torch.tensor(Z), torch.tensor(Y)), (w,))
        w = (w - lr * grad).detach().requires_grad_()
    return w.detach(), None


def test_the_gates_are_fedcp_s_policy() -> None:
    d = 3
    policy = torch.nn.Sequential(
        torch.nn.Linear(d, 2 * d), torch.nn.LayerNorm(2 * d), torch.nn.ReLU(), torch.nn.Unflatten(1, (2, d))
    )
    policy.load_state_dict({name: torch.tensor(array) for name, array in POLICY.items()})
    head = fitted(plan(way="gated", epochs=2))
    assert isinstance(head, Gated)
    v = torch.tensor(WEIGHT.sum(axis=0))
    ours, rest = torch.softmax(policy(torch.tensor(Z) * v / v.norm()), dim=1).unbind(1)
    found = head.gates(Z)
    assert np.allclose(found[0], ours.detach(), atol=1e-5) and np.allclose(found[0] + found[1], 1, atol=1e-6)

    def behind(w, b, z, y):  # type: ignore[no-untyped-def]
        theirs = (rest.detach() * z) @ torch.tensor(WEIGHT).T + torch.tensor(BIAS)
        return torch.nn.functional.cross_entropy((ours.detach() * z) @ w.T + b + theirs, y)

    expected = in_torch(behind, 2)
    assert close({"weight": head.weights, "bias": head.bias}, expected)
    half = head_updates.HEAD_UPDATES["half_head"]("head", training_set(plan(way="gated")), head)
    assert close(half, ((expected[0] + torch.tensor(WEIGHT)) / 2, (expected[1] + torch.tensor(BIAS)) / 2))


def test_the_ensemble_adds_probabilities_as_dualfed_does() -> None:
    head = fitted(plan(way="ensemble"))
    assert isinstance(head, heads.Ensemble)
    ours, theirs = (descent.probabilities(x) for x in (head.mlp.logits(Z), Z @ WEIGHT.T + BIAS))
    assert np.allclose(np.exp(head.logits(Z)), (ours + theirs) / 2, atol=1e-6)


def test_mixing_takes_theirs_as_it_is_without_an_own_head_and_stays_between_the_two() -> None:
    first = fitted(plan(way="mixed", epochs=0))
    assert np.array_equal(first.to_arrays()["weights"], WEIGHT)
    ours = {"weight": -WEIGHT, "bias": -BIAS}
    mixed = fitted(plan(way="mixed", epochs=0, mixing=5.0), {**EXTRAS, "own": ours}).to_arrays()["weights"]
    assert not np.array_equal(mixed, WEIGHT) and (np.abs(mixed) <= np.abs(WEIGHT) + 1e-6).all()


def test_the_ridge_head_solves_its_normal_equations() -> None:
    weights = fitted(plan(way="ridge", ridge=0.5)).to_arrays()["weights"]
    expected = np.linalg.solve(Z.T @ Z + 0.5 * np.eye(3), Z.T @ np.eye(4)[Y]).T
    assert np.allclose(weights, expected, atol=1e-5)


def test_a_warm_start_ends_where_a_cold_one_does() -> None:
    cold, warm = fitted(plan(start="")), fitted(plan())
    shares_of = [descent.probabilities(head.logits(Z)) for head in (cold, warm)]
    assert warm.kind == "logistic" and np.allclose(*shares_of, atol=1e-3)


@pytest.mark.parametrize("classes", [2, 3])
def test_a_warm_start_begins_with_the_received_head_s_decisions(classes: int) -> None:
    known = heads.training_set(Z, Y % classes, 4, False, "", 0, False, plan(), EXTRAS)
    model, (mean, std) = SimpleNamespace(), standardisation(known)
    linear._start(model, known, mean, std)
    decided = ((Z - mean) / std) @ model.coef_.T + model.intercept_
    expected = (Z @ WEIGHT.T + BIAS)[:, :classes]
    expected = expected[:, 1:] - expected[:, :1] if classes == 2 else expected
    assert np.allclose(decided, expected, atol=1e-4) and model.classes_.tolist() == list(range(classes))


def test_prototypes_are_a_head_to_start_from() -> None:
    extras = {"prototypes": {"mean": WEIGHT, "count": np.ones(4, np.float32)}}
    found = descent.received(training_set(plan(), extras), "prototypes").logits(Z)
    nearest = -0.5 * np.square(Z[:, None] - WEIGHT[None]).sum(-1)
    assert np.allclose(found - found[:, :1], nearest - nearest[:, :1], atol=1e-4)


def test_other_kinds_stay_what_the_owner_chose() -> None:
    found = heads.fit("svm", Z, Y, 4, unit_norm=False, plan=plan(way="tuned"), extras=EXTRAS)
    assert found.kind == "svm"


def test_the_taught_head_is_one_step_of_cross_entropy_and_kl_to_the_own_head() -> None:
    """FedCRC stage 3, with a teacher that has classes of probability 0."""
    head = fitted(plan(start=""))
    found = head_updates.HEAD_UPDATES["taught_head"](
        "head", training_set(plan(epochs=9, min_steps=300)), head
    )
    teacher = torch.tensor(descent.probabilities(head.logits(Z)))

    def imitation(w, b, z, y):  # type: ignore[no-untyped-def]
        log_p = torch.log_softmax(z @ w.T + b, 1)
        kl = (torch.special.xlogy(teacher, teacher) - teacher * log_p).sum(1).mean()
        return torch.nn.functional.nll_loss(log_p, y) + kl

    assert close(found, in_torch(imitation))


def test_the_trained_head_is_the_method_s_epochs_on_labels() -> None:
    head = fitted(plan(start=""))
    found = head_updates.HEAD_UPDATES["trained_head"](
        "head", training_set(plan(epochs=2, min_steps=300)), head
    )
    assert close(found, in_torch(entropy, 2))


def test_class_means_have_no_row_for_an_absent_class() -> None:
    found = head_updates.HEAD_UPDATES["class_means"](
        "prototypes", training_set(plan()), fitted(plan(start=""))
    )
    assert found["count"].tolist() == [4, 4, 4, 0] and found["mean"].shape == (3, 3)
    assert np.allclose(found["mean"][1], Z[Y == 1].mean(axis=0), atol=1e-6)


def test_sums_give_the_calibration_and_spread_gives_fedpac_s_numbers() -> None:
    sums = head_updates.HEAD_UPDATES["ridge_sums"]("sums", training_set(plan()), fitted(plan()))
    assert np.allclose(sums["gram"], Z.T @ Z, atol=1e-4) and np.allclose(
        sums["moment"], Z.T @ np.eye(4)[Y], atol=1e-4
    )
    z = np.array([[1, 0], [3, 0], [0, 2], [0, 2]], np.float32)
    example = heads.training_set(z, np.array([0, 0, 1, 1]), 2, False, "", 0, False, HeadPlan(), {})
    spread = head_updates.HEAD_UPDATES["spread"]("spread", example, fitted(plan()))
    assert (
        spread["H"].tolist() == [[1, 0], [0, 1]] and float(spread["V"]) == 0.625
    )  # docs/methods-formulas.md, "Numbers that tests check"


def test_only_what_the_plan_names_is_found_and_nothing_else_may_leave() -> None:
    asked = plan(uploads={"prototypes": "class_means"})
    assert head_updates.compute(training_set(asked), fitted(plan())).keys() == {"prototypes"}
    assert not head_updates.compute(training_set(plan()), fitted(plan()))
    with pytest.raises(ArtefactError, match="'head', the release requests prototypes; nothing was sent"):
        head_updates.require_allowed({"head": 0, "prototypes": 0}, asked.uploads)


def test_an_extra_of_another_size_is_refused() -> None:
    for wrong in ({"weight": WEIGHT[:3], "bias": BIAS[:3]}, {"weight": WEIGHT.T}, {}, {"bias": BIAS}):
        with pytest.raises(ArtefactError, match="extra 'head'"):
            fitted(plan(way="tuned"), {"head": wrong})


def test_a_descent_that_diverges_is_an_error_and_not_a_head() -> None:
    with pytest.raises(RunError, match="NaN"):
        descent.descend(
            descent.Weights(WEIGHT, BIAS), training_set(plan(epochs=50, lr=1e8, weight_decay=1e8))
        )


def test_an_ensemble_is_stored_as_in_earlier_releases() -> None:
    """Devices keep their heads: the file holds the MLP's arrays and the classifier's side by side, under these names."""
    found = fitted(plan(way="ensemble"))
    mlp = ["hidden_weights", "hidden_bias", "weights", "bias", "mean", "std"]
    assert list(found.to_arrays()) == [*mlp, "theirs", "theirs_bias"]
    stored = {"mean": np.zeros(Z.shape[1], np.float32), "theirs": np.zeros_like(WEIGHT)}
    again = heads.from_arrays({**found.to_arrays(), **stored}, found.describe())
    assert isinstance(again, heads.Ensemble) and again.mlp.mean is stored["mean"]
    assert again.theirs is stored["theirs"] and again.mlp.extractor == found.extractor


@pytest.mark.parametrize("way", ["tuned", "mixed", "ridge", "gated", "ensemble"])
def test_a_method_s_head_survives_the_disk_and_the_order_of_samples(way: str) -> None:
    found = fitted(plan(way=way, batch_size=4, epochs=2))
    again = heads.from_arrays(found.to_arrays(), found.describe())
    order = RNG.permutation(12)
    other = heads.fit(
        "logistic",
        Z[order],
        Y[order],
        4,
        unit_norm=False,
        plan=plan(way=way, batch_size=4, epochs=2),
        extras=EXTRAS,
    )
    assert np.array_equal(again.logits(Z), found.logits(Z)) and np.array_equal(
        other.logits(Z), found.logits(Z)
    )
