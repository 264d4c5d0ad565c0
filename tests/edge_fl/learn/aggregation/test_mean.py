"""Weighted means that are exact for equal updates, means per class, and the moving average."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import (
    Mean,
    PrototypeMean,
    Update,
    lerp,
    no_prototypes,
    only_owned,
    prototypes,
    weighted_mean,
    with_absent,
)
from edge_fl.learn.batches import Batches
from edge_fl.learn.tree import Params


def drawn(seed: int) -> Params:
    return {
        "weight": torch.randn(50, generator=torch.Generator().manual_seed(seed)),
        "buffer:steps": torch.tensor(seed),
    }


def test_a_mean_is_weighted_by_samples_or_equally() -> None:
    updates = [
        Update("a", 3, {"f": {"w": torch.tensor([1.0])}}),
        Update("b", 1, {"f": {"w": torch.tensor([5.0])}}),
    ]
    assert weighted_mean({}, updates)["f"]["w"] == 2.0
    assert weighted_mean({}, updates, uniform=True)["f"]["w"] == 3.0


@given(st.integers(0, 1000), st.lists(st.integers(1, 10_000), min_size=1, max_size=30))
def test_equal_uploads_have_exactly_their_value_as_mean(seed: int, samples: list[int]) -> None:
    params = drawn(seed)
    mean = Mean()
    for weight in samples:
        mean.add(params, weight)
    value = mean.value()
    assert value is not None
    assert tree.same(value, params)


def test_a_part_that_an_update_lacks_is_averaged_over_the_others_only() -> None:
    both = Update("a", 1, {"f": {"w": torch.tensor([2.0])}, "h": {"w": torch.tensor([2.0])}})
    averaged = weighted_mean({"g": {}}, [both, Update("b", 99, {"h": {"w": torch.tensor([4.0])}})])
    assert averaged["f"]["w"] == 2.0
    assert averaged["h"]["w"] == pytest.approx(3.98)
    assert "g" in averaged


def test_integer_buffers_take_their_maximum() -> None:
    updates = [Update(str(i), 1, {"f": drawn(i)}) for i in (3, 9, 4)]
    assert weighted_mean({}, updates)["f"]["buffer:steps"] == 9


def test_a_moving_average_of_a_hundred_rounds_has_the_number_of_section_7() -> None:
    value = {"w": torch.tensor([1.0], dtype=torch.float64)}
    for _ in range(100):
        value = lerp(value, {"w": torch.zeros(1, dtype=torch.float64)}, 0.99)
    assert value["w"] == pytest.approx(0.366032, abs=5e-7)


def test_a_moving_average_that_keeps_everything_or_nothing_is_exact() -> None:
    old, new = drawn(1), drawn(2)
    for everything, nothing in ((1.0, 0.0), (torch.tensor(1.0), torch.tensor(0.0))):
        assert torch.equal(lerp(old, new, everything)["weight"], old["weight"])
        assert torch.equal(lerp(old, new, nothing)["weight"], new["weight"])


def test_class_means_of_features() -> None:
    z = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    found = prototypes(Batches.of(z, [0, 0, 2, 2], classes=4))
    assert found["mean"].tolist() == [[2.0, 0.0], [0.0, 0.0], [0.0, 2.0], [0.0, 0.0]]
    assert found["count"].tolist() == [2.0, 0.0, 2.0, 0.0]


def owners() -> list[Params]:
    """Three samples at (1, 0) and one at (0, 1) of class 0; none of class 1."""
    absent = torch.zeros(2)
    return [
        {"mean": torch.stack([torch.tensor(mean), absent]), "count": torch.tensor([count, 0.0])}
        for mean, count in (([1.0, 0.0], 3.0), ([0.0, 1.0], 1.0))
    ]


@pytest.mark.parametrize(("by_count", "expected"), [(True, [0.75, 0.25]), (False, [0.5, 0.5])])
def test_prototypes_are_weighted_by_count_or_equally_over_owners(
    by_count: bool, expected: list[float]
) -> None:
    mean = PrototypeMean(by_count=by_count)
    for owner in owners():
        mean.add(owner)
    old = {"mean": torch.tensor([[9.0, 9.0], [7.0, 7.0]]), "count": torch.tensor([1.0, 2.0])}
    value = mean.value(old)
    assert value["mean"][0].tolist() == expected
    assert value["mean"][1].tolist() == [7.0, 7.0]  # not reported: the last value stays (docs/methods.md G15)
    assert value["count"][1] == 2.0


def test_a_class_that_was_never_reported_is_absent() -> None:
    mean = PrototypeMean()
    mean.add(owners()[0])
    nothing = {"mean": torch.zeros(2, 2), "count": torch.zeros(2)}
    assert mean.value(nothing)["count"].tolist() == [3.0, 0.0]
    assert PrototypeMean().value(nothing) is nothing


def test_prototypes_are_sent_without_absent_classes_and_restored() -> None:
    whole = {
        "mean": torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]),
        "count": torch.tensor([2.0, 0.0, 1.0]),
    }
    travelling = only_owned(whole)
    assert travelling["mean"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert tree.same(with_absent(travelling), whole)
    assert tree.same(with_absent(whole), whole)
    means = [PrototypeMean(), PrototypeMean()]
    for mean, sent in zip(means, (whole, travelling), strict=True):
        mean.add(sent)
    assert tree.same(*(mean.value(no_prototypes(3, 2)) for mean in means))


def test_the_part_prototypes_is_averaged_class_by_class() -> None:
    updates = [Update(str(i), 7, {"prototypes": owner}) for i, owner in enumerate(owners())]
    shared = {"prototypes": no_prototypes(2, 2)}
    assert weighted_mean(shared, updates)["prototypes"]["mean"][0].tolist() == [0.75, 0.25]
    assert weighted_mean(shared, updates, by_count=False)["prototypes"]["mean"][0].tolist() == [0.5, 0.5]
    assert weighted_mean(shared, [])["prototypes"]["count"].tolist() == [0.0, 0.0]
