"""How many clients fit into memory as one computation: found, not guessed.

On a GPU the first chunk is small and measured, and the next as large as the free memory allows. Whenever memory runs out, the number is
halved and stays so. On a CPU a chunk is kept small, so that it lives in the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

log = logging.getLogger(__name__)

CPU_CLIENTS, FIRST_CLIENTS, MOST_CLIENTS = 32, 16, 1024
# a step's calls or launches, counted in clients that it could train meanwhile
CPU_OVERHEAD, GPU_OVERHEAD = 3.0, 128.0
SHARE = 0.8  # of the free memory that is used


class ClientCapacity:
    """`clients` that may be trained as one on a device now; `overhead` of a step there, counted in clients."""

    def __init__(self, device: str, clients: int = 0) -> None:
        self._gpu, self._fixed = torch.device(device).type == "cuda", bool(clients)
        self._device = device
        self.clients = clients or (FIRST_CLIENTS if self._gpu else CPU_CLIENTS)
        self.overhead = GPU_OVERHEAD if self._gpu else CPU_OVERHEAD

    @contextmanager
    def measured(self, clients: int) -> Iterator[None]:
        """Around the computation of a chunk: on a GPU the first one tells how large the others may be."""
        if not self._gpu or self._fixed:
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        yield
        each = (torch.cuda.max_memory_allocated(self._device) - before) / clients
        free, _ = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        self.clients = max(min(int(SHARE * (free + unused) / max(each, 1)), MOST_CLIENTS), 1)
        self._fixed = True
        log.info("%d clients at a time fit into the memory of %s", self.clients, self._device)

    def halve(self, clients: int, error: Exception) -> None:
        """After a chunk of `clients` did not fit. Raises `error` when there is nothing left to halve."""
        if clients == 1:
            raise error
        self.clients, self._fixed = clients // 2, True
        if self._gpu:
            torch.cuda.empty_cache()
        log.info("%d clients at a time do not fit into memory; going on with %d", clients, self.clients)


def is_full(error: Exception) -> bool:
    """Whether memory ran out, on a GPU or on a CPU, which torch tells in different ways."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
