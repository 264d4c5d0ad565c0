"""A released change is clipped and noisy; its epsilon is the library's."""

import subprocess
import sys

import pytest
import torch
from opacus.accountants.analysis import gdp, rdp

from edge_fl.config import PrivacyConfig
from edge_fl.learn.codec import differential_privacy
from edge_fl.learn.random import key_of

ALMOST_SILENT = PrivacyConfig(noise_multiplier=1e-9, clip=2.0)


def test_a_long_change_is_clipped_over_all_its_tensors_and_a_short_one_stays() -> None:
    long = {"a": {"w": torch.tensor([3.0, 0.0])}, "b": {"w": torch.tensor([[4.0]])}}
    found = differential_privacy.released(long, ALMOST_SILENT, differential_privacy.seeded(key_of(1)))
    assert found["a"]["w"].tolist() == pytest.approx([1.2, 0.0], abs=1e-6)
    assert found["b"]["w"].item() == pytest.approx(1.6)
    short = {"a": {"w": torch.tensor([0.3, 0.4])}}
    found = differential_privacy.released(short, ALMOST_SILENT, differential_privacy.seeded(key_of(1)))
    assert found["a"]["w"].tolist() == pytest.approx([0.3, 0.4], abs=1e-6)
    nothing = {"a": {"w": torch.zeros(3)}}
    assert (
        differential_privacy.released(nothing, ALMOST_SILENT, differential_privacy.secret)["a"]["w"]
        .abs()
        .max()
        < 1e-7
    )


@pytest.mark.parametrize(
    "noise", [differential_privacy.seeded(key_of(3)), differential_privacy.secret], ids=["seeded", "secret"]
)
def test_noise_is_gaussian_of_multiplier_times_clip_and_new_in_every_tensor(
    noise: differential_privacy.Noise,
) -> None:
    zeros = {"a": {"v": torch.zeros(200, 100), "w": torch.zeros(200, 100)}}
    found = differential_privacy.released(zeros, PrivacyConfig(noise_multiplier=1.5, clip=2.0), noise)["a"]
    for drawn in found.values():
        assert drawn.mean().item() == pytest.approx(0.0, abs=0.1)
        assert drawn.std().item() == pytest.approx(3.0, rel=0.03)
        assert (drawn.abs() < 3.0).float().mean().item() == pytest.approx(0.683, abs=0.02)
    assert not torch.equal(found["v"], found["w"])


def test_seeded_noise_comes_again_and_secret_noise_does_not() -> None:
    assert torch.equal(differential_privacy.seeded(key_of(3))(5), differential_privacy.seeded(key_of(3))(5))
    assert not torch.equal(differential_privacy.secret(5), differential_privacy.secret(5))


@pytest.mark.parametrize("multiplier", [1.0, 4.0, 20.0])
@pytest.mark.parametrize("updates", [1, 30])
def test_epsilon_is_the_library_s(multiplier: float, updates: int) -> None:
    spent = updates * differential_privacy.cost(PrivacyConfig(noise_multiplier=multiplier))
    found = differential_privacy.epsilon(spent, 1e-5)
    half = multiplier / 2  # two clipped changes are up to two clips apart, and the library reckons with one
    assert found == pytest.approx(gdp.eps_from_mu(mu=updates**0.5 / half, delta=1e-5))
    orders = [1 + n / 10 for n in range(1, 1000)]
    renyi = rdp.compute_rdp(q=1.0, noise_multiplier=half, steps=updates, orders=orders)
    bound, _ = rdp.get_privacy_spent(orders=orders, rdp=renyi, delta=1e-5)
    assert found <= bound <= found * 1.35  # another accountant's, which is never below the exact one


def test_the_library_does_not_change_the_log_handlers() -> None:
    reported = (
        "import logging; from edge_fl.learn.codec import differential_privacy as privacy; privacy.epsilon(1.0, 1e-5);"
        " logging.getLogger('devices').warning('sim-1: late')"
    )
    done = subprocess.run([sys.executable, "-c", reported], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "sim-1: late"


def test_epsilon_beyond_the_library_is_a_bound_and_without_updates_zero() -> None:
    assert differential_privacy.epsilon(0.0, 1e-5) == differential_privacy.epsilon(1e-16, 1e-5) == 0.0
    below, above = (differential_privacy.epsilon(mu**2, 1e-5) for mu in (27.0, 28.0))
    assert below < 500 < above < 600
    assert differential_privacy.epsilon(1e6, 1e-5) > above
    near = [
        differential_privacy.epsilon((27.6 + step / 100) ** 2, 1e-5) for step in range(21)
    ]  # across the library's end
    assert near == sorted(near) and 497 < near[0] < 500 < near[-1] < 521
