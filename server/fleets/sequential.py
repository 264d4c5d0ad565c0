"""The reference fleet: simulated clients, one after the other, in this process. Every other engine is compared with it.

Where a client's step runs: `take_step`, in the pool's and in Ray's workers too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from edge_fl.learn.mean import Update
from edge_fl.learn.tree import Parts, to_device
from edge_fl.methods.client import Client
from edge_fl.methods.method import Method
from server.fleets.fleet import ClientId, Downs, Fleet
from server.fleets.personal import Personal

Step = Literal["train", "personalise", "evaluate"]


def take_step(
    step: Step, client: Client, method: Method, round: int, down: Parts, own: Parts
) -> tuple[Update, Parts]:
    """One step of one client -> (what goes up, its new personal parts)."""
    if step == "train":
        return client.train(method, round, down, own)
    if step == "personalise":
        return client.personalise(method, round, down, own)
    return Update(client.id, len(client.data.train), {}, client.evaluate(method, down, own)), own


class SequentialFleet(Fleet):
    """Clients by id; their personal parts exist from the start, in memory or in `folder`."""

    def __init__(
        self, clients: Mapping[ClientId, Client], method: Method, folder: Path | None = None
    ) -> None:
        self._clients, self._ids = clients, sorted(clients)
        self._personal = Personal(method, folder)

    def clients(self) -> Sequence[ClientId]:
        return self._ids

    def trainable(self) -> Sequence[ClientId]:
        return self._personal.trainable(self._ids)

    def train(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        return self._each("train", round, method, downs)

    def personalise(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        return self._each("personalise", round, method, downs)

    def evaluate(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        return self._each("evaluate", round, method, downs)

    def personal_state(self) -> Iterator[tuple[ClientId, Parts]]:
        return self._personal.everything(self._ids)

    def restore(self, states: Iterable[tuple[ClientId, Parts]]) -> None:
        self._personal.restore(states)

    def own(self, id: ClientId) -> Parts:
        """One client's personal parts, where its data are."""
        return to_device(self._personal.get(id), self._clients[id].device)

    def keep(self, id: ClientId, own: Parts) -> None:
        """Replaces one client's personal parts."""
        self._personal.put(id, own)

    def _each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        for id in downs:
            update, own = take_step(step, self._clients[id], method, round, downs[id], self.own(id))
            if step != "evaluate":
                self.keep(id, own)
            yield update
