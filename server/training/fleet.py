"""What a fleet is. The round loop knows nothing else of where clients are: in this process, in a pool, or on devices.

Updates may come in any order; the round loop puts them into ascending client id before a method sees them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import Method

ClientId = str
Step = Literal["train", "personalise", "evaluate"]
Downs = Mapping[ClientId, Parts]  # what each client of a cohort receives, computed when asked for


class Fleet(ABC):
    """All clients of a run. The keys of `downs` are the cohort; a client that does not answer in time is simply missing.

    An implementation says one thing of the steps, `each`: how one of them is taken by a whole cohort. Where `may_drop_out`, more clients
    are asked than are needed (`CohortConfig.over_select`).
    """

    may_drop_out: ClassVar[bool] = False

    @abstractmethod
    def clients(self) -> Sequence[ClientId]:
        """Every client that can take part now, ascending."""

    def trainable(self) -> Sequence[ClientId]:
        """Those of them that a round may ask to train: all but those whose privacy budget is spent."""
        return self.clients()

    @abstractmethod
    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """One step of every client of a cohort, in any order; `train` and `personalise` replace their personal parts."""

    def train(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """One local update of each client of the cohort; with a buffer, late ones of earlier rounds too."""
        return self.each("train", round, method, downs)

    def personalise(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """The closing step of each client, with its metrics before and after. Whoever is still at work is told to stop."""
        return self.each("personalise", round, method, downs)

    def evaluate(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """Metrics of each client with the given broadcast; the updates carry no parts."""
        return self.each("evaluate", round, method, downs)

    def at_work(self) -> Collection[ClientId]:
        """Clients whose answer to an earlier round would still count; there are none without a buffer."""
        return ()

    def personal_state(self) -> Iterator[tuple[ClientId, Parts]]:
        """What the clients that live in this process remember, for checkpoints; devices keep it themselves, and give none."""
        return iter(())

    def restore(self, states: Iterator[tuple[ClientId, Parts]]) -> None:  # noqa: B027
        """Puts it back, after `personal_state`."""
