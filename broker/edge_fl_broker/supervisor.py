"""Watch a running mosquitto: restart it after a crash, reload its access list, report a full disk."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from edge_fl.errors import ConnectError, DeadlineError
from edge_fl_broker.mosquitto import DATABASE, Mosquitto
from edge_fl_broker.provision.register_sync import RegisterSync

MIN_FREE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class RestartLimits:
    """Restarts after a crash.

    The pause before a restart doubles from `min_pause_s` to `max_pause_s` with every crash that follows within `stable_s` of a start;
    after `max_restarts` such restarts in a row there is no further one.
    """

    min_pause_s: float = 1.0
    max_pause_s: float = 30.0
    stable_s: float = 30.0
    max_restarts: int = 5


LIMITS = RestartLimits()


class StopRequest:
    """Request to stop that a signal handler may make.

    `threading.Event.set` in a handler deadlocks when the signal interrupts `wait` while it holds the lock of the event.
    """

    def __init__(self) -> None:
        self.how = ""
        self._requests: SimpleQueue[None] = SimpleQueue()  # its `put` may interrupt its `get`
        self._is_set = False

    def set(self, how: str = "") -> None:
        """Request it; `how` says what did, in words."""
        self.how = how
        self._requests.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until `set` was called, at most `timeout_s`; return whether it was."""
        if not self._is_set:
            try:
                self._requests.get(timeout=timeout_s)
                self._is_set = True
            except Empty:
                pass
        return self._is_set


class Supervisor:
    """Call `update` regularly. `notify` receives one line per event.

    mosquitto saves its whole database next to the previous one. Without space for that it continues in memory, and so does the fleet;
    what changed since the last save would be lost in a crash.
    """

    def __init__(
        self,
        broker: Mosquitto,
        sync: RegisterSync | None,
        notify: Callable[[str], None],
        limits: RestartLimits = LIMITS,
    ) -> None:
        self._broker, self._sync, self._notify, self._limits = broker, sync, notify, limits
        self._started_s, self._restarts = time.monotonic(), 0
        self._failed = ""  # why the last restart or reload failed
        self._ended_why = ""  # why mosquitto ended last
        self._full = False

    def update(self, stopping: StopRequest) -> None:
        """Check once; a pause before a restart ends early when `stopping` is set. Raises ConnectError after too many crashes."""
        if self._broker.has_ended():
            self._restart(stopping)
            return
        self._check_disk()
        try:
            if self._sync and (done := self._sync.update()):
                self._notify(done)
        except (ConnectError, DeadlineError) as error:
            if str(error) != self._failed:
                self._notify(f"{error}; trying again")
            self._failed = str(error)
        else:
            self._failed = ""

    def _restart(self, stopping: StopRequest) -> None:
        broker, limits = self._broker, self._limits
        if time.monotonic() - self._started_s > limits.stable_s:
            self._restarts = 0
        reason = self._failed or broker.end_reason()
        if self._restarts >= limits.max_restarts:
            raise ConnectError(
                f"mosquitto ended {self._restarts + 1} times, each within {limits.stable_s:g} s of its start: {reason};"
                f" log {broker.log_path}",
                "giving up; the fleet has no broker",
            )
        pause_s = min(limits.max_pause_s, limits.min_pause_s * 2.0**self._restarts)
        self._restarts += 1
        why, self._ended_why = (
            "again, for the same reason" if reason == self._ended_why else f"({reason})",
            reason,
        )
        self._notify(
            f"mosquitto ended {why}; restart {self._restarts} of at most {limits.max_restarts} in {pause_s:g} s"
        )
        if stopping.wait(pause_s):
            return
        self._failed, self._started_s = "", time.monotonic()
        try:
            broker.restart()
        except (ConnectError, DeadlineError) as error:
            self._failed = error.message
        else:
            self._notify(f"mosquitto runs again on {broker.endpoint}")

    def _check_disk(self) -> None:
        folder = self._broker.settings.folder
        database = folder / DATABASE
        needed_bytes = MIN_FREE_BYTES + (database.stat().st_size if database.exists() else 0)
        free_bytes = shutil.disk_usage(folder).free
        if (full := free_bytes < needed_bytes) == self._full:
            return
        self._full = full
        if full:
            self._notify(
                f"{folder}: disk full, {free_bytes} bytes free, {needed_bytes} needed to save sessions and retained messages;"
                " mosquitto continues without saving: free some space"
            )
        else:
            self._broker.save()
            self._notify(f"{folder}: {free_bytes} bytes free; mosquitto saves again")
