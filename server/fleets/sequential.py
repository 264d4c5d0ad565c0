"""The reference fleet: simulated clients, one after the other, in this process. Every other engine is compared with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from edge_fl.learn.mean import Update
from edge_fl.learn.tree import Parts, to_device
from edge_fl.methods import steps
from edge_fl.methods.client import Client
from edge_fl.methods.method import Method
from server.fleets.fleet import ClientId, Downs


class SequentialFleet:
    """Clients by id with their personal parts, which exist from the start and never leave this object but by `personal_state`."""

    def __init__(self, clients: Mapping[ClientId, Client], method: Method) -> None:
        self._clients = dict(sorted(clients.items()))
        self._own = {id: to_device(steps.start_own(method, id), client.device) for id, client in self._clients.items()}

    def clients(self) -> Sequence[ClientId]:
        return list(self._clients)

    def train(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        for id in downs:
            update, self._own[id] = self._clients[id].train(method, round, downs[id], self._own[id])
            yield update

    def personalise(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        for id in downs:
            update, self._own[id] = self._clients[id].personalise(method, round, downs[id], self._own[id])
            yield update

    def evaluate(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        for id in downs:
            client = self._clients[id]
            yield Update(id, len(client.data.train), {}, client.evaluate(method, downs[id], self._own[id]))

    def personal_state(self) -> Iterator[tuple[ClientId, Parts]]:
        yield from self._own.items()

    def restore(self, states: Iterable[tuple[ClientId, Parts]]) -> None:
        self._own.update({id: to_device(own, self._clients[id].device) for id, own in states})
