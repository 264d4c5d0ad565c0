"""The order and number of updates that arrive from clients: by client, up to a goal, with progress."""

from collections.abc import Generator, Iterable, Iterator

from edge_fl.console.progress import Count, Watch
from edge_fl.learn.aggregation.mean import Update
from edge_fl_server.training.clients import ClientId


def in_order(updates: Iterable[Update], members: Iterable[ClientId]) -> Iterator[Update]:
    """The updates in ascending client id. Early ones wait for their predecessors; unknown clients and repetitions are dropped."""
    waiting: dict[ClientId, Update] = {}
    order = sorted(members)
    missing = set(order)
    position = 0
    for update in updates:
        if update.client in missing:
            missing.remove(update.client)
            waiting[update.client] = update
        while position < len(order) and order[position] in waiting:
            yield waiting.pop(order[position])
            position += 1
    for client in order[position:]:
        if client in waiting:
            yield waiting.pop(client)


def first_updates(updates: Iterator[Update], goal: int) -> Iterator[Update]:
    """The first `goal` updates to arrive; then the round request is closed."""
    for count, update in enumerate(updates, 1):
        yield update
        if count == goal:
            break
    if isinstance(updates, Generator):
        updates.close()


def counted(updates: Iterable[Update], stage: str, expected: int, watch: Watch) -> Iterator[Update]:
    """The updates, with progress reported to `watch`."""
    done = 0
    watch(Count(stage, done, expected))
    for done, update in enumerate(updates, 1):
        watch(Count(stage, done, expected))
        yield update
    watch(Count(stage, done, done))
