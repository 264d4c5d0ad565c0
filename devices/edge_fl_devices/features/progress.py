"""How far a slow reading of the pictures is, for `device run`, and in FOLDER/features/progress.json for `device status`."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_fl.files import atomic
from edge_fl_devices.storage import read_json

FILE = "features/progress.json"
SLOW_S = 5.0
"""What takes less is not worth a line."""
RECENT_S, WRITE_S = 60.0, 2.0
STALE_S = 900.0
"""Longer than the deadline of a reading without progress: its process is gone."""


class Reading(Struct, frozen=True):
    """A reading under way: `done` of `of` pictures at the time `at_s`; `ends_s`: when it will be done (seconds since 1970)."""

    what: str
    done: int
    of: int
    at_s: float
    ends_s: float

    def __str__(self) -> str:
        ends = datetime.fromtimestamp(self.ends_s)
        day = "" if self.ends_s - self.at_s < 12 * 3600 else f"{ends:%a} "
        return f"{self.what} of {self.done:,} of {self.of:,} pictures, done at about {day}{ends:%H:%M}"


class ReadingProgress:
    """Follows one reading after the other of one device; `current` is a slow one that is under way. For any thread."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.current: Reading | None = None
        self._path, self._clock, self._wall_clock = folder / FILE, clock, wall_clock
        self._what = ""
        self._began_s = self._written_s = 0.0
        self._marks: deque[tuple[float, int]] = deque()

    def begin(self, what: str) -> None:
        """Begin a reading; `what` is read of each picture."""
        self._what, self._began_s, self._written_s = what, self._clock(), self._clock()
        self._marks = deque([(self._began_s, 0)])

    def __call__(self, done: int, of: int) -> None:
        """Take how far it is. The pace is that of the last minute: pictures that are known already cost nothing."""
        now_s = self._clock()
        self._marks.append((now_s, done))
        while len(self._marks) > 2 and self._marks[0][0] < now_s - RECENT_S:
            self._marks.popleft()
        began_s, before = self._marks[0]
        if now_s - self._began_s < SLOW_S or not before < done < of:
            return
        left_s = (of - done) * (now_s - began_s) / (done - before)
        at_s = self._wall_clock()
        self.current = Reading(self._what, done, of, at_s, at_s + left_s)
        if now_s - self._written_s >= WRITE_S:
            self._written_s = now_s
            with suppress(OSError):  # only the status misses it
                atomic.write(self._path, msgspec.json.encode(self.current), flush=False)

    def end(self) -> None:
        """End the reading."""
        self.current = None
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def read(folder: Path, now_s: float | None = None) -> Reading | None:
    """Return the reading that the agent of this folder is working on, if it is a slow one."""
    found = read_json(folder / FILE, Reading)
    now_s = time.time() if now_s is None else now_s
    return found if found and abs(now_s - found.at_s) < STALE_S else None
