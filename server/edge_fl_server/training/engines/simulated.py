"""Base class of all engines: simulated clients, their personal parts, and the step of a single client."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts, size_bytes
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.client import Client
from edge_fl.methods.contract.method import Method
from edge_fl.methods.finetuned import FineTuned
from edge_fl_server.training.clients import ClientId, Clients, Step
from edge_fl_server.training.engines import folders, processes
from edge_fl_server.training.engines.personal import PersonalParts

IN_MEMORY_BYTES = 1 << 30  # larger personal parts of all clients are stored in files


def take_step(
    step: Step, client: Client, method: Method, round: int, down: Parts, own: Parts
) -> tuple[Update, Parts]:
    """Run one step of one client -> (its update, its new personal parts)."""
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
