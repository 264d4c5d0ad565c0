"""The worker processes of this program: started once, kept for every run that follows, ended with the program.

Importing torch takes seconds, so that is done once in a fork server, which then makes as many workers as are wanted, each with one thread.
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
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of malloc.h
KEPT_BYTES = 1 << 30

_pools: dict[int, ProcessPoolExecutor] = {}


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def running(workers: int) -> bool:
    """Whether a pool of so many workers is there already, so that none need to be started."""
    return workers in _pools


def pool(workers: int) -> ProcessPoolExecutor:
    """A pool of one-thread processes; the same one for the same number of workers."""
    if workers not in _pools:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with one_thread_each():
            _pools[workers] = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin)
            _pools[workers].submit(os.getpid).result(timeout=120)  # the fork server reads the environment now
    return _pools[workers]


def forget(workers: int) -> None:
    """Ends a pool that is broken; the next call of `pool` starts a new one."""
    if workers in _pools:
        _pools.pop(workers).shutdown(wait=False, cancel_futures=True)


def _begin() -> None:
    """The first thing that a new worker does."""
    import torch

    torch.set_num_threads(1)
    _keep_memory()


def _keep_memory() -> None:
    """Freed memory stays with the process: a step's tensors would else be mapped and unmapped anew, a tenth of its time (glibc only)."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(MMAP_THRESHOLD, KEPT_BYTES)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """In the block this process computes on so many threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Processes that begin in the block compute on one thread: they inherit these, and libraries read them once, when they are loaded."""
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
