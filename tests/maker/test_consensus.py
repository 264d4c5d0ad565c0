"""A state is reported once k of the last n predictions agree on it, and stays until another one wins; flips are counted per hour."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_fl.errors import InputError
from edge_fl_maker.consensus import HOUR_S, LEAST_S, Consensus, Flips

VOTES = st.lists(st.sampled_from(["a", "b", "c", None]), max_size=60)


def states(given: str, votes: list[str | None], for_s: float = 0.0, every_s: float = 1.0) -> list[str | None]:
    consensus, flips, found = Consensus(given, for_s), Flips(), []
    for number, vote in enumerate(votes):
        before = consensus.state
        assert consensus.add(vote, number * every_s) == (consensus.state != before)
        found.append(consensus.state)
        flips.add(consensus.state, number * every_s)
    changes = [new for old, new in pairwise(found) if old not in (new, None)]
    assert flips.count == len(changes)
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


def test_a_winner_must_have_most_predictions_for_as_long_as_asked() -> None:
    assert states("2/3", ["a"] * 5, for_s=2.0) == [None, None, None, "a", "a"]
    assert states("2/2", [*"aa", None, *"aa"], for_s=3.0) == [None] * 4 + ["a"]  # it still leads
    assert states("2/2", [*"aa", None, None, *"aaaa"], for_s=2.0) == [None] * 7 + ["a"]  # it starts anew
    assert states("2/2", [*"aab", *"bbbb"], for_s=2.0) == [None] * 5 + ["b", "b"]
    assert states("2/2", [*"aab", *"aab", *"aa"], for_s=5.0) == [None] * 7 + ["a"]


@st.composite
def flickering(draw: st.DrawFn) -> tuple[int, int, int, list[str], list[str]]:
    """K and N, for how many predictions, the true classes, and predictions of which at most N - K of any N in a row are wrong."""
    least = draw(st.integers(1, 6))
    most = draw(st.integers(least, 2 * least - 1))
    lasting = draw(st.integers(0, 12))
    stays = draw(st.lists(st.integers(most + lasting + 1, 40), min_size=1, max_size=4))
    true = [label for number, stay in enumerate(stays) for label in "abc"[number % 3] * stay]
    found: list[str] = []
    for wanted in true:
        before = range(max(0, len(found) + 1 - most), len(found))
        wrong = sum(found[number] != true[number] for number in before)
        other = draw(st.sampled_from([label for label in "abcd" if label != wanted]))
        found.append(other if wrong < most - least and draw(st.booleans()) else wanted)
    return least, most, lasting, true, found


@given(flickering())
def test_flicker_never_changes_the_state_and_a_true_change_is_followed_within_n_predictions_and_the_time(
    drawn: tuple[int, int, int, list[str], list[str]],
) -> None:
    least, most, lasting, true, found = drawn
    given = states(f"{least}/{most}", list(found), float(lasting))
    began = 0
    for number, wanted in enumerate(true):
        if number and true[number - 1] != wanted:
            began = number
        if number >= began + most - 1 + lasting:
            assert given[number] == wanted
        else:
            assert given[number] in {None, wanted, true[began - 1] if began else None}


def test_flips_are_counted_and_no_rate_is_made_up_from_a_moment() -> None:
    flips = Flips()
    for number, label in enumerate(["a", "b", None, "b", "a"]):  # none of them a minute after the other
        flips.add(label, 100.0 + 10 * number)
    assert (flips.count, flips.watched_s, flips.per_hour) == (2, 40.0, None)
    flips.add("a", 100.0 + LEAST_S)
    assert flips.per_hour == pytest.approx(2 * HOUR_S / LEAST_S)
    flips.add("a", 100.0 + HOUR_S + 20)
    assert (flips.count, flips.per_hour) == (2, 1)  # that at 110 s is more than an hour ago
    for second in range(2 * int(HOUR_S)):
        flips.add("ab"[second // 60 % 2], 100.0 + HOUR_S + 21 + second)
    assert flips.per_hour is not None and math.isclose(flips.per_hour, 60, abs_tol=1)


@pytest.mark.parametrize("given", ["", "3", "0/5", "4/3", "3/5/7", "a/b", "3/ 5", "１/２"])
def test_another_form_is_named(given: str) -> None:
    with pytest.raises(InputError, match="expected K/N"):
        Consensus(given)
