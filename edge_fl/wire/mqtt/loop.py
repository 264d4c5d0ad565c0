"""One thread that drives any number of MQTT connections: it waits for sockets, for timers and for calls from other threads.

paho's own `loop_start` takes a thread for every client and fails past some 340 of them, where `select` ends; this one waits on epoll.
Connections are made a few at a time, because a broker whose queue of new connections is full makes the others wait for seconds.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

HANDSHAKES = 64
READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE


class Timer:
    """A call in the future; `cancel` forgets it."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], object]) -> None:
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """The call is not made; does nothing when it was already."""
        self.call = None


class MqttLoop:
    """The thread starts with the first call. All methods but `call` and `close` belong to that thread."""

    def __init__(self, handshakes: int = HANDSHAKES) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._handshakes = handshakes
        self._entrants: deque[Callable[[], object]] = deque()
        self._waker, self._wakes = socket.socketpair()
        self._waker.setblocking(False)
        self._wakes.setblocking(False)
        self._selector.register(self._wakes, READ, self._hear)
        self._woken = False
        self._closing = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this loop's thread."""
        return threading.current_thread() is self._thread

    def call(self, function: Callable[[], object]) -> None:
        """Calls `function` soon on the loop's thread; from any thread."""
        self._calls.append(function)
        if self._woken or self.is_current:
            return
        self._woken = True
        with self._lock:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="edge-fl-mqtt", daemon=True)
                self._thread.start()
        try:
            self._waker.send(b"\0")
        except OSError:
            log.debug("loop: closed, or more than enough wake-ups are under way")

    def later(self, delay_s: float, function: Callable[[], object]) -> Timer:
        """Calls `function` once, `delay_s` from now."""
        return self.at(time.monotonic() + delay_s, function)

    def at(self, due_s: float, function: Callable[[], object]) -> Timer:
        """Calls `function` once, at a time of the monotonic clock; what is due at the same time keeps its order."""
        timer = Timer(function)
        heapq.heappush(self._timers, (due_s, next(self._order), timer))
        return timer

    def watch(self, sock: Any, ready: Callable[[int], object]) -> None:
        """Calls `ready` with READ, WRITE or both when the socket is; READ is asked for until `want` says otherwise."""
        self._selector.register(sock, READ, ready)

    def assignment(self, sock: Any, events: int, ready: Callable[[int], object]) -> None:
        """Changes what the socket is watched for."""
        self._selector.modify(sock, events, ready)

    def unwatch(self, sock: Any) -> None:
        """Forgets a socket; before it is closed."""
        self._selector.unregister(sock)

    def enter(self, start: Callable[[], object]) -> None:
        """Calls `start`, which begins a handshake, once fewer than `handshakes` are under way; `leave` ends it."""
        self._entrants.append(start)
        self._admit()

    def leave(self) -> None:
        """One handshake is over."""
        self._handshakes += 1
        self._admit()

    def close(self) -> None:
        """Ends the thread; connections that are still open are abandoned."""
        self.call(lambda: setattr(self, "_closing", True))
        if self._thread and not self.is_current:
            self._thread.join(5.0)

    def _admit(self) -> None:
        while self._entrants and self._handshakes:
            self._handshakes -= 1
            _guarded(self._entrants.popleft())

    def _hear(self, _: int) -> None:
        self._wakes.recv(4096)
        self._woken = False

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(self._pause_s()):
                _guarded(key.data, events)
            while self._timers and self._timers[0][0] <= time.monotonic():
                if call := heapq.heappop(self._timers)[2].call:
                    _guarded(call)
            for _ in range(len(self._calls)):
                _guarded(self._calls.popleft())
        self._selector.close()
        self._waker.close()
        self._wakes.close()

    def _pause_s(self) -> float | None:
        if self._calls:
            return 0.0
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None


def _guarded(function: Callable[..., object], *arguments: object) -> None:
    """Nothing that goes wrong for one connection ends the thread that serves all."""
    try:
        function(*arguments)
    except Exception:
        log.exception("loop: a call failed; the loop goes on")


_shared: tuple[int, MqttLoop] | None = None
_shared_lock = threading.Lock()


def shared_loop() -> MqttLoop:
    """The loop that this process's transports share unless they are given another; a forked child gets its own."""
    global _shared
    with _shared_lock:
        if _shared is None or _shared[0] != os.getpid():
            _shared = os.getpid(), MqttLoop()
        return _shared[1]
