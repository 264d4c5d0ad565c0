"""Two fleets as one cohort: simulated clients beside real devices (source "hybrid"). Devices are asked first and work meanwhile."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import Method
from server.training.fleet import ClientId, Downs, Fleet, Step


class Share(Mapping[ClientId, Parts]):
    """The part of a cohort's broadcasts that one fleet is responsible for, still computed when asked for."""

    def __init__(self, downs: Downs, clients: Sequence[ClientId]) -> None:
        self._downs = downs
        self._clients = [client for client in downs if client in set(clients)]

    def __getitem__(self, client: ClientId) -> Parts:
        if client not in self._clients:
            raise KeyError(client)
        return self._downs[client]

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


class HybridFleet(Fleet):
    """`devices` beside `simulated`; a device that has the name of a simulated client does not take part."""

    may_drop_out = True

    def __init__(self, devices: Fleet, simulated: Fleet) -> None:
        self._devices, self._simulated = devices, simulated
        self._ours = frozenset(simulated.clients())

    def clients(self) -> Sequence[ClientId]:
        return sorted(self._ours.union(self._devices.clients()))

    def trainable(self) -> Sequence[ClientId]:
        devices = (client for client in self._devices.trainable() if client not in self._ours)
        return sorted([*self._simulated.trainable(), *devices])

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        theirs = Share(downs, [client for client in downs if client not in self._ours])
        ours = Share(downs, [client for client in downs if client in self._ours])
        asked = self._devices.each(step, round, method, theirs) if theirs else iter(())
        return _one_after_the_other(self._simulated.each(step, round, method, ours), asked)

    def personal_state(self) -> Iterator[tuple[ClientId, Parts]]:
        return self._simulated.personal_state()

    def restore(self, states: Iterator[tuple[ClientId, Parts]]) -> None:
        self._simulated.restore(states)


def _one_after_the_other(*steps: Iterator[Update]) -> Iterator[Update]:
    """All their updates; whoever closes this closes them all, so that devices are told that nobody waits any more."""
    try:
        for step in steps:
            yield from step
    finally:
        for step in steps:
            if isinstance(step, Generator):
                step.close()
