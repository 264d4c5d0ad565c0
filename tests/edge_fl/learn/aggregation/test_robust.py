"""Robust aggregation: one client cannot move the result far; cohorts without outliers lose little."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_fl.learn.aggregation.mean import Update, weighted_mean
from edge_fl.learn.aggregation.robust import (
    CENTRES,
    Robust,
    clip,
    geometric_median,
    median,
    robust,
    trimmed_mean,
)

SHARED = {"extractor": {"w": torch.zeros(2), "n": torch.tensor(0)}}


def update(client, *values, samples=10, n=1):
    return Update(
        client, samples, {"extractor": {"w": torch.tensor(values, dtype=torch.float32), "n": torch.tensor(n)}}
    )


def aggregated(updates, how):
    return weighted_mean(SHARED, robust(updates, SHARED, how))["extractor"]


def test_the_median_is_numpy_s_for_odd_and_even_cohorts():
    for clients in (1, 2, 5, 6):
        values = torch.randn(clients, 3, generator=torch.Generator().manual_seed(clients)).double()
        assert torch.equal(median(values), values.quantile(0.5, dim=0))


def test_the_trimmed_mean_leaves_out_the_same_share_at_both_ends():
    values = torch.tensor([[-100.0], [1.0], [2.0], [3.0], [100.0]])
    assert trimmed_mean(values, 0.2).item() == 2.0
    assert trimmed_mean(values, 0.1).item() == 2.0  # at least one value per end
    assert trimmed_mean(values[:2], 0.49).item() == pytest.approx(-49.5)  # too few to leave one out
    assert trimmed_mean(values[:3], 0.4).item() == 1.0


def test_the_geometric_median_has_the_smallest_sum_of_distances():
    points = torch.randn(7, 2, 2, generator=torch.Generator().manual_seed(0)).double()
    points[0] *= 100
    found = geometric_median(points)

    def distances(centre):
        return (points - centre).flatten(1).norm(dim=1).sum()

    for step in torch.randn(50, 2, 2, generator=torch.Generator().manual_seed(1)).double():
        assert distances(found) <= distances(found + 0.05 * step) + 1e-6
    same = torch.ones(4, 3).double()
    assert torch.allclose(geometric_median(same), same[0])


@pytest.mark.parametrize("centre", CENTRES)
def test_one_liar_in_five_does_not_move_the_centre_out_of_the_honest_range(centre):
    honest = [update(f"c{i}", 1.0 + i / 10, -1.0, n=i) for i in range(4)]
    found = aggregated([*honest, update("liar", 1e30, -1e30, samples=10**6)], Robust(centre, trim=0.2))
    assert 1.0 <= found["w"][0] <= 1.3
    assert found["w"][1] == pytest.approx(-1.0)
    assert aggregated([*honest, update("liar", 1e30, -1e30)], Robust())["w"][0] > 1e28


def test_clipping_bounds_what_one_client_moves():
    (found,) = [clip(update("liar", 3e10, 4e10), SHARED, 5.0).parts["extractor"]]
    assert found["w"].tolist() == pytest.approx([3.0, 4.0])
    assert found["n"] == 1
    far = {"extractor": {"w": torch.full((2,), 100.0), "n": torch.tensor(0)}}
    near = update("honest", 100.5, 100.0)
    assert clip(near, far, 5.0).parts["extractor"] is near.parts["extractor"]


@pytest.mark.parametrize("centre", CENTRES)
def test_the_centre_of_one_update_is_that_update(centre):
    alone = update("c0", 1.5, -2.0)
    (found,) = robust([alone], SHARED, Robust(centre))
    assert found.parts["extractor"]["w"].tolist() == [1.5, -2.0]


def test_without_a_choice_nothing_is_touched():
    updates = [update("a", 1.0, 2.0), update("b", 3.0, 4.0)]
    assert list(robust(updates, SHARED, Robust())) == updates


def test_class_means_stay_each_client_s_own():
    means = [
        Update("a", 1, {"prototypes": {"mean": torch.ones(1, 2), "count": torch.tensor([3.0, 0.0])}}),
        Update("b", 1, {"prototypes": {"mean": torch.zeros(2, 2), "count": torch.tensor([3.0, 3.0])}}),
    ]
    found = list(robust(means, {}, Robust("median")))
    assert [one.parts["prototypes"]["mean"].shape[0] for one in found] == [1, 2]
    assert found[0].parts["prototypes"]["mean"].eq(1).all()


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=9), st.floats(0, 0.49))
def test_every_centre_lies_between_the_smallest_and_the_largest(values, trim):
    stacked = torch.tensor(values, dtype=torch.float64)[:, None]
    for found in (median(stacked), trimmed_mean(stacked, trim), geometric_median(stacked)):
        assert min(values) - 1e-6 <= found.item() <= max(values) + 1e-6


def test_an_unknown_centre_is_never_the_mean():
    with pytest.raises(KeyError, match="geometrik"):
        robust([update("c0", 1.5, -2.0)], SHARED, Robust("geometrik"))
