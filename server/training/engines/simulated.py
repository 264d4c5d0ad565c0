"""What every engine has in common: clients that are simulated, whose personal parts exist from the start, and the steps they take.

Where a client's step runs is `take_step`, in the pool's and in Ray's workers too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.client import Client
from edge_fl.methods.contract.method import Method
from server.training.engines.personal import PersonalParts
from server.training.fleet import ClientId, Fleet, Step


def take_step(
    step: Step, client: Client, method: Method, round: int, down: Parts, own: Parts
) -> tuple[Update, Parts]:
    """One step of one client -> (what goes up, its new personal parts)."""
    if step == "train":
        return client.train(method, round, down, own)
    if step == "personalise":
        return client.personalise(method, round, down, own)
    return Update(client.id, len(client.data.train), {}, client.evaluate(method, down, own)), own


class SimulatedFleet(Fleet):
    """Clients `ids`, ascending; `personal` keeps their personal parts."""

    def __init__(self, ids: Sequence[ClientId], personal: PersonalParts) -> None:
        self._ids, self.personal = ids, personal

    def clients(self) -> Sequence[ClientId]:
        return self._ids

    def trainable(self) -> Sequence[ClientId]:
        return self.personal.trainable(self._ids)

    def personal_state(self) -> Iterator[tuple[ClientId, Parts]]:
        return self.personal.everything(self._ids)

    def restore(self, states: Iterable[tuple[ClientId, Parts]]) -> None:
        self.personal.restore(states)
