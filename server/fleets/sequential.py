"""The reference fleet: simulated clients, one after the other, in this process. Every other engine is compared with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from edge_fl.learn.mean import Update
from edge_fl.learn.tree import Parts, to_device
from edge_fl.methods.client import Client
from edge_fl.methods.method import Method
from server.fleets.fleet import ClientId, Downs
from server.fleets.personal import Personal


class SequentialFleet:
    """Clients by id; their personal parts exist from the start, in memory or in `folder`."""

    def __init__(self, clients: Mapping[ClientId, Client], method: Method, folder: Path | None = None) -> None:
        self._clients = dict(sorted(clients.items()))
        self._personal = Personal(method, folder)

    def clients(self) -> Sequence[ClientId]:
        return list(self._clients)

    def train(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        for id in downs:
            update, own = self._clients[id].train(method, round, downs[id], self.own(id))
            self.keep(id, own)
            yield update

    def personalise(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        for id in downs:
            update, own = self._clients[id].personalise(method, round, downs[id], self.own(id))
            self.keep(id, own)
            yield update

    def evaluate(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        for id in downs:
            client = self._clients[id]
            yield Update(id, len(client.data.train), {}, client.evaluate(method, downs[id], self.own(id)))

    def personal_state(self) -> Iterator[tuple[ClientId, Parts]]:
        return self._personal.everything(self._clients)

    def restore(self, states: Iterable[tuple[ClientId, Parts]]) -> None:
        self._personal.restore(states)

    def own(self, id: ClientId) -> Parts:
        """One client's personal parts, where its data are."""
        return to_device(self._personal.get(id), self._clients[id].device)

    def keep(self, id: ClientId, own: Parts) -> None:
        """Replaces one client's personal parts."""
        self._personal.put(id, own)
