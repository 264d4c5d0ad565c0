"""How many clients fit into memory as one computation, by measurement.

On a GPU the first chunk is small and measured; the next is as large as the free memory allows. Whenever memory runs out, the number is
halved for the rest of the run. On a CPU chunks are small, to fit into the cache.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

log = logging.getLogger(__name__)

CPU_CLIENTS, FIRST_CLIENTS, MOST_CLIENTS = 32, 16, 1024
# fixed cost of a step (calls, kernel launches), in units of one client's training time
CPU_OVERHEAD, GPU_OVERHEAD = 3.0, 128.0
MEMORY_SHARE = 0.8  # of the free memory


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
