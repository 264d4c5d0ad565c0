"""Worker processes: started once, reused by later runs, ended with the program, even if the program is killed.

Importing torch takes seconds, so a fork server imports it once and forks all workers, each with one thread. A command that has just started
can fork the server from itself (`prepare`); scripts and notebooks, which may have threads, start it as a new interpreter.
"""

import ctypes
import gc
import importlib
import multiprocessing
import os
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess
from multiprocessing.synchronize import BoundedSemaphore, Lock, SemLock
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from edge_fl import signals
from edge_fl.threads import once
from edge_fl_server.training.engines import folders

PRELOADED = ["edge_fl_server.training.engines.pool"]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Environment variables with which a process computes in one thread; libraries read them when they are loaded."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 1 << 30
KILL_S = 5.0
IMPORT_S, FORK_S = 4.0, 0.1  # start of the workers: with and without the import of torch
MAX_FOLDER_BYTES = 60

S = TypeVar("S", bound=SemLock)

_pools: dict[int, ProcessPoolExecutor] = {}


def cores() -> int:
    """Number of cores this process may use."""
    return len(os.sched_getaffinity(0))


def running(workers: int) -> bool:
    """Whether a pool of this size is already running."""
    return workers in _pools


def start_seconds(workers: int) -> float:
    """Expected duration of the start of a pool of this size."""
    if running(workers):
        return 0.0
    return FORK_S if forkserver._forkserver._forkserver_pid else IMPORT_S  # type: ignore[attr-defined]


def prepare() -> None:
    """Fork the server of the workers from this process: they start at once, and share its modules in memory.

    Without effect in a process with several threads: locks that another one holds would stay locked in the copy.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_pid or threading.active_count() > 1 or multiprocessing.parent_process():
        return
    importlib.import_module(PRELOADED[0])
    _make_temporary_folder()
    resource_tracker.ensure_running()  # it unblocks SIGINT when it starts
    address = f"{util.get_temp_dir()}/fork-server"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        alive, end_of_parent = os.pipe()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the parent handles Ctrl-C
        gc.freeze()  # for good: the collector would touch, and so copy, what the processes share
        pid = os.fork()
        if pid == 0:
            _serve(listener, alive, end_of_parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(alive)
    server._forkserver_address, server._forkserver_pid = address, pid
    server._forkserver_alive_fd = end_of_parent


def _serve(listener: socket.socket, alive: int, end_of_parent: int) -> NoReturn:
    """Run the fork server in this process until its parent ends."""
    try:
        os.close(end_of_parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        forkserver.main(listener.fileno(), alive, [])
    finally:
        os._exit(0)


def pool(workers: int) -> ProcessPoolExecutor:
    """Return the pool of this size, started if necessary."""
    if workers not in _pools:
        _make_temporary_folder()  # before the workers, which inherit its name
        context = ForkServer()
        context.set_forkserver_preload(PRELOADED)
        try:
            with environment(ONE_THREAD):  # the fork server reads the environment here
                _pools[workers] = ProcessPoolExecutor(workers, mp_context=context, initializer=_initialise)
                _pools[workers].submit(os.getpid).result(timeout=120)
        except BaseException:  # do not use a pool whose start was interrupted
            end(workers)
            raise
    return _pools[workers]


def _make_temporary_folder() -> None:
    """Make multiprocessing's temporary folder, in /tmp where the usual place is too long: a socket's path has at most 107 characters."""
    if multiprocessing.current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
        return
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > MAX_FOLDER_BYTES:
        tempfile.tempdir = "/tmp"
    try:
        folders.remove_at_end(Path(util.get_temp_dir()))
    finally:
        tempfile.tempdir = before


def death(pool: ProcessPoolExecutor) -> str:
    """How the worker died that broke a pool, such as "was ended by SIGSEGV (segmentation fault)"; the pool itself ends the others."""
    workers = list((pool._processes or {}).values())
    manager: Any = pool._executor_manager_thread
    if (
        manager is not None
    ):  # it waits for the workers as well; of two threads that wait for one, one can miss its exit code
        manager.join(KILL_S)
    codes = {worker.exitcode or 0 for worker in workers} - {0, -signal.SIGTERM}
    if -signal.SIGKILL in codes:
        return "was ended by SIGKILL (out of memory?)"
    return signals.ending(min(codes)) if codes else "died"


def end(workers: int) -> None:
    """Kill a pool's workers, with the jobs that they run; the next call of `pool` starts new ones."""
    if workers in _pools:
        ended = _pools.pop(workers)
        killed = list((ended._processes or {}).values())
        for process in killed:
            process.kill()
        for process in killed:
            process.join(KILL_S)
        ended.shutdown(wait=False, cancel_futures=True)


def end_with_parent() -> None:
    """End this child process when its parent, or the fork server that started it, has ended in any way."""
    once(_await_parent, "edge-fl-parent").start()


def _await_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent and parent.pid
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid) for pid in (parent.pid, os.getppid())], [], [])
    os._exit(1)


class _Detached:
    """Start a process that ignores Ctrl-C, which its parent handles, and does not run the parent's script again."""

    def start(self) -> None:
        resource_tracker.ensure_running()  # it unblocks SIGINT when it starts
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # children inherit it
        try:
            super().start()  # type: ignore[misc]
        finally:
            sys.modules["__main__"] = main
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class _ForkServerWorker(_Detached, ForkServerProcess):
    def start(self) -> None:
        """Start the worker, from a new fork server if the present one is about to end.

        A killed process closes its socket before its parent can see that it has ended, so multiprocessing may still ask it.
        """
        asked: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        try:
            super().start()
        except (ConnectionError, EOFError):
            if asked is None or not _ends(asked):
                raise
            super().start()


class _SpawnedWorker(_Detached, SpawnProcess): ...


class ForkServer(ForkServerContext):
    """Processes forked from a server process. The semaphores are removed when this process has ended in any way."""

    Process = _ForkServerWorker

    def Lock(self) -> Lock:  # noqa: N802
        return _removed_at_end(super().Lock())

    def BoundedSemaphore(self, value: int = 1) -> BoundedSemaphore:  # noqa: N802
        return _removed_at_end(super().BoundedSemaphore(value))


class Spawn(SpawnContext):
    """Processes that start as new interpreters."""

    Process = _SpawnedWorker


def _ends(pid: int) -> bool:
    """Whether a child process ends within KILL_S, or has ended; it can still be waited for."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], KILL_S)[0])
    finally:
        os.close(descriptor)


def _removed_at_end(semaphore: S) -> S:
    name = semaphore._semlock.name  # type: ignore[attr-defined]
    folders.remove_at_end(folders.SHARED_MEMORY / name.replace("/", "sem."))
    return semaphore


def _initialise() -> None:
    """Initialise a worker."""
    import torch

    end_with_parent()
    torch.set_num_threads(1)
    keep_memory()


def keep_memory() -> None:
    """Keep freed memory in this process (glibc only): mapping a step's tensors anew takes a tenth of its time."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)


def return_memory() -> None:
    """Return freed memory of this process to the system (glibc only)."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


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
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables in the block, also for processes started in it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
