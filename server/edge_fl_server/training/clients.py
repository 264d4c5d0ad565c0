"""The interface between the round loop and its clients, wherever they run: in this process, in a pool of processes, or on devices.

Updates may arrive in any order; the round loop sorts them by client id before a method sees them.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import Method
from edge_fl_server.training.engine_timing import EngineTiming

ClientId = str
Step = Literal["train", "personalise", "evaluate", "compare"]
MEASURES: frozenset[Step] = frozenset({"evaluate", "compare"})
"""Steps that change no personal parts."""
Downs = Mapping[ClientId, Parts]  # broadcast by client, computed on access


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
        """Run one step on every client of a cohort; updates in any order. "train" and "personalise" replace the clients' personal parts."""

    def train(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """One local update per client; with a buffer, also late updates of earlier rounds."""
        return self.each("train", round, method, downs)

    def personalise(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """Final personalisation of each client, with metrics before and after. Cancels outstanding local updates."""
        return self.each("personalise", round, method, downs)

    def evaluate(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """Metrics of each client with the given broadcast; the updates carry no parts."""
        return self.each("evaluate", round, method, downs)

    def compare(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """Each client's comparison of a candidate with the current parts (`steps.paired`), as metrics; the updates carry no parts."""
        return self.each("compare", round, method, downs)

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
