"""The protocol of a fleet. The round loop knows nothing else of where clients are: in this process, in a pool, or on devices.

Updates may come in any order; the round loop puts them into ascending client id before a method sees them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from edge_fl.learn.mean import Update
from edge_fl.learn.tree import Parts
from edge_fl.methods.method import Method

ClientId = str
Downs = Mapping[ClientId, Parts]  # what each client of a cohort receives, computed when asked for


class Fleet(Protocol):
    """All clients of a run. The keys of `downs` are the cohort; a client that does not answer in time is simply missing."""

    def clients(self) -> Sequence[ClientId]:
        """Every client that can take part now, ascending."""
        ...

    def train(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """One local update of each client of the cohort."""
        ...

    def personalise(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """The closing step of each client, with its metrics before and after."""
        ...

    def evaluate(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """Metrics of each client with the given broadcast; the updates carry no parts."""
        ...

    def personal_state(self) -> Iterator[tuple[ClientId, Parts]]:
        """Personal parts of the clients that live in this process, for checkpoints; devices keep their own and give none."""
        ...

    def restore(self, states: Iterator[tuple[ClientId, Parts]]) -> None:
        """Puts personal parts back, after `personal_state`."""
        ...
