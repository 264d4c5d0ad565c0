"""Simulated clients that drop out, are slow or respond late (`CohortConfig`): the options -cdr, -tsr and -ssr of PFLlib.

With a buffer aggregation is asynchronous (FedBuff): a round ends when the buffer is full; other clients keep working. The duration of a
local update is drawn from the run's seed, half-normal as in the experiments of Nguyen et al. (AISTATS 2022), in simulated time. A client's
pending work is part of its personal state, so that a resumed run continues with it.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import floor

import torch

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import Method
from edge_fl.seeds import generator
from edge_fl_server.recipes.recipe import CohortConfig
from edge_fl_server.training.clients import Broadcasts, ClientId, Clients, Downs, Step, WrappedClients
from edge_fl_server.training.engines.simulated import with_epochs

PENDING, START = "pending", "start."  # names of pending work among a client's personal parts
SLOWDOWN = 4  # of slow clients
TICKS = 1_000_000  # durations are integers, which checkpoints store exactly


class UnreliableClients(WrappedClients):
    """Clients of which `drop_out` of each round's clients train in vain, and `slow_training` of all clients train half of the epochs."""

    def __init__(self, clients: Clients, cohort: CohortConfig, seed: int) -> None:
        super().__init__(clients)
        self._drop_out, self._seed = cohort.drop_out, seed
        self._slow = drawn(clients.ids(), cohort.slow_training, seed, "slow.training")

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        if step != "train":
            yield from self._clients.each(step, round, method, downs)
            return
        lost = drawn(sorted(downs), self._drop_out, self._seed, "drop.out", round)
        shorter = with_epochs(method, max(method.epochs // 2, 1))
        for way, members in ((method, set(downs) - self._slow), (shorter, set(downs) & self._slow)):
            if members:
                updates = self._clients.each(
                    step, round, way, Broadcasts(downs.__getitem__, (id for id in downs if id in members))
                )
                yield from (update for update in updates if update.client not in lost)


def drawn(
    clients: Sequence[ClientId], share: float, seed: int, purpose: str, round: int = 0
) -> frozenset[ClientId]:
    """Draw floor(share * N) of N clients."""
    count = floor(share * len(clients) + 1e-9)
    chosen = generator(seed, purpose, round).choice(len(clients), size=count, replace=False) if count else ()
    return frozenset(clients[place] for place in chosen)


@dataclass(frozen=True)
class PendingUpdate:
    """A local update in progress: its round, the broadcast it started from, and the remaining ticks."""

    round: int
    down: Parts
    left: int


class DelayedClients(WrappedClients):
    """Clients of which at most `buffer_size` respond per round. Updates later than `max_staleness` rounds are dropped.

    An update of a `slow` client takes SLOWDOWN times as long.
    """

    def __init__(
        self,
        clients: Clients,
        method: Method,
        seed: int,
        *,
        buffer_size: int,
        max_staleness: int,
        slow: Collection[ClientId] = (),
    ) -> None:
        super().__init__(clients)
        self._method, self._seed, self._slow = method, seed, slow
        self._size, self._max_staleness = buffer_size, max_staleness
        self._pending: dict[ClientId, PendingUpdate] = {}

    def at_work(self) -> Collection[ClientId]:
        return self._pending.keys()

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        if step == "train":
            return self._train(round, downs)
        if step == "personalise":
            self._pending = {}
        return self._clients.each(step, round, method, downs)

    def personal_state(self) -> Iterator[tuple[ClientId, Parts]]:
        for client, own in self._clients.personal_state():
            yield client, {**own, **_pending_parts(self._pending[client])} if client in self._pending else own

    def restore(self, states: Iterator[tuple[ClientId, Parts]]) -> None:
        self._clients.restore(self._with_pending_removed(states))

    def _train(self, round: int, downs: Downs) -> Iterator[Update]:
        for client in downs:
            takes = abs(generator(self._seed, "delay", round, client).normal())
            takes *= SLOWDOWN if client in self._slow else 1
            self._pending[client] = PendingUpdate(round, downs[client], int(takes * TICKS))
        first = sorted(self._pending, key=lambda client: (self._pending[client].left, client))[: self._size]
        done = {client: self._pending.pop(client) for client in first}
        passed = max((pending.left for pending in done.values()), default=0)
        self._pending = {
            client: replace(pending, left=pending.left - passed)
            for client, pending in self._pending.items()
            if round - pending.round < self._max_staleness
        }
        by_round = sorted(done, key=lambda client: (done[client].round, client))
        for began, group in groupby(by_round, key=lambda client: done[client].round):
            starts = {client: done[client].down for client in group}
            for update in self._clients.each("train", began, self._method.at(began), starts):
                late = began < round
                start = starts[update.client] if late else None
                yield replace(update, start=start, staleness=round - began)

    def _with_pending_removed(
        self, states: Iterator[tuple[ClientId, Parts]]
    ) -> Iterator[tuple[ClientId, Parts]]:
        for client, own in states:
            if PENDING in own:
                down = {name.removeprefix(START): p for name, p in own.items() if name.startswith(START)}
                self._pending[client] = PendingUpdate(
                    int(own[PENDING]["round"]), down, int(own[PENDING]["left"])
                )
            yield client, {n: p for n, p in own.items() if n != PENDING and not n.startswith(START)}


def _pending_parts(pending: PendingUpdate) -> Parts:
    numbers = {"round": torch.tensor(pending.round), "left": torch.tensor(pending.left)}
    return {PENDING: numbers, **{START + name: params for name, params in pending.down.items()}}
