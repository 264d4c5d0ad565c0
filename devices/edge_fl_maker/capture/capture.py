"""Capture files without labels from a camera, a stream or a watched folder into the pool, within the device's daily budget.

    FOLDER/unlabelled/usage.json     the day's usage of the process that captures

The budget is used up by the agent and this process together. Then the source is closed until the next day.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Union

from msgspec.structs import replace

from edge_fl import threads
from edge_fl.console.output import print_status
from edge_fl.errors import DataError, EdgeFLError
from edge_fl.files.folder import walk
from edge_fl.files.paths import text
from edge_fl.fleet.remote_settings import Budget
from edge_fl.inputs import InputSpec, Kind
from edge_fl.modalities import ABOUT
from edge_fl_devices.board import usage
from edge_fl_devices.board.usage import Meter
from edge_fl_devices.config import MB, CaptureConfig
from edge_fl_maker.capture.camera import LIMITS, Camera, CameraLimits
from edge_fl_maker.capture.pools import Added, Captured, Pool, jpeg
from edge_fl_maker.capture.streams import SOURCES

if TYPE_CHECKING:
    from edge_fl_maker.capture.recordings import StreamFiles

log = logging.getLogger(__name__)

CAMERA, WATCH = "camera:", "watch:"
LARGEST_BYTES = 32 * MB
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
State = Literal["off", "capturing", "waiting", "paused", "disk full", "not writable"]


class CameraFiles(Camera):
    """The newest frames of a camera or stream."""

    def take(self) -> Iterator[Captured]:
        """Wait for the next frame; none once the camera is closed."""
        if frame := self.newest():
            yield Captured(jpeg(frame.pixels), self.name, "picture")


class FolderFiles:
    """New files of a kind below a folder, which are left there. Raises DataError if it is missing.

    A file of at most LARGEST_BYTES counts once it is unchanged between two looks.
    """

    interrupted = False

    def __init__(self, folder: Path, kind: Kind = "picture") -> None:
        self._folder, self._about = folder, ABOUT[kind]
        self._before: dict[Path, tuple[int, int]] = {}
        self._taken: dict[Path, tuple[int, int]] = {}
        self._look()

    def take(self) -> Iterator[Captured]:
        """Yield the new files in the order of their names."""
        now = self._look()
        before, self._before = self._before, now
        for path, stamp in now.items():
            if before.get(path) == stamp != self._taken.get(path):
                try:
                    content = path.read_bytes()
                except OSError:
                    continue  # removed, or not readable yet
                yield Captured(content, text(path))
                self._taken[path] = stamp

    def close(self) -> None: ...

    def _look(self) -> dict[Path, tuple[int, int]]:
        if not self._folder.is_dir():
            raise DataError(f"{text(self._folder)}: no such folder; expected one with {self._about.files}")
        found = {}
        for path in walk(self._folder).files:
            if path.suffix.lower() in self._about.suffixes:
                with suppress(OSError):
                    stat = path.stat()
                    if stat.st_size <= LARGEST_BYTES:
                        found[path] = (stat.st_size, stat.st_mtime_ns)
        return found


FileSource = Union[CameraFiles, FolderFiles, "StreamFiles"]
"""`take` yields the files that are there now; one that is not followed by a request for the next is yielded again later. `interrupted`:
the source gives none at present.
"""


def open_source(
    config: CaptureConfig,
    notify: Callable[[str], None],
    limits: CameraLimits = LIMITS,
    input: InputSpec | None = None,
) -> FileSource:
    """Open the source of a capture configuration, for a release that takes `input`. Raises InputError or ConnectError."""
    source = config.source
    if source.startswith(WATCH):
        return FolderFiles(Path(source.removeprefix(WATCH)), input.kind if input else "picture")
    if source.partition(":")[0] in SOURCES:
        from edge_fl_maker.capture.recordings import StreamFiles  # here: others need no recordings

        return StreamFiles(source, input, notify)
    return CameraFiles(source.removeprefix(CAMERA), crop=config.crop, limits=limits, notify=notify)


class Capture:
    """Adds files of `config.source` to the pool in a thread, and those of other programs through `add`."""

    def __init__(
        self,
        config: CaptureConfig,
        pool: Pool,
        budget: Budget,
        notify: Callable[[str], None] = print_status,
        limits: CameraLimits = LIMITS,
    ) -> None:
        self._config, self._pool, self._budget = config, pool, budget
        self._notify, self._limits = notify, limits
        self._bytes, self._lock = 0, threading.Lock()
        self._meter = Meter(pool.folder, lambda: self._bytes, watts=budget.watts)
        self._state: tuple[State, str] = ("off", "")
        self._added = Counter[str]()
        self._source: FileSource | None = None
        self._stopped = threading.Event()
        self._thread = threads.lasting(
            self._run,
            "edge-fl-capture",
            stopped=self._stopped,
            report=lambda why: self._become("waiting", why),
        )

    def start(self) -> None:
        """Start the thread, if there is a source."""
        if self._config.source:
            self._thread.start()

    def stop(self) -> None:
        """End the thread and close the source."""
        self._stopped.set()
        if source := self._source:
            source.close()
        if self._thread.is_alive():
            self._thread.join()

    def add(self, content: bytes, source: str, kind: Kind | None = None) -> Added:
        """Add a file to the pool, unless the day's budget is used up."""
        why = self._over_budget(len(content))
        added = Added("", "paused", why) if why else self._pool.add(content, source, kind)
        with self._lock:
            self._added[added.why or "added"] += 1
        return added

    def status(self) -> dict[str, object]:
        """State and its reason; size of the pool; how many pictures were added since the start, and not added, by reason."""
        state, why = self._state
        if state == "capturing" and self._source and self._source.interrupted:
            state = "waiting"
        return {
            "state": state,
            "why": why,
            "pictures": len(self._pool.names()),
            "bytes": self._pool.size_bytes,
            "since_start": dict(self._added),
        }

    def _run(self) -> None:
        retry_s = MIN_RETRY_S
        while not self._stopped.is_set():
            if why := self._over_budget():
                self._become("paused", why)
                retry_s = MAX_RETRY_S
            else:
                try:
                    self._capture()
                    retry_s = MIN_RETRY_S
                except EdgeFLError as error:
                    self._become("waiting", f"{error.message}; trying again")
                    retry_s = min(2 * retry_s, MAX_RETRY_S)
                except Exception as error:  # the status shows the type; the log has the rest
                    log.exception("unexpected error while capturing")
                    self._become("waiting", type(error).__name__)
                    retry_s = MAX_RETRY_S
            self._stopped.wait(retry_s)
        self._state = ("off", "")

    def _capture(self) -> None:
        """Capture until stopped or until the budget is used up."""
        input = self._pool.input
        with closing(open_source(self._config, self._notify, self._limits, input)) as self._source:
            self._become("capturing", "")
            while not self._stopped.is_set() and self._pool.input == input:
                for found in self._source.take():
                    added = self.add(*found)
                    if added.why == "paused" or self._pool.input != input:  # a release with other channels
                        return
                    if added.why == "disk full" or added.why == "not writable":
                        self._become(added.why, added.detail)
                        break  # the file comes again
                    self._become("capturing", "")
                self._stopped.wait(self._config.every_s)

    def _become(self, state: State, why: str) -> None:
        """Change the state, and report the change."""
        before, self._state = self._state, (state, why)
        if before[0] != state and (before[0], state) != ("off", "capturing"):
            self._notify(f"capture: {state}" + (f" ({why})" if why else ""))

    def _over_budget(self, more_bytes: int = 0) -> str:
        """Name the exhausted budget; "" if there is none."""
        with self._lock:
            self._bytes += more_bytes
            own, agent = self._meter.update(), usage.read(self._pool.folder.parent)
        if agent.day == own.day:
            own = replace(own, bytes=own.bytes + agent.bytes, cpu_s=own.cpu_s + agent.cpu_s)
        return usage.exceeded(own, self._budget)
