"""Updates that arrive in any order: passed on by client as soon as possible, up to a goal, with progress."""

from collections.abc import Iterator

from edge_fl.console.progress import Count
from edge_fl.learn.aggregation.mean import Update
from edge_fl_server.training.rounds import counted, first_updates, in_order

MEMBERS = ("a", "b", "c", "d")


def arriving(clients: str, seen: list[str]) -> Iterator[Update]:
    """Updates of the clients in this order; `seen` collects those that were requested."""
    for client in clients:
        seen.append(client)
        yield Update(client, len(seen), {})


def names(updates: Iterator[Update]) -> str:
    return "".join(update.client for update in updates)


def test_an_update_is_passed_on_as_soon_as_all_before_it_have_arrived() -> None:
    seen: list[str] = []
    updates = in_order(arriving("abdc", seen), MEMBERS)
    assert [(next(updates).client, len(seen)) for _ in MEMBERS] == [("a", 1), ("b", 2), ("c", 4), ("d", 4)]
    assert next(updates, None) is None


def test_an_update_does_not_wait_for_clients_that_never_respond() -> None:
    assert names(in_order(arriving("dbc", []), MEMBERS)) == "bcd"


def test_unknown_clients_and_repetitions_are_dropped() -> None:
    kept = list(in_order(arriving("cxac", []), MEMBERS))
    assert [(update.client, update.samples) for update in kept] == [("a", 3), ("c", 1)]


def test_after_enough_updates_the_request_is_closed() -> None:
    seen: list[str] = []
    source = arriving("dcba", seen)
    assert names(first_updates(source, 2)) == "dc" and seen == ["d", "c"]
    assert next(source, None) is None
    assert names(first_updates(arriving("dc", []), 3)) == "dc"


def test_progress_counts_what_has_arrived_and_ends_at_that_number() -> None:
    counts: list[Count] = []
    assert names(counted(arriving("ab", []), "clients", 3, counts.append)) == "ab"
    assert counts == [Count("clients", done, total) for done, total in ((0, 3), (1, 3), (2, 3), (2, 2))]
