"""The runner: one thread with one clock and one event queue, and a few worker threads, for one device or for thousands.

An idle device costs its state and its connection, but no thread and no timer. systemd is told that the runner is ready, alive or stopping
(sd_notify protocol).
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

from edge_fl import threads
from edge_fl.untrusted import whole
from edge_fl.wire.transport import Connect
from edge_fl_devices.agent import events
from edge_fl_devices.runtime.device import Device, DeviceEvent, MayFetch, RunnerJob

log = logging.getLogger(__name__)

PER_TIMEOUT = 3  # notifications per watchdog timeout
MIN_SLEEP_S = 0.01
DISCONNECT_S = 5.0
MAX_FETCHES = 32  # at a time; each has up to a megabyte of chunks in flight


class Notifier:
    """Sends datagrams to the socket in $NOTIFY_SOCKET (unit settings `Type=notify`, `WatchdogSec=`)."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        timeout_us = environment.get("WATCHDOG_USEC", "")
        self._every_s = (whole(timeout_us, 10**15) or math.inf) / 1e6 / PER_TIMEOUT
        self._next_s = -math.inf

    def ready(self) -> None:
        """Report that the agent runs, with or without a broker."""
        self._send("READY=1")

    def alive(self, now_s: float) -> None:
        """Notify the watchdog when the next notification is due; call often."""
        if now_s >= self._next_s and self._every_s < math.inf:
            self._next_s = now_s + self._every_s
            self._send("WATCHDOG=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def _send(self, state: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.settimeout(1.0)
                out.sendto(state.encode(), self._address)
        except OSError:
            return  # systemd is gone


class Runner:
    """Drives devices until stopped. `run` blocks; `add`, `stop` and `deliver` may be called from any thread.

    ready: set once systemd knows that the agent runs. stopped: `stop` was called, `how` by what, in words. continues: another runner of
    this process follows, so that systemd does not see an end. end_work: called at the end of the process, to end what jobs wait for.
    """

    def __init__(
        self,
        *,
        workers: int = 1,
        notifier: Notifier | None = None,
        end_work: Callable[[], None] = lambda: None,
    ) -> None:
        self.devices: list[Device] = []
        self.stopped = self.continues = False
        self.how = ""
        self.ready = threading.Event()
        self._end_work = end_work
        self._joining = threading.RLock()  # a broker may answer before `Device.connect` has returned
        self._notifier = notifier or Notifier({})
        self._inbox: queue.SimpleQueue[tuple[Device, DeviceEvent] | None] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Device]] = []
        self._planned_s: dict[
            Device, float
        ] = {}  # the tick of a device that counts; earlier plans stay in the heap
        self._order = count()
        self._waiting_to_fetch: deque[Device] = deque()
        self._free_fetches = MAX_FETCHES
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="edge-fl-work")
        self._working: set[Device] = set()

    def add(self, device: Device, connect: Connect) -> None:
        """Connect a device; `run` drives it."""
        with self._joining:
            self.devices.append(device)
            device.connect(connect, self)

    def deliver(self, device: Device, event: DeviceEvent) -> None:
        self._inbox.put((device, event))

    def submit(self, device: Device, job: RunnerJob) -> None:
        """Run a job in a worker thread and deliver its event."""
        self._working.add(device)
        self._pool.submit(
            threads.guarded(partial(self._run_job, device, job), f"edge-fl-work, {device.name}")
        )

    def is_working(self, device: Device) -> bool:
        """Return whether a job of this device is running or queued."""
        return device in self._working

    def crash(self, device: Device) -> None:
        """Remove a device as a power failure would, apart from a running job; on the runner's thread."""
        self.devices.remove(device)
        self._planned_s.pop(device, None)
        device.crash()

    def request_fetch(self, device: Device) -> None:
        """Deliver `MayFetch` as soon as few enough devices are fetching; the device then calls `end_fetch`."""
        self._waiting_to_fetch.append(device)
        self._grant_fetches()

    def end_fetch(self) -> None:
        self._free_fetches += 1
        self._grant_fetches()

    def now_s(self) -> float:
        return time.monotonic()

    def hand_over(self) -> None:
        """End `run` after a `done`: another runner of this process follows."""
        self.continues = True

    def stop(self, how: str = "") -> None:
        """End `run`; all devices disconnect cleanly. `how` says what stopped them, in words."""
        self.stopped, self.how = True, how
        self._inbox.put(None)

    def wait(self, seconds: float) -> None:
        """Wait before `run`, or until `stop`; for systemd the agent runs."""
        until_s = time.monotonic() + seconds
        self._notifier.ready()
        while not self.stopped and (now_s := time.monotonic()) < until_s:
            self._notifier.alive(now_s)
            time.sleep(min(0.25, until_s - now_s))

    def run(
        self, deadline_s: float = math.inf, done: Callable[[], bool] = lambda: False, every_s: float = 0.25
    ) -> None:
        """Run until `stop`, the deadline, or `done()`, called every `every_s`; then disconnect all devices cleanly."""
        ends_s, check_s = time.monotonic() + deadline_s, time.monotonic()
        self._notifier.ready()
        self.ready.set()
        planned = False
        try:
            while (now_s := time.monotonic()) < ends_s:
                if now_s >= check_s:
                    if done():
                        break
                    check_s = now_s + every_s
                    self._notifier.alive(now_s)
                self._tick_due()
                next_s = self._timers[0][0] if self._timers else math.inf
                try:
                    item = self._inbox.get(timeout=max(0.0, min(next_s, check_s, ends_s) - time.monotonic()))
                except queue.Empty:
                    continue
                if item is None:
                    break
                self._handle(*item)
            planned = True
        finally:
            if not self.continues:
                self._notifier.stopping()
            self._disconnect_all(planned=planned)

    def _handle(self, device: Device, event: DeviceEvent) -> None:
        try:
            with self._joining:
                device.handle(event)
        except Exception:
            log.exception("%s: %s could not be handled; continuing", device.name, type(event).__name__)
        wake_s = device.wake_s
        if wake_s < math.inf:
            wake_s = max(wake_s, time.monotonic() + MIN_SLEEP_S)
        if wake_s != self._planned_s.get(device, math.inf):
            self._planned_s[device] = wake_s
            if wake_s < math.inf:
                heapq.heappush(self._timers, (wake_s, next(self._order), device))

    def _run_job(self, device: Device, job: RunnerJob) -> None:
        try:
            self.deliver(device, job())
        finally:
            self._working.discard(device)

    def _grant_fetches(self) -> None:
        while self._waiting_to_fetch and self._free_fetches:
            self._free_fetches -= 1
            self.deliver(self._waiting_to_fetch.popleft(), MayFetch())

    def _tick_due(self) -> None:
        """Tick every device that is due; skip timers that have been replaced."""
        while self._timers and self._timers[0][0] <= time.monotonic():
            wake_s, _, device = heapq.heappop(self._timers)
            if wake_s == self._planned_s.get(device):
                del self._planned_s[device]
                self._handle(device, events.Tick())

    def _disconnect_all(self, *, planned: bool) -> None:
        for device in self.devices:
            device.handle(events.StopRequested(planned))
        until_s = time.monotonic() + DISCONNECT_S
        for device in self.devices:
            device.connection.close(max(0.0, until_s - time.monotonic()))
        if not self.continues:
            self._end_work()
        self._pool.shutdown(wait=True, cancel_futures=True)
