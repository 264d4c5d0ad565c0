"""The vectorised engine: chunks of clients as one computation by torch.func.vmap; for GPUs, heads and small networks.

Clients of similar size share a chunk, which keeps padding small. How many clients fit into memory is measured: on a GPU the first chunk is
small, the next is as large as the free memory allows. Whenever memory runs out, the number is halved for the rest of the run. On a CPU
chunks are small, to fit into the cache.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from edge_fl_server.training.engines import simulated
from edge_fl_server.training.engines.simulated import SequentialClients, SimulatedClients

log = logging.getLogger(__name__)

CPU_CLIENTS, FIRST_CLIENTS, MOST_CLIENTS = 32, 16, 1024
# fixed cost of a step (calls, kernel launches), in units of one client's training time
CPU_OVERHEAD, GPU_OVERHEAD = 3.0, 128.0
MEMORY_SHARE = 0.8  # of the free memory
DRAWN = "its network draws random numbers, as dropout does"  # each client's own, one client at a time


class ClientCapacity:
    """Chunk size on a device: `clients` per computation; `overhead`: fixed cost of a step, in clients."""

    def __init__(self, device: str, clients: int = 0) -> None:
        self._gpu, self._fixed = torch.device(device).type == "cuda", bool(clients)
        self._device = device
        self.clients = clients or (FIRST_CLIENTS if self._gpu else CPU_CLIENTS)
        self.overhead = GPU_OVERHEAD if self._gpu else CPU_OVERHEAD

    @contextmanager
    def measured(self, clients: int) -> Iterator[None]:
        """Measure the computation of a chunk in the block: on a GPU the first one determines the chunk size."""
        if not self._gpu or self._fixed:
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        yield
        each = (torch.cuda.max_memory_allocated(self._device) - before) / clients
        free, _ = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        self.clients = max(min(int(MEMORY_SHARE * (free + unused) / max(each, 1)), MOST_CLIENTS), 1)
        self._fixed = True
        log.info("%d clients at a time fit into the memory of %s", self.clients, self._device)

    def halve(self, clients: int, error: Exception) -> None:
        """Halve the chunk size after a chunk of `clients` did not fit. Raises `error` for a single client."""
        if clients == 1:
            raise error
        self.clients, self._fixed = clients // 2, True
        if self._gpu:
            torch.cuda.empty_cache()
        log.info("%d clients at a time do not fit into memory; continuing with %d", clients, self.clients)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out, on a GPU or a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


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
        for window in simulated.windows(downs):
            chunks, planned_for = [list(window)], 0
            while chunks:
                if self.capacity.clients != planned_for:
                    planned_for = self.capacity.clients
                    remaining = list(chain(*chunks))
                    chunks = simulated.chunks(remaining, self._batches, planned_for, self.capacity.overhead)
                try:
                    with self.capacity.measured(len(chunks[-1])):
                        updates = self._train_chunk(round, method, chunks[-1], downs)
                except Exception as error:
                    if is_out_of_memory(error):
                        self.capacity.halve(len(chunks[-1]), error)
                        continue
                    if not is_unsupported(error):
                        raise
                    drawn = "random" in str(error)
                    self._fall_back(method, DRAWN if drawn else str(error).splitlines()[0])
                    remaining = sorted(chain(*chunks))
                    yield from self._reference.each(
                        "train", round, method, {id: downs[id] for id in remaining}
                    )
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
