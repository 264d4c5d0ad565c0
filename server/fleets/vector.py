"""The vectorised fleet: chunks of clients as one batched computation by torch.func.vmap; for GPUs, heads and small networks.

Where a client's step runs: `_chunk`, once for all clients of a chunk. Clients of similar size share a chunk, so that padding stays
small; a chunk that does not fit into memory is halved, and the size that fits is remembered.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from edge_fl.learn import tree
from edge_fl.learn.mean import Update
from edge_fl.learn.stacked import Stacked, stack
from edge_fl.learn.tree import Parts
from edge_fl.methods import steps
from edge_fl.methods.client import Client
from edge_fl.methods.method import Method
from server.fleets.fleet import ClientId, Downs
from server.fleets.sequential import SequentialFleet

log = logging.getLogger(__name__)

CHUNK_CPU, CHUNK_GPU = 16, 256  # clients per chunk at the start; on a CPU a chunk should fit the cache


class VectorFleet:
    """Simulated clients as in the sequential fleet; `train` is vectorised where the method allows, the rest is the reference's own."""

    def __init__(self, clients: Mapping[ClientId, Client], method: Method, *, chunk: int = 0) -> None:
        self._reference = SequentialFleet(clients, method)
        self._members = dict(clients)
        gpu = any(client.device != "cpu" for client in clients.values())
        self._size = chunk or (CHUNK_GPU if gpu else CHUNK_CPU)
        self.fallback = unable(method)
        if self.fallback:
            log.warning("%s is trained client by client: %s", method.title, self.fallback)

    def clients(self) -> Sequence[ClientId]:
        return self._reference.clients()

    def train(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        if self.fallback:
            yield from self._reference.train(round, method, downs)
            return
        waiting = sorted(downs, key=lambda id: (len(self._members[id].data.train), id))
        while waiting:
            chunk = waiting[: self._size]
            try:
                yield from self._chunk(round, method, chunk, downs)
            except torch.OutOfMemoryError:
                if self._size == 1:
                    raise
                self._size //= 2
                torch.cuda.empty_cache()
                log.info("a chunk of %d clients does not fit into memory; going on with %d", len(chunk), self._size)
                continue
            waiting = waiting[len(chunk) :]

    def personalise(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        return self._reference.personalise(round, method, downs)

    def evaluate(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        return self._reference.evaluate(round, method, downs)

    def personal_state(self) -> Iterator[tuple[ClientId, Parts]]:
        return self._reference.personal_state()

    def restore(self, states: Iterable[tuple[ClientId, Parts]]) -> None:
        self._reference.restore(states)

    def _chunk(self, round: int, method: Method, chunk: Sequence[ClientId], downs: Downs) -> list[Update]:
        """The local updates of a chunk in one computation; personal parts are replaced only when all of it went well."""
        members = [self._members[id].batches(round) for id in chunk]
        down = stacked([downs[id] for id in chunk])
        own = stacked([self._reference.own(id) for id in chunk])
        x, y, real = stack(members)
        first = members[0]

        def step(place: Tensor, x: Tensor, y: Tensor, real: Tensor, down: Parts, own: Parts) -> tuple[Parts, Parts]:
            data = Stacked(
                x, y, first.classes, first.batch_size, first.run, round, members=tuple(members), place=place, real=real
            )
            return steps.local_update(method, down, own, data)

        places = torch.arange(len(chunk), device=x.device)
        up, new = vmap(step)(places, x, y, real, down, own)
        updates = []
        for place, id in enumerate(chunk):
            parts, mine = at(up, place), at(new, place)
            steps.require_finite(method, id, round, parts, mine)
            self._reference.keep(id, mine)
            updates.append(Update(id, len(members[place]), method.pack(parts)))
        return updates


def unable(method: Method) -> str:
    """Why a method cannot be vectorised over clients, or nothing."""
    return "" if method.vectorises else "its local update depends on values, not only on shapes"


def stacked(trees: Sequence[Parts]) -> Parts:
    """Equal trees with a leading dimension of clients; the very same tensor is a view, not a copy."""

    def join(*leaves: Tensor) -> Tensor:
        if all(leaf is leaves[0] for leaf in leaves):
            return leaves[0].expand(len(leaves), *leaves[0].shape)
        return torch.stack(leaves)

    return tree.map(join, *trees)


def at(trees: Any, place: int) -> Any:
    """One client's tree out of a stacked one, with memory of its own."""
    return tree.map(lambda leaf: leaf[place].clone(), trees)
