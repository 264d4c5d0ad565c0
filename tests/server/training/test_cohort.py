"""Cohorts: how many clients a round selects, and which."""

import pytest

from edge_fl_server.recipes.recipe import CohortConfig
from edge_fl_server.training import cohorts

CLIENTS = [f"c{i:02d}" for i in range(20)]


def sizes(clients: int, **settings: float) -> set[int]:
    return {cohorts.goal(clients, CohortConfig(**settings), 1, round) for round in range(200)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("clients", "participation", "size"), [(20, 1.0, 20), (20, 0.25, 5), (10, 0.29, 2), (3, 0.1, 1)]
)
def test_a_share_of_the_clients_is_rounded_down_but_never_to_none(
    clients: int, participation: float, size: int
) -> None:
    assert sizes(clients, participation=participation) == {size}


@pytest.mark.parametrize(
    ("clients", "least", "most", "expected"),
    [(20, 0.1, 0.4, {2, 3, 4, 5, 6, 7, 8}), (10, 0.05, 0.3, {1, 2, 3}), (2, 0.1, 0.4, {1})],
)
def test_rounds_draw_their_size_between_both_shares(
    clients: int, least: float, most: float, expected: set[int]
) -> None:
    assert sizes(clients, participation_from=least, participation=most) == expected


def test_a_cohort_is_drawn_in_ascending_order_and_changes_from_round_to_round() -> None:
    half = CohortConfig(participation=0.5)
    drawn = [cohorts.draw(CLIENTS, half, 1, round) for round in range(30)]
    assert all(len(set(one)) == 10 and one == sorted(one) for one in drawn)
    assert drawn[0] == cohorts.draw(CLIENTS, half, 1, 0) != cohorts.draw(CLIENTS, half, 2, 0)
    assert {client for one in drawn for client in one} == set(CLIENTS) and drawn[0] != drawn[1]


def test_more_clients_are_drawn_where_some_may_drop_out() -> None:
    settings = CohortConfig(participation=0.5, over_select=1.25)
    assert len(cohorts.draw(CLIENTS, settings, 1, 1)) == 10
    assert len(cohorts.draw(CLIENTS, settings, 1, 1, may_drop_out=True)) == 13
    assert cohorts.draw(CLIENTS, CohortConfig(over_select=2.0), 1, 1, may_drop_out=True) == CLIENTS


@pytest.mark.parametrize(("working", "drawn"), [(0, 10), (3, 7), (10, 0), (15, 0)])
def test_clients_at_work_count_and_are_not_drawn_again(working: int, drawn: int) -> None:
    found = cohorts.draw(CLIENTS, CohortConfig(participation=0.5), 1, 1, at_work=CLIENTS[:working])
    assert len(found) == drawn and not set(found) & set(CLIENTS[:working])


@pytest.mark.parametrize(("goal", "share", "least"), [(10, 0.5, 5), (5, 0.5, 3), (10, 0.3, 3), (1, 0.01, 1)])
def test_the_quorum_is_rounded_up(goal: int, share: float, least: int) -> None:
    assert cohorts.quorum(goal, CohortConfig(quorum=share)) == least
