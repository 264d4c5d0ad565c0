"""Source "hybrid": simulated clients and devices in one cohort. Devices get their round requests first and train in the meantime."""

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import Method
from edge_fl_server.training.clients import ClientId, Clients, Downs, Step
from edge_fl_server.training.engine_timing import EngineTiming


class Subset(Mapping[ClientId, Parts]):
    """The broadcasts of some clients of a cohort, computed on access."""

    def __init__(self, downs: Downs, clients: Collection[ClientId]) -> None:
        self._downs, chosen = downs, frozenset(clients)
        self._clients = dict.fromkeys(client for client in downs if client in chosen)

    def __getitem__(self, client: ClientId) -> Parts:
        if client not in self._clients:
            raise KeyError(client)
        return self._downs[client]

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


class HybridClients(Clients):
    """Devices and simulated clients. A device with the name of a simulated client does not take part."""

    may_drop_out = True

    def __init__(self, devices: Clients, simulated: Clients) -> None:
        self._devices, self._simulated = devices, simulated
        self._names = frozenset(simulated.ids())

    @property
    def engine(self) -> str:
        return self._simulated.engine

    @property
    def engine_timing(self) -> EngineTiming | None:
        return self._simulated.engine_timing

    def ids(self) -> Sequence[ClientId]:
        return sorted(self._names.union(self._devices.ids()))

    def trainable(self) -> Sequence[ClientId]:
        devices = (client for client in self._devices.trainable() if client not in self._names)
        return sorted([*self._simulated.trainable(), *devices])

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        of_devices = Subset(downs, [client for client in downs if client not in self._names])
        of_simulated = Subset(downs, [client for client in downs if client in self._names])
        requested = self._devices.each(step, round, method, of_devices) if of_devices else iter(())
        return _chained(self._simulated.each(step, round, method, of_simulated), requested)

    def personal_state(self) -> Iterator[tuple[ClientId, Parts]]:
        return self._simulated.personal_state()

    def restore(self, states: Iterator[tuple[ClientId, Parts]]) -> None:
        self._simulated.restore(states)


def _chained(*steps: Iterator[Update]) -> Iterator[Update]:
    """The updates of all steps. Closing the generator closes every step, which cancels outstanding round requests."""
    try:
        for step in steps:
            yield from step
    finally:
        for step in steps:
            if isinstance(step, Generator):
                step.close()
