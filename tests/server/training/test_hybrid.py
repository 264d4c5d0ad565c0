"""Cohorts of simulated clients and devices."""

from collections import Counter

import pytest

from edge_fl.learn.tree import Parts
from edge_fl_server.training.clients import Broadcasts

LOOKED_UP = Counter[str]()


class Client(str):
    """A client whose look-ups in sets and dicts are counted."""

    def __hash__(self) -> int:
        LOOKED_UP.update([""])
        return super().__hash__()


def test_a_part_of_a_cohort_is_found_in_time_that_grows_with_its_clients() -> None:
    downs: dict[str, Parts] = {Client(f"c{number:03}"): {} for number in range(200)}
    LOOKED_UP.clear()
    part = Broadcasts(downs.__getitem__, (client for client in downs if client < "c100"))
    found = [client for client in part if part[client] == {}]
    assert found == [f"c{number:03}" for number in range(100)] and len(part) == 100
    assert LOOKED_UP.total() < 10 * len(downs)
    with pytest.raises(KeyError):
        part["c150"]
