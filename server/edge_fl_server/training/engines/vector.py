"""The vectorised engine: chunks of clients as one computation by torch.func.vmap; for GPUs, heads and small networks.

Clients of similar size share a chunk, which keeps padding small; `ClientCapacity` determines the chunk size.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.network.precision import computing_in
from edge_fl.learn.stacked import Stacked, stack
from edge_fl.learn.tree import Parts, first_not_finite
from edge_fl.methods.contract import steps, update_codec
from edge_fl.methods.contract.client import Client
from edge_fl.methods.contract.method import Method
from edge_fl_server.training.clients import ClientId, Downs, Step
from edge_fl_server.training.engines import capacity, schedule
from edge_fl_server.training.engines.capacity import ClientCapacity
from edge_fl_server.training.engines.sequential import SequentialClients
from edge_fl_server.training.engines.simulated import SimulatedClients

log = logging.getLogger(__name__)


class VectorClients(SimulatedClients):
    """Simulated clients; `train` is vectorised if the method allows it, all other steps are the sequential engine's.

    `chunk`: the largest number of clients per computation; 0: determined by `ClientCapacity`.
    `fallback`: the reason for training client by client, if any.
    """

    def __init__(
        self,
        clients: Mapping[ClientId, Client],
        method: Method,
        folder: Path | None = None,
        *,
        chunk: int = 0,
    ) -> None:
        self._reference = SequentialClients(clients, method, folder)
        super().__init__(self._reference.ids(), self._reference.personal)
        self._clients = clients
        self.capacity = ClientCapacity(next(iter(clients.values())).device, chunk)
        self.fallback = ""
        if reason := obstacle(method):
            self._fall_back(method, reason)

    @property
    def engine(self) -> str:
        return f"vector, client by client: {self.fallback}" if self.fallback else "vector"

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        if step != "train" or self.fallback:
            yield from self._reference.each(step, round, method, downs)
            return
        for window in schedule.windows(downs):
            chunks, planned_for = [list(window)], 0
            while chunks:
                if self.capacity.clients != planned_for:
                    planned_for = self.capacity.clients
                    remaining = list(chain(*chunks))
                    chunks = schedule.chunks(remaining, self._batches, planned_for, self.capacity.overhead)
                try:
                    with self.capacity.measured(len(chunks[-1])):
                        updates = self._train_chunk(round, method, chunks[-1], downs)
                except Exception as error:
                    if capacity.is_out_of_memory(error):
                        self.capacity.halve(len(chunks[-1]), error)
                        continue
                    if not is_unsupported(error):
                        raise
                    self._fall_back(method, str(error).splitlines()[0])
                    remaining = sorted(chain(*chunks))
                    yield from self._reference.train(round, method, {id: downs[id] for id in remaining})
                    break
                chunks.pop()
                yield from updates
                del updates  # before the next chunk needs the memory

    def _fall_back(self, method: Method, reason: str) -> None:
        self.fallback = reason
        log.warning("%s is trained client by client: %s", method.title, reason)

    def _batches(self, id: ClientId) -> int:
        return -(-len(self._clients[id].data.train) // self._clients[id].batch_size)

    def _train_chunk(
        self, round: int, method: Method, chunk: Sequence[ClientId], downs: Downs
    ) -> list[Update]:
        """Run the local updates of a chunk as one computation; personal parts are replaced only if all succeed."""
        members = [self._clients[id].training_batches(method, round) for id in chunk]
        received = [downs[id] for id in chunk]
        down = stacked(received)
        own = stacked([tree.to_device(self.personal.get(id), self._clients[id].device) for id in chunk])
        x, y, real = stack(members)
        first = members[0]

        def step(
            place: Tensor, x: Tensor, y: Tensor, real: Tensor, down: Parts, own: Parts
        ) -> tuple[Parts, Parts]:
            data = Stacked(
                x,
                y,
                first.classes,
                first.batch_size,
                first.run,
                round,
                augment=first.augment,
                members=tuple(members),
                place=place,
                real=real,
            )
            return steps.local_update(method, down, own, data)

        places = torch.arange(len(chunk), device=x.device)
        with computing_in(self._clients[chunk[0]].precision):
            up, new = vmap(step)(places, x, y, real, down, own)
        finite = first_not_finite(up) is first_not_finite(new) is None  # of the whole chunk, checked at once
        updates = []
        for place, (id, its_down, member) in enumerate(zip(chunk, received, members, strict=True)):
            parts, mine = at(up, place), tree.clone(at(new, place))
            if not finite:
                steps.require_finite(method, id, round, parts, mine)
            measured = self._clients[id].evaluate_update(method, round, its_down, parts, mine)
            parts, mine = steps.sent(method, "train", its_down, parts, mine, member)
            measured |= update_codec.epsilon_spent(method, mine)
            updates.append((Update(id, len(member), parts, measured), mine))
        for update, mine in updates:
            self.personal.put(update.client, mine)
        return [update for update, _ in updates]


def obstacle(method: Method) -> str:
    """Why a method cannot be vectorised over clients; empty if it can."""
    return "" if method.vectorises else "its local update depends on values, not only on shapes"


def is_unsupported(error: Exception) -> bool:
    """Whether torch cannot vectorise an operation of the local update, such as one of a user's own network."""
    words = ("vmap", "functorch", "atching rule")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def stacked(trees: Sequence[Parts]) -> Parts:
    """Stack trees of equal structure along a leading dimension of clients; a shared tensor becomes a view, not a copy."""

    def join(*leaves: Tensor) -> Tensor:
        if all(leaf is leaves[0] for leaf in leaves):
            return leaves[0].expand(len(leaves), *leaves[0].shape)
        return torch.stack(leaves)

    return tree.map(join, *trees)


def at(trees: Any, place: int) -> Any:
    """One client's tree of a stacked one; its tensors are views."""
    return tree.map(lambda leaf: leaf[place], trees)
