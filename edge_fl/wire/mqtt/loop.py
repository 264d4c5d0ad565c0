"""Event loop for MQTT: one thread drives any number of connections; it waits for sockets, timers and calls from other threads.

paho's own `loop_start` needs a thread per client and fails above some 340 clients, the limit of `select`; this loop uses epoll. The number
of concurrent handshakes is limited, because a broker with a full queue of new connections delays the others by seconds.
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

from edge_fl import threads

log = logging.getLogger(__name__)

HANDSHAKES = 64
READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE


class Timer:
    """A scheduled call."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], object]) -> None:
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """Cancel the call; does nothing after it was made."""
        self.call = None


class MqttLoop:
    """The thread starts with the first call. All methods except `call` and `close` must run on that thread."""

    def __init__(self, handshakes: int = HANDSHAKES) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._handshakes = handshakes
        self._queued: deque[Callable[[], object]] = deque()
        self._waker, self._wakes = socket.socketpair()
        self._waker.setblocking(False)
        self._wakes.setblocking(False)
        self._selector.register(self._wakes, READ, self._on_wake)
        self._woken = False
        self._closing = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this loop's thread."""
        return threading.current_thread() is self._thread

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` soon on the loop's thread; may be used from any thread."""
        self._calls.append(function)
        if self._woken or self.is_current:
            return
        self._woken = True
        with self._lock:
            if self._thread is None and not self._closing:
                self._thread = threads.lasting(self._run, "edge-fl-mqtt")
                self._thread.start()
        try:
            self._waker.send(b"\0")
        except OSError:
            log.debug("loop: closed, or enough wake-ups are pending")

    def later(self, delay_s: float, function: Callable[[], object]) -> Timer:
        """Call `function` once, `delay_s` from now."""
        return self.at(time.monotonic() + delay_s, function)

    def at(self, due_s: float, function: Callable[[], object]) -> Timer:
        """Call `function` once at a time of the monotonic clock; calls due at the same time keep their order."""
        timer = Timer(function)
        heapq.heappush(self._timers, (due_s, next(self._order), timer))
        return timer

    def watch(self, sock: Any, ready: Callable[[int], object]) -> None:
        """Call `ready` with READ, WRITE or both when the socket is ready for them; READ only until `set_events`."""
        self._selector.register(sock, READ, ready)

    def set_events(self, sock: Any, events: int, ready: Callable[[int], object]) -> None:
        """Change the events that a socket is watched for."""
        self._selector.modify(sock, events, ready)

    def unwatch(self, sock: Any) -> None:
        """Stop watching a socket; call before closing it."""
        self._selector.unregister(sock)

    def queue_handshake(self, start: Callable[[], object]) -> None:
        """Call `start`, which begins a handshake, once fewer than `handshakes` are in progress; `end_handshake` ends it."""
        self._queued.append(start)
        self._start_handshakes()

    def end_handshake(self) -> None:
        """End a handshake."""
        self._handshakes += 1
        self._start_handshakes()

    def close(self) -> None:
        """Stop the thread; open connections are abandoned."""
        self.call(lambda: setattr(self, "_closing", True))
        if self._thread and not self.is_current:
            self._thread.join(5.0)

    def _start_handshakes(self) -> None:
        while self._queued and self._handshakes:
            self._handshakes -= 1
            _guarded(self._queued.popleft())

    def _on_wake(self, _: int) -> None:
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
    """Call `function` and log an exception: a failing connection must not end the thread that serves all."""
    try:
        function(*arguments)
    except Exception:
        log.exception("loop: a call failed; the loop goes on")


_shared: tuple[int, MqttLoop] | None = None
_shared_lock = threading.Lock()


def shared_loop() -> MqttLoop:
    """The loop that this process's transports share by default; a forked child gets its own."""
    global _shared
    with _shared_lock:
        if _shared is None or _shared[0] != os.getpid():
            _shared = os.getpid(), MqttLoop()
        return _shared[1]
