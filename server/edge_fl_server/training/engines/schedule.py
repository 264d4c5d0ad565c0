"""The order in which a cohort is trained: as fast as possible within a memory limit for waiting updates.

The round loop takes updates in ascending client id and holds early ones. A cohort is therefore cut into windows of consecutive clients
whose updates fit into memory together; the order changes only within a window.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from edge_fl.learn.tree import Parts, leaves, size_bytes
from edge_fl_server.training.clients import ClientId, Downs

WAITING_BYTES = 1 << 30  # limit for the updates of a window
WINDOW_CLIENTS = 4096

Size = Callable[[ClientId], int]  # a client's training samples, or its batches


def windows(downs: Downs) -> Iterator[list[ClientId]]:
    """Cut a cohort into windows of consecutive clients; updates are assumed to be as large as the broadcast."""
    cohort = sorted(downs)
    if not cohort:
        return
    fitting = WAITING_BYTES // max(size_bytes(downs[cohort[0]]), 1)
    window = min(max(fitting, 1), WINDOW_CLIENTS)
    for start in range(0, len(cohort), window):
        yield cohort[start : start + window]


def largest_first(downs: Downs, samples: Size) -> Iterator[ClientId]:
    """Order for parallel workers: starting with the longest work, all finish at about the same time."""
    for window in windows(downs):
        yield from sorted(window, key=lambda client: (-samples(client), client))


def identical(a: Parts, b: Parts) -> bool:
    """Whether two broadcasts hold the same tensor objects, so that the second need not be sent."""
    left, right = leaves(a), leaves(b)
    return left.keys() == right.keys() and all(tensor is right[path] for path, tensor in left.items())


def chunks(window: Sequence[ClientId], batches: Size, largest: int, overhead: float) -> list[list[ClientId]]:
    """Group clients with similar numbers of batches into chunks of at most `largest`, by the smallest total duration.

    A chunk takes as many steps as its longest client has batches; a step takes as long as its clients plus `overhead` clients.
    """
    clients = sorted(window, key=lambda client: (batches(client), client))
    steps = np.array([batches(client) for client in clients], np.float64)
    cost, cut = np.zeros(len(clients) + 1), np.zeros(len(clients) + 1, np.int64)
    for end in range(1, len(clients) + 1):
        starts = np.arange(max(end - largest, 0), end)
        costs = cost[starts] + steps[end - 1] * (overhead + end - starts)
        cut[end] = starts[costs.argmin()]
        cost[end] = costs.min()
    ends = [len(clients)]
    while ends[-1]:
        ends.append(int(cut[ends[-1]]))
    return [clients[start:end] for start, end in pairwise(reversed(ends))]
