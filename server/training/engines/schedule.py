"""In which order a cohort is trained: as fast as the engine can, within what may wait in memory.

The round loop takes updates in ascending client id and holds what comes before its turn. So a cohort is cut into windows of
consecutive clients whose updates fit into memory together, and only within a window may the order change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from edge_fl.learn.tree import Parts, leaves, size_bytes
from server.training.fleet import ClientId, Downs

WAITING_BYTES = 1 << 30  # what the updates of a window may take together
WINDOW_CLIENTS = 4096

Size = Callable[[ClientId], int]  # a client's training samples, or its batches


def windows(downs: Downs) -> Iterator[list[ClientId]]:
    """A cohort in windows of consecutive clients; an update is taken to be as large as the broadcast."""
    cohort = sorted(downs)
    if not cohort:
        return
    fitting = WAITING_BYTES // max(size_bytes(downs[cohort[0]]), 1)
    window = min(max(fitting, 1), WINDOW_CLIENTS)
    for start in range(0, len(cohort), window):
        yield cohort[start : start + window]


def largest_first(downs: Downs, samples: Size) -> Iterator[ClientId]:
    """For workers side by side: they end together when the longest work is begun first."""
    for window in windows(downs):
        yield from sorted(window, key=lambda client: (-samples(client), client))


def identical(a: Parts, b: Parts) -> bool:
    """Whether two broadcasts hold the very same tensors, so that one of them need not be sent."""
    left, right = leaves(a), leaves(b)
    return left.keys() == right.keys() and all(tensor is right[path] for path, tensor in left.items())


def alike(window: Sequence[ClientId], batches: Size, most: int, overhead: float) -> list[list[ClientId]]:
    """For clients as one computation: chunks of at most `most` clients with similar numbers of batches, chosen so that all is done soonest.

    A chunk takes as many steps as its longest client has batches, and each step as long as its clients plus `overhead` clients.
    """
    clients = sorted(window, key=lambda client: (batches(client), client))
    steps = np.array([batches(client) for client in clients], np.float64)
    cost, cut = np.zeros(len(clients) + 1), np.zeros(len(clients) + 1, np.int64)
    for end in range(1, len(clients) + 1):
        starts = np.arange(max(end - most, 0), end)
        costs = cost[starts] + steps[end - 1] * (overhead + end - starts)
        cut[end] = starts[costs.argmin()]
        cost[end] = costs.min()
    ends = [len(clients)]
    while ends[-1]:
        ends.append(int(cut[ends[-1]]))
    return [clients[start:end] for start, end in pairwise(reversed(ends))]
