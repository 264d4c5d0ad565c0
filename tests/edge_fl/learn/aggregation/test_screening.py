"""Screening of updates: oversized changes are scaled down, outliers are dropped by name, all others pass unchanged."""

import math

import pytest
import torch

from edge_fl.learn.aggregation import screening
from edge_fl.learn.aggregation.directions import MIN_DIRECTIONS
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.aggregation.screening import DROPPED, SKETCH, Screen, sketch, with_bounded_weight
from edge_fl.learn.tree import Parts

SIZE = 3 * SKETCH + 5
SHARED = {"extractor": {"w": torch.ones(SIZE), "n": torch.tensor(0), "buffer:mean": torch.zeros(2)}}


def screen(max_norm: float = 3.0) -> Screen:
    return Screen(max_norm, ["extractor"])


def changes(update: Update, shared: Parts) -> torch.Tensor:
    found = screening.changes(update, shared, ["extractor"])
    assert found is not None
    return found


def noise(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


COMMON = noise(99)


def update(client: str, change: torch.Tensor, **others: torch.Tensor) -> Update:
    params = {
        "w": SHARED["extractor"]["w"] + change,
        "n": torch.tensor(7),
        "buffer:mean": torch.full((2,), 9.0),
    }
    return Update(client, 10, {"extractor": {**params, **others}})


def cohort(clients: int, round: int = 0, size: float = 0.01) -> list[Update]:
    """Changes with a common direction and noise of twice its length: pairwise cosines of about 0.2."""
    return [update(f"c{i:02d}", size * (COMMON + 2 * noise(1000 * round + i))) for i in range(clients)]


@pytest.mark.parametrize("clients", [1, 3, MIN_DIRECTIONS - 1, MIN_DIRECTIONS, 20])
def test_updates_of_similar_size_pass_unchanged(clients: int) -> None:
    screening_ = screen()
    for round in range(4):
        sent = cohort(clients, round)
        assert [kept is given for kept, given in zip(screening_.round(sent, SHARED), sent, strict=True)] == [
            True
        ] * clients
        assert not screening_.outliers
        assert set(screening_.scores.values()) == {0.0}


@pytest.mark.parametrize("position", [0, 5, 12])
def test_an_oversized_change_is_scaled_down_to_the_limit(position: int) -> None:
    sent = cohort(13)
    sent[position] = update("big", 5 * changes(sent[position], SHARED))
    screening_ = screen()
    kept = {one.client: one for one in screening_.round(sent, SHARED)}
    typical = float(changes(sent[position - 1], SHARED).norm())
    assert float(changes(kept["big"], SHARED).norm()) == pytest.approx(3 * typical, rel=0.05)
    assert kept["big"].parts["extractor"]["n"] == 7, "integers and buffers stay"
    assert kept["big"].parts["extractor"]["buffer:mean"].tolist() == [9.0, 9.0]
    assert 0.2 < screening_.scores["big"] < DROPPED
    assert not screening_.outliers


@pytest.mark.parametrize("factor", [-900.0, 1e30, math.nan, math.inf])
@pytest.mark.parametrize("clients", [3, 20])
def test_an_implausible_change_is_dropped_by_name(factor: float, clients: int) -> None:
    sent = cohort(clients)
    sent[1] = update("liar", factor * torch.ones(SIZE))
    screening_ = screen()
    assert [one.client for one in screening_.round(sent, SHARED)] == [
        one.client for one in sent if one.client != "liar"
    ]
    assert list(screening_.outliers) == ["liar"]
    assert screening_.outliers["liar"].startswith("extractor/w deviates")
    assert screening_.scores["liar"] > 1


@pytest.mark.parametrize(("clients", "limited"), [(2, False), (3, True)])
def test_sizes_are_compared_from_three_updates_on(clients: int, limited: bool) -> None:
    sent = [*cohort(clients - 1), update("big", 0.04 * COMMON)]
    kept = list(screen(1.2).round(sent, SHARED))
    assert kept[:-1] == sent[:-1] and (kept[-1] is not sent[-1]) == limited


def test_a_flipped_sign_is_dropped_until_some_rounds_after_it_ends() -> None:
    screening_ = screen()
    dropped = []
    for round in range(16):
        sent = cohort(10, round)
        if round < 8:
            sent[4] = update("c04", -changes(sent[4], SHARED))
        kept = [one.client for one in screening_.round(sent, SHARED)]
        dropped.append("c04" not in kept)
        assert len(kept) == 10 - dropped[-1], "the others stay"
    assert dropped[:8] == [True] * 8
    assert screening_.scores["c04"] == 0
    assert not dropped[-1]


@pytest.mark.parametrize(("clients", "dropped"), [(7, []), (8, ["c04"])])
def test_directions_are_compared_from_eight_updates_on(clients: int, dropped: list[str]) -> None:
    screening_, sent = screen(), cohort(clients)
    sent[4] = update("c04", -changes(sent[4], SHARED))
    list(screening_.round(sent, SHARED))
    assert list(screening_.dropped) == dropped


def test_conflicting_groups_of_clients_are_not_outliers() -> None:
    """Two groups that pull in opposite directions, as clients with different classes do."""
    screening_ = screen()
    for round in range(6):
        sent = cohort(12, round)
        sent = [update(one.client, (-1) ** i * changes(one, SHARED)) for i, one in enumerate(sent)]
        assert len(list(screening_.round(sent, SHARED))) == 12


def test_updates_without_comparable_parts_pass() -> None:
    means = Update("head", 5, {"prototypes": {"mean": torch.full((2, 3), math.nan), "count": torch.ones(2)}})
    other = Update("odd", 5, {"extractor": {"w": torch.ones(3)}})
    sent = [*cohort(5), means, other]
    assert list(screen().round(sent, SHARED)) == sent


@pytest.mark.parametrize(
    ("first", "second"), [(COMMON, COMMON + noise(1)), (1 + noise(1), 1 + noise(2))], ids=["noise", "offset"]
)
def test_a_sketch_preserves_cosines(first: torch.Tensor, second: torch.Tensor) -> None:
    expected = float(torch.nn.functional.cosine_similarity(first, second, dim=0))
    found = float(torch.nn.functional.cosine_similarity(sketch(first), sketch(second), dim=0))
    assert found == pytest.approx(expected, abs=0.05)
    assert torch.equal(sketch(first[:10])[:10], first[:10])


def test_a_weight_that_an_update_states_counts_as_at_most_a_multiple_of_the_median() -> None:
    stated = {"a": 1.0, "b": 2.0, "c": 1e9, "d": 3.0}
    sent = [Update(id, 5, {"fisher": {"trace": torch.tensor(w)}}) for id, w in stated.items()]
    sent.append(Update("head", 5, {}))
    found = list(with_bounded_weight(sent, ("fisher", "trace"), 3.0))
    assert [kept is given for kept, given in zip(found, sent, strict=True)] == [True, True, False, True, True]
    assert float(found[2].parts["fisher"]["trace"]) == 3.0 * 2.5
    assert float(sent[2].parts["fisher"]["trace"]) == 1e9
