"""The runner: one thread with one clock and one queue, and a few worker threads, for one device or for thousands.

An idle device costs its state and its connection, no thread and no timer.
"""

from __future__ import annotations

import heapq
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from devices.agent import events
from devices.board.systemd_notify import Notifier
from devices.runtime.device import Device
from devices.runtime.interfaces import DeviceConnect, DeviceEvent, Job, MayFetch

log = logging.getLogger(__name__)

SHORTEST_SLEEP_S = 0.01
GOODBYE_S = 5.0
FETCHES = 32  # at a time: a megabyte of chunks may be under way for each


class Runner:
    """Drives devices until told to stop. `run` blocks; `add`, `stop` and `deliver` may be called from any thread."""

    def __init__(
        self,
        *,
        workers: int = 1,
        clock: Callable[[], float] = time.monotonic,
        notifier: Notifier | None = None,
    ) -> None:
        self.devices: list[Device] = []
        self._joining = threading.RLock()  # a broker may answer before a device has hold of its connection
        self._clock = clock
        self._notifier = notifier or Notifier({})
        self._inbox: queue.SimpleQueue[tuple[Device, DeviceEvent] | None] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Device]] = []
        self._order = count()
        self._queueing: deque[Device] = deque()
        self._places = FETCHES
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="edge-fl-work")
        self._at_work: set[Device] = set()

    def add(self, device: Device, connect: DeviceConnect) -> None:
        """Connects a device; `run` does the rest."""
        with self._joining:
            self.devices.append(device)
            device.connect(connect, self)

    def deliver(self, device: Device, event: DeviceEvent) -> None:
        """Lets something happen to a device: a packet, the result of work, new data."""
        self._inbox.put((device, event))

    def submit(self, device: Device, job: Job) -> None:
        """Runs a job in a worker thread; its event is delivered."""
        self._at_work.add(device)
        self._pool.submit(self._carry_out, device, job)

    def is_working(self, device: Device) -> bool:
        """Whether a job of this device is under way or waits for a thread."""
        return device in self._at_work

    def crash(self, device: Device) -> None:
        """Ends a device as a power cut would, apart from a job that is under way; on the runner's thread."""
        self.devices.remove(device)
        device.crash()

    def request_fetch(self, device: Device) -> None:
        """Lets a device fetch, as soon as few enough others do: it hears `MayFetch`, and calls `end_fetch` in the end."""
        self._queueing.append(device)
        self._let_fetch()

    def end_fetch(self) -> None:
        """A fetch is over."""
        self._places += 1
        self._let_fetch()

    def now_s(self) -> float:
        """The clock of everything here."""
        return self._clock()

    def stop(self) -> None:
        """Ends `run`, which lets every device leave in order."""
        self._inbox.put(None)

    def run(
        self, deadline_s: float = math.inf, done: Callable[[], bool] = lambda: False, every_s: float = 0.25
    ) -> None:
        """Until `stop`, the deadline, or `done()`, which is asked every `every_s`; then every device leaves in order."""
        ends_s, ask_s = self._clock() + deadline_s, self._clock()
        self._notifier.ready()
        try:
            while (now_s := self._clock()) < ends_s:
                if now_s >= ask_s:
                    if done():
                        break
                    ask_s = now_s + every_s
                    self._notifier.alive(now_s)
                self._tick_due()
                try:
                    item = self._inbox.get(timeout=max(0.0, min(self._next_s, ask_s, ends_s) - self._clock()))
                except queue.Empty:
                    continue
                if item is None:
                    break
                self._hand(*item)
        finally:
            self._notifier.leaving()
            self._leave()

    @property
    def _next_s(self) -> float:
        return self._timers[0][0] if self._timers else math.inf

    def _hand(self, device: Device, event: DeviceEvent) -> None:
        try:
            with self._joining:
                device.take(event)
        except Exception:
            log.exception("%s: failed on %s; the next event follows", device.name, type(event).__name__)
        wake_s = device.wake_s
        if wake_s < math.inf:
            wake_s = max(wake_s, self._clock() + SHORTEST_SLEEP_S)
        if wake_s != device.planned_s:
            device.planned_s = wake_s
            if wake_s < math.inf:
                heapq.heappush(self._timers, (wake_s, next(self._order), device))

    def _carry_out(self, device: Device, job: Job) -> None:
        try:
            self.deliver(device, job())
        finally:
            self._at_work.discard(device)

    def _let_fetch(self) -> None:
        while self._queueing and self._places:
            self._places -= 1
            self.deliver(self._queueing.popleft(), MayFetch())

    def _tick_due(self) -> None:
        """Ticks every device whose time has come; a timer that has been set anew since is passed over."""
        while self._timers and self._timers[0][0] <= self._clock():
            wake_s, _, device = heapq.heappop(self._timers)
            if wake_s == device.planned_s:
                device.planned_s = math.inf
                self._hand(device, events.Tick())

    def _leave(self) -> None:
        for device in self.devices:
            device.take(events.StopRequested())
        until_s = self._clock() + GOODBYE_S
        for device in self.devices:
            device.disconnect(max(0.0, until_s - self._clock()))
        self._pool.shutdown(wait=True, cancel_futures=True)
