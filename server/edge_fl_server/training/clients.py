"""The interface between the round loop and its clients, wherever they run: in this process, in a pool of processes, or on devices.

Updates may arrive in any order; the round loop sorts them by client id before a method sees them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts, size_bytes
from edge_fl.methods.contract.method import Method
from edge_fl_server.training.records import EngineTiming

ClientId = str
Step = Literal["train", "personalise", "evaluate", "compare"]
MEASURES: frozenset[Step] = frozenset({"evaluate", "compare"})
"""Steps that change no personal parts."""
Downs = Mapping[ClientId, Parts]  # broadcast by client, computed on access


class Broadcasts(Mapping[ClientId, Parts]):
    """What each client of a cohort receives, by `send`. Computed on access, so that memory does not grow with the cohort.

    `bytes` maps each client accessed so far to the size of its broadcast.
    """

    def __init__(self, send: Callable[[ClientId], Parts], clients: Iterable[ClientId]) -> None:
        self._send, self._clients = send, dict.fromkeys(clients)
        self.bytes: dict[ClientId, int] = {}

    def __getitem__(self, client: ClientId) -> Parts:
        if client not in self._clients:
            raise KeyError(client)
        down = self._send(client)
        self.bytes[client] = size_bytes(down)
        return down

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


class Clients(ABC):
    """All clients of a run.

    Subclasses implement `each`, which runs one step on a cohort (the keys of `downs`). A client that does not respond in time is missing
    from the result. If `may_drop_out`, more clients are selected than needed (`CohortConfig.over_select`).
    """

    may_drop_out: ClassVar[bool] = False

    @property
    def engine(self) -> str:
        """The engine that trains the simulated clients; empty if there are none."""
        return ""

    @property
    def engine_timing(self) -> EngineTiming | None:
        """Why "auto" chose the engine; None if the recipe names it."""
        return None

    @abstractmethod
    def ids(self) -> Sequence[ClientId]:
        """The available clients, ascending."""

    def trainable(self) -> Sequence[ClientId]:
        """The available clients whose privacy budget is not exhausted."""
        return self.ids()

    @abstractmethod
    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """Run one step on every client of a cohort; updates in any order.

        "train": one local update per client; with a buffer, also late updates of earlier rounds. "personalise": the final personalisation,
        with metrics before and after; cancels outstanding local updates. Both replace the clients' personal parts. "evaluate": metrics with
        the given broadcast. "compare": a candidate with the current parts (`steps.paired`). Updates of both carry no parts.
        """

    def at_work(self) -> Collection[ClientId]:
        """Clients whose update to an earlier round still counts; empty without a buffer."""
        return ()

    def personal_state(self) -> Iterator[tuple[ClientId, Parts]]:
        """Personal parts of the clients in this process, for checkpoints; empty for devices, which keep theirs."""
        return iter(())

    def restore(self, states: Iterator[tuple[ClientId, Parts]]) -> None:  # noqa: B027
        """Restore the personal parts that `personal_state` returned."""


class NoClients(Clients):
    """The clients of a run that trains nothing."""

    def ids(self) -> Sequence[ClientId]:
        return ()

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        return iter(())


class WrappedClients(Clients):
    """Clients that pass everything on to other ones. Subclasses change what they override."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    @property
    def engine(self) -> str:
        return self._clients.engine

    @property
    def engine_timing(self) -> EngineTiming | None:
        return self._clients.engine_timing

    def ids(self) -> Sequence[ClientId]:
        return self._clients.ids()

    def trainable(self) -> Sequence[ClientId]:
        return self._clients.trainable()

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        return self._clients.each(step, round, method, downs)

    def at_work(self) -> Collection[ClientId]:
        return self._clients.at_work()

    def personal_state(self) -> Iterator[tuple[ClientId, Parts]]:
        return self._clients.personal_state()

    def restore(self, states: Iterator[tuple[ClientId, Parts]]) -> None:
        self._clients.restore(states)


class HybridClients(WrappedClients):
    """Source "hybrid": simulated clients and devices in one cohort. Devices get their round requests first and train in the meantime.

    A device with the name of a simulated client does not take part.
    """

    may_drop_out = True

    def __init__(self, devices: Clients, simulated: Clients) -> None:
        super().__init__(simulated)
        self._devices, self._names = devices, frozenset(simulated.ids())

    def ids(self) -> Sequence[ClientId]:
        return sorted(self._names.union(self._devices.ids()))

    def trainable(self) -> Sequence[ClientId]:
        devices = (client for client in self._devices.trainable() if client not in self._names)
        return sorted([*self._clients.trainable(), *devices])

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        of_devices = Broadcasts(downs.__getitem__, (client for client in downs if client not in self._names))
        of_simulated = Broadcasts(downs.__getitem__, (client for client in downs if client in self._names))
        requested = self._devices.each(step, round, method, of_devices) if of_devices else iter(())
        return _chained(self._clients.each(step, round, method, of_simulated), requested)


def _chained(*steps: Iterator[Update]) -> Iterator[Update]:
    """The updates of all steps. Closing the generator closes every step, which cancels outstanding round requests."""
    try:
        for step in steps:
            yield from step
    finally:
        for step in steps:
            if isinstance(step, Generator):
                step.close()
