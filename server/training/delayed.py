"""Simulated clients that take their time, for asynchronous aggregation: a round ends when the buffer is full, and the others stay at work.

How long a local update takes is drawn from the run's seed, half-normal as in the experiments of FedBuff (Nguyen et al., AISTATS 2022), in
a time that nobody waits for: the buffer takes those that would come first. What a client works on is part of what it remembers, so
that a resumed run goes on with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import Method
from edge_fl.seeds import generator
from server.training.fleet import ClientId, Downs, Fleet, Step

TASK, START = "run_id", "start."  # how what a client works on is named among what it remembers
TICKS = 1_000_000  # whole numbers, which a checkpoint keeps as they are


@dataclass(frozen=True)
class Assignment:
    """What a client works on: the round that it was asked in, what it received, and for how many ticks more."""

    round: int
    down: Parts
    left: int


class DelayedFleet(Fleet):
    """The clients of `fleet`, of which no more than `buffer_size` answer in a round. Who would be over `max_staleness` late is given up."""

    def __init__(
        self, fleet: Fleet, method: Method, seed: int, *, buffer_size: int, max_staleness: int
    ) -> None:
        self._fleet, self._method, self._seed = fleet, method, seed
        self._size, self._most = buffer_size, max_staleness
        self._assigned: dict[ClientId, Assignment] = {}

    def clients(self) -> Sequence[ClientId]:
        return self._fleet.clients()

    def trainable(self) -> Sequence[ClientId]:
        return self._fleet.trainable()

    def at_work(self) -> Collection[ClientId]:
        return self._assigned.keys()

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        if step == "train":
            return self._train(round, downs)
        if step == "personalise":
            self._assigned = {}
        return self._fleet.each(step, round, method, downs)

    def personal_state(self) -> Iterator[tuple[ClientId, Parts]]:
        for client, own in self._fleet.personal_state():
            yield client, {**own, **_kept(self._assigned[client])} if client in self._assigned else own

    def restore(self, states: Iterator[tuple[ClientId, Parts]]) -> None:
        self._fleet.restore(self._taken_up(states))

    def _train(self, round: int, downs: Downs) -> Iterator[Update]:
        for client in downs:
            takes = abs(generator(self._seed, "delay", round, client).normal())
            self._assigned[client] = Assignment(round, downs[client], int(takes * TICKS))
        first = sorted(self._assigned, key=lambda client: (self._assigned[client].left, client))[: self._size]
        done = {client: self._assigned.pop(client) for client in first}
        passed = max((assigned.left for assigned in done.values()), default=0)
        self._assigned = {
            client: replace(assigned, left=assigned.left - passed)
            for client, assigned in self._assigned.items()
            if round - assigned.round < self._most
        }
        by_round = sorted(done, key=lambda client: (done[client].round, client))
        for began, group in groupby(by_round, key=lambda client: done[client].round):
            starts = {client: done[client].down for client in group}
            for update in self._fleet.train(began, self._method.at(began), starts):
                late = began < round
                start = starts[update.client] if late else None
                yield replace(update, start=start, staleness=round - began)

    def _taken_up(self, states: Iterator[tuple[ClientId, Parts]]) -> Iterator[tuple[ClientId, Parts]]:
        for client, own in states:
            if TASK in own:
                down = {name.removeprefix(START): p for name, p in own.items() if name.startswith(START)}
                self._assigned[client] = Assignment(int(own[TASK]["round"]), down, int(own[TASK]["left"]))
            yield client, {n: p for n, p in own.items() if n != TASK and not n.startswith(START)}


def _kept(assigned: Assignment) -> Parts:
    numbers = {"round": torch.tensor(assigned.round), "left": torch.tensor(assigned.left)}
    return {TASK: numbers, **{START + name: params for name, params in assigned.down.items()}}
