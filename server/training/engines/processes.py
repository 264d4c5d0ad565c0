"""Worker processes: started once, reused by later runs, ended with the program.

Importing torch takes seconds, so a fork server imports it once and forks all workers, each with one thread.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

PRELOADED = ["server.training.engines.worker"]
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 1 << 30

_pools: dict[int, ProcessPoolExecutor] = {}


def cores() -> int:
    """Number of cores this process may use."""
    return len(os.sched_getaffinity(0))


def running(workers: int) -> bool:
    """Whether a pool of this size is already running."""
    return workers in _pools


def pool(workers: int) -> ProcessPoolExecutor:
    """Return the pool of this size, started if necessary."""
    if workers not in _pools:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with one_thread_each():
            _pools[workers] = ProcessPoolExecutor(workers, mp_context=context, initializer=_initialise)
            _pools[workers].submit(os.getpid).result(
                timeout=120
            )  # the fork server reads the environment here
    return _pools[workers]


def forget(workers: int) -> None:
    """Discard a broken pool; the next call of `pool` starts a new one."""
    if workers in _pools:
        _pools.pop(workers).shutdown(wait=False, cancel_futures=True)


def _initialise() -> None:
    """Initialise a worker."""
    import torch

    torch.set_num_threads(1)
    _keep_memory()


def _keep_memory() -> None:
    """Keep freed memory in the process (glibc only): mapping a step's tensors anew takes a tenth of its time."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute with this number of threads in the block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Make processes started in the block compute with one thread, by environment variables that libraries read when loaded."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
