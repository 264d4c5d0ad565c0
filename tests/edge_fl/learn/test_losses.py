"""Every loss against the numbers of docs/methods-formulas.md, "Numbers that tests check", and against padding, which must not count."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from edge_fl.learn import losses

Z = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
A, B = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 1])
G = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])


def close(value: Tensor, expected: object, tolerance: float = 1e-6) -> bool:
    return torch.allclose(value, torch.as_tensor(expected, dtype=value.dtype), rtol=1e-5, atol=tolerance)


def known(mean: Tensor) -> dict[str, Tensor]:
    """Prototypes of which none is absent; one sample each."""
    return {"mean": mean, "count": torch.ones(len(mean))}


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(
    ("labels", "temperature", "out", "inside"),
    [(A, 0.5, 0.886078, 0.886078), (B, 0.5, 0.695520, 0.767108), (B, 0.1, 2.032519, 0.693259)],
)
def test_supcon_has_the_numbers_of_section_7(
    labels: Tensor, temperature: float, out: float, inside: float
) -> None:
    assert close(losses.supcon(Z, labels, temperature), out)
    assert close(losses.supcon_in(Z, labels, temperature), inside)


def test_supcon_in_is_never_above_out_and_equal_with_one_positive_each() -> None:
    u = losses.unit(seeded(12, 5))
    for labels in (torch.arange(12) % 2, torch.arange(12) % 3):
        assert losses.supcon_in(u, labels, 0.2) <= losses.supcon(u, labels, 0.2)
    pairs = torch.arange(12) % 6
    assert close(losses.supcon_in(u, pairs, 0.2), losses.supcon(u, pairs, 0.2), 1e-5)


def test_supcon_of_a_batch_without_positives_is_zero_and_has_no_gradient() -> None:
    u = losses.unit(seeded(3, 4)).requires_grad_()
    for contrast in (losses.supcon, losses.supcon_in):
        value = contrast(u, torch.arange(3), 0.1)
        assert value == 0
        assert torch.autograd.grad(value, u)[0].abs().max() == 0


def test_prototype_contrast_has_the_numbers_of_section_7() -> None:
    def loss(feature: list[float], label: int, temperature: float) -> Tensor:
        return losses.prototype_contrast(
            torch.tensor([feature]), torch.tensor([label]), known(G), temperature
        )

    for label, expected in enumerate((4.5418e-5, 10.000046, 20.000046)):
        assert close(loss([1.0, 0.0], label, 0.1), expected)
    for label, (expected, weight) in enumerate(
        ((2.126929, 0.182402), (0.126929, 0.903442), (14.126929, 1.2354e-5))
    ):
        assert close(loss([0.6, 0.8], label, 0.1), expected)
        assert close(torch.exp(-0.8 * loss([0.6, 0.8], label, 0.1)), weight)
    for label, (expected, weight) in enumerate(
        ((0.142932, 0.891950), (2.142932, 0.180082), (4.142932, 0.036358))
    ):
        assert close(loss([1.0, 0.0], label, 0.5), expected)
        assert close(torch.exp(-0.8 * loss([1.0, 0.0], label, 0.5)), weight)


def test_prototype_contrast_of_uniform_similarities_is_ln_c() -> None:
    value = losses.prototype_contrast(torch.ones(2, 3), torch.tensor([0, 7]), known(torch.ones(10, 3)), 0.1)
    assert close(value, 2.302585)
    assert close(torch.exp(-0.8 * value), 0.158489)


def test_absent_prototypes_are_neither_targets_nor_negatives() -> None:
    some = torch.tensor([1.0, 1.0, 0.0])
    both = losses.prototype_contrast(Z[:2], torch.tensor([0, 2]), {"mean": G, "count": some}, 1.0)
    only = losses.prototype_contrast(Z[:1], torch.tensor([0]), known(G[:2]), 1.0)
    assert close(both, only)
    assert losses.prototype_contrast(Z, B, {"mean": G, "count": torch.zeros(3)}, 0.1) == 0


def test_prototypes_receive_no_gradient() -> None:
    features, prototypes = Z.clone().requires_grad_(), G.clone().requires_grad_()
    value = losses.prototype_contrast(features, A, known(prototypes), 0.5)
    gradients = torch.autograd.grad(value, [features, prototypes], allow_unused=True)
    assert gradients[0].abs().max() > 0
    assert gradients[1] is None


def test_kl_has_the_numbers_of_section_7() -> None:
    student, teacher = torch.zeros(1, 2, requires_grad=True), torch.tensor([[2.0, 0.0]])
    value = losses.kl(student, teacher)
    assert close(value, 0.327813)
    assert close(losses.kl(teacher, student), 0.433781)
    assert close(torch.autograd.grad(value, student)[0], [[-0.380797, 0.380797]])


def test_kl_of_equal_logits_and_its_gradient_are_zero() -> None:
    student = seeded(4, 3).requires_grad_()
    value = losses.kl(student, student.detach())
    assert close(value, 0.0)
    assert close(torch.autograd.grad(value, student)[0], torch.zeros(4, 3), 1e-7)


@pytest.mark.parametrize(("label", "expected"), [(1, 1.386294), (0, 0.287682)])
def test_balanced_softmax_has_the_numbers_of_section_7(label: int, expected: float) -> None:
    counts = torch.tensor([3.0, 1.0])
    assert close(losses.balanced_cross_entropy(torch.zeros(1, 2), torch.tensor([label]), counts), expected)


def test_balanced_softmax_of_uniform_counts_is_cross_entropy() -> None:
    logits, y = seeded(5, 3), torch.tensor([0, 1, 2, 0, 1])
    balanced = losses.balanced_cross_entropy(logits, y, torch.full((3,), 7.0))
    assert close(balanced, losses.cross_entropy(logits, y))


def test_a_class_without_samples_gets_probability_zero_and_no_gradient() -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    y, counts = torch.tensor([0, 1]), torch.tensor([3.0, 1.0, 0.0])
    value = losses.balanced_cross_entropy(logits, y, counts)
    gradient = torch.autograd.grad(value, logits)[0]
    assert value.isfinite()
    assert (gradient[:, 2] == 0).all()
    assert gradient.isfinite().all()


def test_a_padded_row_of_a_class_without_samples_does_not_spoil_balanced_softmax() -> None:
    logits = torch.zeros(2, 2, requires_grad=True)
    y, counts, mask = torch.tensor([1, 0]), torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.0])
    value = losses.balanced_cross_entropy(logits, y, counts, mask)
    assert value == 0
    assert torch.autograd.grad(value, logits)[0].isfinite().all()


def test_vclub_of_two_matched_points_is_a_quarter() -> None:
    y = torch.tensor([[0.0], [1.0]])
    assert losses.vclub(y, y, torch.zeros(2, 1)) == 0.25


def test_vclub_of_a_constant_mean_is_zero() -> None:
    y = seeded(16, 3, dtype=torch.float64)
    assert losses.vclub(y, torch.full_like(y, 0.3), torch.full_like(y, -0.2)).abs() < 1e-6


def correlated(rho: float, dim: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """x and y [B, d] of unit variance and correlation rho in every dimension."""
    x, noise = seeded(2, size, dim, seed=seed, dtype=torch.float64)
    return x, rho * x + math.sqrt(1 - rho**2) * noise


def test_vclub_with_the_exact_density_has_its_closed_form() -> None:
    rho, dim, size = 0.6, 4, 512
    estimates = []
    for seed in range(20):
        x, y = correlated(rho, dim, size, seed)
        estimates.append(losses.vclub(y, rho * x, torch.full_like(y, math.log(1 - rho**2))))
    expected = dim * rho**2 / (1 - rho**2) * (1 - 1 / size)
    assert math.isclose(expected, 2.2456, abs_tol=5e-5)
    assert abs(torch.stack(estimates).mean() - expected) < 0.07  # three standard errors of 0.103 / sqrt(20)


def test_vclub_of_independent_gaussians_with_the_exact_density_is_zero() -> None:
    _, y = correlated(0.0, 4, 512, 0)
    assert losses.vclub(y, torch.zeros_like(y), torch.zeros_like(y)).abs() < 1e-6


def test_gaussian_log_density_is_torchs() -> None:
    y, mean, log_variance = seeded(3, 5, 4)
    normal = torch.distributions.Normal(mean, torch.exp(0.5 * log_variance))
    assert close(losses.gaussian_log_density(y, mean, log_variance), normal.log_prob(y).sum(-1))


def test_mmd_has_the_number_of_section_7() -> None:
    zeros, ones = torch.zeros(2, 1), torch.ones(2, 1)
    assert close(losses.mmd(zeros, ones), 0.232389)
    assert losses.mmd(ones, ones) == 0


def test_proximal_counts_parameters_only_and_pulls_with_mu() -> None:
    w = {"weight": torch.tensor([2.0], requires_grad=True), "buffer:mean": torch.tensor([5.0])}
    reference = {"weight": torch.tensor([1.0]), "buffer:mean": torch.tensor([0.0])}
    value = losses.proximal(w, reference, 0.1)
    assert isinstance(value, Tensor)
    assert close(value, 0.05)
    assert close(2.0 - 0.1 * torch.autograd.grad(value, w["weight"])[0], [1.99])
    assert losses.proximal(w, reference, 0.0) == 0.0


def test_one_hot_is_torchs() -> None:
    y = torch.tensor([2, 0, 1])
    assert torch.equal(losses.one_hot(y, 4), F.one_hot(y, 4).to(torch.float32))


PADDED = {
    "cross_entropy": lambda z, y, mask: losses.cross_entropy(z, y, mask),
    "balanced": lambda z, y, mask: losses.balanced_cross_entropy(z, y, torch.tensor([1.0, 2, 3, 4]), mask),
    "kl": lambda z, y, mask: losses.kl(z, z.flip(-1), mask),
    "supcon": lambda z, y, mask: losses.supcon(losses.unit(z), y, 0.3, mask),
    "supcon_in": lambda z, y, mask: losses.supcon_in(losses.unit(z), y, 0.3, mask),
    "prototypes": lambda z, y, mask: losses.prototype_contrast(z, y, known(torch.eye(4)), 0.3, mask),
    "vclub": lambda z, y, mask: losses.vclub(z, z + 0.1, torch.tanh(z), mask),
    "mmd": lambda z, y, mask: losses.mmd(z, z.flip(-1), mask),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_does_not_count(name: str) -> None:
    loss, z, y = PADDED[name], seeded(6, 4), torch.tensor([0, 1, 1, 0, 2, 2])
    padded = torch.cat([z, torch.full((3, 4), 9.0)]), torch.cat([y, torch.tensor([0, 1, 3])])
    mask = torch.cat([torch.ones(6), torch.zeros(3)])
    assert close(loss(*padded, mask), loss(z, y, None))
    assert close(loss(z, y, torch.ones(6)), loss(z, y, None))


@pytest.mark.parametrize("name", PADDED)
def test_losses_run_under_vmap(name: str) -> None:
    loss, z, y = PADDED[name], seeded(3, 6, 4), torch.tensor([[0, 1, 1, 0, 2, 2]] * 3)
    mask = torch.tensor([[1.0] * 6, [1.0] * 5 + [0.0], [1.0] * 2 + [0.0] * 4])
    together = torch.func.vmap(loss)(z, y, mask)
    assert close(together, torch.stack([loss(*row) for row in zip(z, y, mask, strict=True)]))


def test_the_order_of_samples_does_not_matter_to_contrast() -> None:
    u, y, order = losses.unit(seeded(8, 5)), torch.arange(8) % 3, torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    for contrast in (losses.supcon, losses.supcon_in):
        assert close(contrast(u[order], y[order], 0.2), contrast(u, y, 0.2))
