"""What a running agent shows on its terminal."""

import math
from collections.abc import Callable

from edge_fl.console.progress import Count, Progress
from edge_fl.errors import ConnectError
from edge_fl_devices.features.progress import ReadingProgress
from edge_fl_devices.runtime.device import Device

CONNECT_S = 15.0
READING_S = 60.0  # between lines about a slow reading of the pictures


def report_waiting(agent: Device, show: Callable[[str], None]) -> None:
    """Report every CONNECT_S that the broker cannot be reached, until it is."""
    while True:
        try:
            agent.connection.wait(CONNECT_S)
        except ConnectError as error:
            if agent.denied or agent.state.status == "disconnected":
                return
            show(f"{error}; trying again")
        else:
            return


class StatusDisplay:
    """Prints each new status, shows the progress of downloads, and prints that of a slow reading of the pictures."""

    def __init__(self, agent: Device, progress: Progress, reading: ReadingProgress) -> None:
        self._agent, self._progress, self._reading = agent, progress, reading
        self._line = ""
        self._reading_at_s = -math.inf
        self._fetching: Count | None = None

    def update(self) -> None:
        """Show what has changed."""
        before, self._fetching = self._fetching, self._agent.fetching
        if before and (self._fetching is None or self._fetching.stage != before.stage):
            self._progress(before._replace(done=before.of))
        if self._fetching:
            self._progress(self._fetching)
        if (reading := self._reading.current) and reading.at_s - self._reading_at_s >= READING_S:
            self._reading_at_s = reading.at_s
            self._progress.print(f"{self._agent.name}: {reading}")
        if self._agent.state.published is None:
            return
        status, activity, release, why = self._agent.state.published
        line = f"{self._agent.name}: {status}, {activity}"
        line += (f", release {release}" if release else "") + (f" ({why})" if why else "")
        if line != self._line:
            self._progress.print(line)
            self._line = line
