"""Simulated clients, the base of all engines: their personal parts, the step of a single client, their order, and the reference engine.

The reference trains one client after the other in this process; tests compare every other engine with it. Personal parts are in memory for
a few clients, in one file per client for thousands or for a pool.

A cohort is trained as fast as possible within a memory limit for waiting updates: the round loop takes updates in ascending client id and
holds early ones. It is therefore cut into windows of consecutive clients whose updates fit into memory together; the order changes only
within a window.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from edge_fl import plugins
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts, from_arrays, leaves, size_bytes, to_arrays, to_device
from edge_fl.methods.contract import steps, update_codec
from edge_fl.methods.contract.client import Client
from edge_fl.methods.contract.method import Method
from edge_fl.methods.finetuned import FineTuned
from edge_fl.wire import tensors
from edge_fl_server.training.clients import MEASURES, ClientId, Clients, Downs, Step
from edge_fl_server.training.engines import folders, processes

IN_MEMORY_BYTES = 1 << 30  # larger personal parts of all clients are stored in files
WAITING_BYTES = 1 << 30  # limit for the updates of a window
WINDOW_CLIENTS = 4096
Size = Callable[[ClientId], int]  # a client's training samples, or its batches


class PersonalParts:
    """Personal parts by client, in memory, or in `folder` if given. A client without stored parts has its initial ones."""

    def __init__(self, method: Method, folder: Path | None = None) -> None:
        self._method, self._folder = method, folder
        self._stored: dict[ClientId, Parts] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, client: ClientId) -> Parts:
        if self._folder is None:
            if client in self._stored:
                return self._stored[client]
        elif (path := self._path(self._folder, client)).is_file():
            return from_arrays(tensors.unpack(path.read_bytes()))
        return steps.start_own(self._method, client)

    def put(self, client: ClientId, own: Parts) -> None:
        """Replace the client's parts; empty ones are not written to a file."""
        if self._folder is None:
            self._stored[client] = own
        elif own:
            part = (path := self._path(self._folder, client)).with_suffix(".part")
            part.write_bytes(tensors.pack(to_arrays(own)))
            part.replace(path)

    def adopt(self, client: ClientId, file: Path) -> None:
        """Replace the client's parts by those in a file, which is moved."""
        assert self._folder is not None
        file.replace(self._path(self._folder, client))

    def trainable(self, clients: Sequence[ClientId]) -> Sequence[ClientId]:
        """The clients whose privacy budget allows another update."""
        if not self._method.privacy.budget:
            return clients
        return [
            client for client in clients if not update_codec.budget_exhausted(self._method, self.get(client))
        ]

    @staticmethod
    def _path(folder: Path, client: ClientId) -> Path:
        return folder / f"{client}.safetensors"


def take_step(
    step: Step, client: Client, method: Method, round: int, down: Parts, own: Parts
) -> tuple[Update, Parts]:
    """Run one step of one client -> (its update, its new personal parts). Raises RunError for an error in a user's own code."""
    with plugins.blaming(f"{method.title}, client {client.id}, round {round}"):
        if step == "train":
            return client.train(method, round, down, own)
        if step == "personalise":
            return client.personalise(method, round, down, own)
        measured = (client.compare if step == "compare" else client.evaluate)(method, down, own)
        return Update(client.id, len(client.data.train), {}, measured), own


def with_epochs(method: Method, epochs: int) -> Method:
    """The method with another number of local epochs."""
    if isinstance(method, FineTuned):
        return replace(method, epochs=epochs, inner=with_epochs(method.inner, epochs))
    return replace(method, epochs=epochs)


class SimulatedClients(Clients):
    """Clients `ids`, ascending, with their personal parts."""

    def __init__(self, ids: Sequence[ClientId], personal: PersonalParts) -> None:
        self._ids, self.personal = ids, personal

    def ids(self) -> Sequence[ClientId]:
        return self._ids

    def trainable(self) -> Sequence[ClientId]:
        return self.personal.trainable(self._ids)

    def personal_state(self) -> Iterator[tuple[ClientId, Parts]]:
        """(client, parts) one after the other: all of them may not fit into memory."""
        return ((client, self.personal.get(client)) for client in self._ids)

    def restore(self, states: Iterable[tuple[ClientId, Parts]]) -> None:
        for client, own in states:
            self.personal.put(client, own)


def in_process(kind: Any, clients: Mapping[ClientId, Client], method: Method) -> Any:
    """`kind(clients, method)` with the personal parts in memory, or in files if they are too large."""
    processes.keep_memory()
    size = size_bytes(steps.start_own(method, next(iter(clients))))
    if size * len(clients) <= IN_MEMORY_BYTES:
        return kind(clients, method)
    folder = folders.create()
    built = kind(clients, method, folder)
    folders.remove_with(built, folder)
    return built


class SequentialClients(SimulatedClients):
    """Clients by id, with personal parts in memory or in `folder`."""

    engine = "sequential"

    def __init__(
        self, clients: Mapping[ClientId, Client], method: Method, folder: Path | None = None
    ) -> None:
        super().__init__(sorted(clients), PersonalParts(method, folder))
        self._clients = clients

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        for id in downs:
            client = self._clients[id]
            own = to_device(self.personal.get(id), client.device)
            update, own = take_step(step, client, method, round, downs[id], own)
            if step not in MEASURES:
                self.personal.put(id, own)
            yield update


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
