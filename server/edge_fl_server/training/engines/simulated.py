"""Simulated clients, the base of all engines: their personal parts, the step of a single client, and the reference engine.

The reference trains one client after the other in this process; tests compare every other engine with it. Personal parts are in memory for
a few clients, in one file per client for thousands or for a pool.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts, from_arrays, size_bytes, to_arrays, to_device
from edge_fl.methods.contract import steps, update_codec
from edge_fl.methods.contract.client import Client
from edge_fl.methods.contract.method import Method
from edge_fl.methods.finetuned import FineTuned
from edge_fl.wire import tensors
from edge_fl_server.training.clients import MEASURES, ClientId, Clients, Downs, Step
from edge_fl_server.training.engines import folders, processes


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
