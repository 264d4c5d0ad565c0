"""Random numbers from keys: uniform, independent, and bit-identical in every engine."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

from edge_fl.learn.random import dropout, fold, gumbel, key_of, normal, uniform

KEYS = torch.stack([key_of(seed) for seed in (0, 1, 2**62, 2**63 - 1)])


@pytest.mark.parametrize("draw", [uniform, normal, gumbel])
def test_under_vmap_every_client_draws_what_it_draws_alone(draw) -> None:  # type: ignore[no-untyped-def]
    together = vmap(lambda key: draw(key, 5, 3))(KEYS)
    for place, key in enumerate(KEYS):
        assert together[place].equal(draw(key, 5, 3))
        assert together[place].equal(draw(key_of(int(key)), 5, 3))


def test_folding_in_a_tensor_or_a_number_is_the_same() -> None:
    assert vmap(lambda key, n: fold(key, n))(KEYS, torch.arange(4)).equal(
        torch.stack([fold(key, n) for n, key in enumerate(KEYS)])
    )


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_any_seed_and_number_give_a_key_that_draws(seed: int, number: int) -> None:
    key = fold(key_of(seed), number)
    assert key.dtype == torch.int64
    drawn = uniform(key, 3)
    assert ((drawn >= 0) & (drawn < 1)).all()
    assert not drawn.equal(uniform(key_of(seed), 3))


def test_nothing_global_is_touched() -> None:
    state = torch.random.get_rng_state()
    normal(key_of(3), 10)
    assert torch.random.get_rng_state().equal(state)


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    """Padding a batch does not change the noise of its samples."""
    assert uniform(key_of(5), 8, 3)[:5].equal(uniform(key_of(5), 5, 3))
    assert normal(key_of(5), 8, 3)[:5].equal(normal(key_of(5), 5, 3))


def test_uniform_is_even_and_its_neighbours_are_independent() -> None:
    drawn = uniform(key_of(7), 100_000)
    counts = torch.histc(drawn, 20, 0, 1)
    chi_squared = float(((counts - 5000) ** 2 / 5000).sum())
    assert chi_squared < 43.8  # one in a thousand, 19 degrees of freedom
    other = uniform(fold(key_of(7), 0), 100_000)
    for a, b in [(drawn[:-1], drawn[1:]), (drawn, other)]:
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 4 / math.sqrt(100_000)


def test_normal_and_gumbel_have_their_moments() -> None:
    drawn = normal(key_of(11), 100_000)
    assert abs(float(drawn.mean())) < 0.02
    assert abs(float(drawn.std()) - 1) < 0.02
    assert abs(float((drawn**4).mean()) - 3) < 0.15
    drawn = gumbel(key_of(11), 100_000)
    assert abs(float(drawn.mean()) - 0.5772) < 0.02
    assert abs(float(drawn.var()) - math.pi**2 / 6) < 0.05
    assert drawn.isfinite().all()


def test_dropout_keeps_the_mean_and_draws_nothing_when_off() -> None:
    x = torch.ones(100_000)
    dropped = dropout(key_of(1), x, 0.3)
    assert abs(float((dropped == 0).float().mean()) - 0.3) < 0.01
    assert abs(float(dropped.mean()) - 1) < 0.02
    assert dropout(key_of(1), x, 0.0) is x


def test_bits_stay_what_they_are() -> None:
    """A change here changes every run that was ever recorded."""
    key = key_of(12345)
    assert [int(fold(key, n)) for n in (0, 1)] == [2454886589211414944, 3778200017661327597]
    assert uniform(key, 3).tolist() == [0.1330796480178833, 0.20481657981872559, 0.11954253911972046]
    assert normal(key, 3).tolist() == pytest.approx(
        [-0.14036114513874054, 0.07536811381578445, 0.1223294734954834]
    )
