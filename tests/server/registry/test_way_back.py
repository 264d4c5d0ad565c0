"""The release to go back to: one function chooses it for the command, the dashboard and the assistant."""

import pytest

from edge_fl.errors import InputError
from edge_fl_server.registry import Database, rollouts
from edge_fl_server.registry.rollouts import WayBack

LOSS = "mean: accuracy changed by -41.0 points, in the bottom decile of 3 devices by -60.0"


def rolled_out(
    db: Database, release: int, state: str = "completed", *, where: str = "", reason: str = ""
) -> int:
    previous = rollouts.previous_release(db, "main", release)
    number = rollouts.begin(db, "main", release, previous=previous, plan={"stages": [1.0], "where": where})
    if state != "running":
        record = rollouts.get(db, number)
        assert record and rollouts.advance(db, record, state=state, reason=reason)
    return number


def serving(*releases: int) -> Database:
    db = Database.open()
    for release in releases:
        rolled_out(db, release)
    return db


def test_it_is_the_newest_older_release_and_never_the_one_that_was_left() -> None:
    db = serving(1, 2, 3)
    assert rollouts.way_back(db, "main") == WayBack(3, 2)
    rolled_out(db, 2)
    assert rollouts.way_back(db, "main") == WayBack(2, 1)  # not 3 again
    rolled_out(db, 1)
    with pytest.raises(InputError, match="no older release than 1 to go back to"):
        rollouts.way_back(db, "main")


def test_it_is_no_release_that_was_aborted_rolled_back_or_is_not_kept() -> None:
    db = serving(1, 2)
    rolled_out(db, 3, "aborted", reason=LOSS)
    rolled_out(db, 4)
    assert rollouts.way_back(db, "main") == WayBack(4, 2)
    assert rollouts.way_back(db, "main", kept={1, 3, 4}) == WayBack(4, 1)
    with pytest.raises(
        InputError, match=rf"release 3: aborted by a gate on .* UTC in stage 1 of 1: {LOSS[:40]}"
    ):
        rollouts.way_back(db, "main", 3)
    rolled_out(db, 2, "rolled_back", reason="by hand")
    assert rollouts.way_back(db, "main", kept={1, 2, 3, 4}) == WayBack(4, 1)
    with pytest.raises(
        InputError, match=r"release 2: rolled back to release .*; release 1: its files are not kept"
    ):
        rollouts.way_back(db, "main", kept={2, 3, 4})


def test_a_release_by_number_has_to_be_older() -> None:
    db = serving(1, 2, 3)
    assert rollouts.way_back(db, "main", 1) == WayBack(3, 1)
    with pytest.raises(InputError, match="release 3: the fleet serves it already"):
        rollouts.way_back(db, "main", 3)
    with pytest.raises(InputError, match=r"release 4: not older than release 3.* edge-fl release rollout 4"):
        rollouts.way_back(db, "main", 4)
    with pytest.raises(InputError, match="no release was rolled out to it"):
        rollouts.way_back(Database.open(), "main")


def test_during_a_roll_out_it_leaves_that_and_a_roll_back_goes_on() -> None:
    db = serving(1, 2, 3)
    number = rolled_out(db, 4, "running")
    assert rollouts.way_back(db, "main") == WayBack(4, 3)
    rollouts.advance(db, rollouts.get(db, number), state="aborted", reason=LOSS)
    rolled_out(db, 2, "running")
    assert rollouts.way_back(db, "main") == WayBack(3, 2)
    assert rollouts.way_back(db, "main", 1) == WayBack(3, 1)


def test_after_a_roll_out_to_some_devices_the_fleet_returns_to_what_the_others_serve() -> None:
    db = serving(1, 2)
    rolled_out(db, 3, where="site=berlin")
    assert rollouts.way_back(db, "main") == WayBack(3, 2)


def test_a_person_who_aborts_a_roll_back_says_nothing_about_the_older_release() -> None:
    db = serving(1, 2, 3)
    rolled_out(db, 2, "aborted", reason="by hand")
    assert rollouts.way_back(db, "main") == WayBack(3, 2)
    rolled_out(db, 2, "aborted", reason=LOSS)
    assert rollouts.way_back(db, "main") == WayBack(3, 1)


def test_a_repeated_roll_out_of_the_release_in_service_does_not_return_to_the_one_that_was_left() -> None:
    db = serving(1, 2, 3, 2)
    assert rollouts.previous_release(db, "main", 2) == 1
