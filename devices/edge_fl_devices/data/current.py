"""The data of a device as they are now: one owner for all workers of the agent's process.

A file counts from the look at which the monitor accepts it: then it has not changed for one interval, so no half-copied picture is used. A
file that was deleted, or written anew, counts no longer from the next request on. Before the first acceptance, and without a monitor, the
whole source counts as each request finds it. A Python function is called anew for every request, because nothing tells what it returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from edge_fl.data.samples import ClientData
from edge_fl.errors import DataError
from edge_fl.inputs import InputSpec
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import location
from edge_fl_devices.data.location import Snapshot
from edge_fl_devices.data.record import DataReport
from edge_fl_devices.data.spec import DataSpec

NOTHING = Snapshot(frozenset())


class CurrentData:
    """The current data of one device. `counted` takes the report of every reading into memory. For any thread."""

    def __init__(
        self, config: DeviceConfig, counted: Callable[[DataReport], None] = lambda report: None
    ) -> None:
        self._config, self._counted = config, counted
        self._accepted: Snapshot | None = None
        self._read: tuple[object, ClientData] | None = None
        self._lock = threading.Lock()

    def look(self) -> Snapshot:
        """Return the source as it is at this moment, whether accepted or not. Raises DataError."""
        return location.snapshot(self._config.data)

    def found(self) -> Snapshot:
        """As `look`; no files where the source cannot be listed: reading them raises the error that says why."""
        try:
            return self.look()
        except DataError:
            return NOTHING

    @property
    def accepted(self) -> Snapshot | None:
        """What was accepted last; None before."""
        return self._accepted

    def accept(self, snapshot: Snapshot) -> None:
        """Let the files of this snapshot count, and no others."""
        self._accepted = snapshot

    def now(self) -> Snapshot:
        """Return the files that count: those that were accepted and are still the same. Raises DataError."""
        found, accepted = self.look(), self._accepted
        if found.files is None or accepted is None or accepted.files is None:
            return found
        return Snapshot(found.files & accepted.files)

    def stamp(self) -> str:
        """Return the stamp of the files that count; "" of a function, that of no files where the source cannot be listed."""
        try:
            return self.now().stamp
        except DataError:
            return NOTHING.stamp

    def __call__(self, classes: tuple[str, ...], input: InputSpec) -> ClientData:
        """Read the data into memory, unless the last reading was of the same files for the same classes and input. Raises DataError."""
        from edge_fl_devices.data import load  # here: a head-only agent never reads a sample itself

        with self._lock:
            files = self.now()
            if not files.files and self._read and not self._config.reads_folder:
                files = self._accepted or files  # the file is being written anew: its last content counts
            state = (files, classes, input)
            if files.files is not None and self._read and self._read[0] == state:
                return self._read[1]
            self._read = None  # frees the memory of the samples before
            data, report = load.load_for(self._config, DataSpec(classes, input, files=files.files))
            self._read = (state, data)
        self._counted(report)
        return data
