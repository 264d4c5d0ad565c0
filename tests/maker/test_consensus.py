"""A state is reported once k of the last n predictions agree on it, and stays until another one wins."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_fl.errors import InputError
from edge_fl_maker.consensus import Consensus

VOTES = st.lists(st.sampled_from(["a", "b", "c", None]), max_size=60)


def states(given: str, votes: list[str | None], for_s: float = 0.0, every_s: float = 1.0) -> list[str | None]:
    consensus, found = Consensus(given, for_s), []
    for number, vote in enumerate(votes):
        before = consensus.state
        assert consensus.add(vote, number * every_s) == (consensus.state != before)
        found.append(consensus.state)
    changes = [new for old, new in pairwise(found) if old not in (new, None)]
    assert consensus.flips == len(changes)
    return found


@given(VOTES, st.integers(1, 6), st.integers(0, 4))
def test_a_state_has_k_votes_of_the_last_n_and_never_changes_within_k_predictions(
    votes: list[str | None], least: int, more: int
) -> None:
    found = states(f"{least}/{least + more}", votes)
    changes = [place for place, state in enumerate(found) if state != (found[place - 1] if place else None)]
    for place in changes:
        assert votes[max(0, place + 1 - least - more) : place + 1].count(found[place]) >= least
        assert found[place] is not None
    assert all(later - earlier >= least for earlier, later in pairwise(changes))


@given(VOTES, st.integers(1, 6))
def test_unanimous_predictions_are_reported_after_k_of_them_whatever_came_before(
    votes: list[str | None], least: int
) -> None:
    found = states(f"{least}/{least + 2}", [*votes, *["d"] * 2 * (least + 2)])
    assert found[-1] == "d"
    assert states(f"{least}/{least + 2}", ["d"] * least)[-2:] == [None, "d"][-least:]


def test_unsure_predictions_count_for_none_and_a_tie_for_nobody() -> None:
    assert states("2/4", ["a", None, None, "a"]) == [None, None, None, "a"]
    assert states("2/4", ["a", None, None, None, "a"])[-1] is None
    assert states("2/5", ["a", "b", None, "b", "a"])[-2:] == ["b", "b"]
    assert states("2/5", ["c", "c", "a", "b", "a", "b", "b"]) == [None, "c", "c", "c", "a", "a", "b"]


def test_a_winner_must_hold_for_as_long_as_asked_without_a_break() -> None:
    assert states("2/3", ["a"] * 5, for_s=2.0) == [None, None, None, "a", "a"]
    assert states("2/2", ["a", "a", "a", None, "a", "a", "a", "a"], for_s=2.0)[-3:] == [None, None, "a"]


@pytest.mark.parametrize("given", ["", "3", "0/5", "4/3", "3/5/7", "a/b", "3/ 5", "１/２"])
def test_another_form_is_named(given: str) -> None:
    with pytest.raises(InputError, match="expected K/N"):
        Consensus(given)
